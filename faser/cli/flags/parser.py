"""Reads a command line with argparse, whose parser is built from the declared settings.

Takes every value as text; the declarations in faser.config convert and check it. The parser also knows
vLLM's other flags, so that each is accepted or refused with its own reason.
"""

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from faser.cli.flags.sources import Findings, Given, UsageError
from faser.config.declaration import Kind, Setting, did_you_mean
from faser.config.vllm_flags import FOREIGN_FLAGS, ForeignFlag

_HELP = "faser help"
_CONFIG = "faser config"
_FOREIGN = "vllm "


class CommandParser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError instead of leaving the process."""

    def __init__(self, prog: str, **options: str) -> None:
        super().__init__(prog=prog, add_help=False, allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """argparse says "argument --rounds: it is 0; …" for "--rounds is 0; …"."""
        raise UsageError([re.sub(r"^argument (\S+): it is", r"\1 is", message)])


class ParsedCommandLine:
    """The content of a command line. topic: of --help; None: no help was asked for. config_file: of --config."""

    def __init__(self, *, findings: Findings, topic: str | None, config_file: str | None) -> None:
        self.findings = findings
        self.topic = topic
        self.config_file = config_file


def parse(prog: str, arguments: Sequence[str], settings: Sequence[Setting]) -> ParsedCommandLine:
    """Read a command line of settings, with one positional MODEL. Raises UsageError for a missing value.

    Unknown and unsupported flags become problems in the findings, to be shown together with all others.
    """
    parser = _parser(prog, settings)
    found, rest = parser.parse_known_args(_normalised(arguments, settings))
    values = vars(found)
    findings = Findings()
    for each in settings:
        if values.get(each.name) is not None:
            findings.given[each.name] = Given(texts=tuple(values[each.name]), label=each.flag)
    _take_positional(findings, values.get("MODEL"))
    for foreign in FOREIGN_FLAGS:
        for text in _texts(values.get(_FOREIGN + foreign.key), foreign):
            findings.add_foreign(foreign, foreign.flags[0], text)
    findings.problems += _unknown(rest, settings)
    return ParsedCommandLine(findings=findings, topic=values.get(_HELP), config_file=values.get(_CONFIG))


def _parser(prog: str, settings: Sequence[Setting]) -> CommandParser:
    parser = CommandParser(prog)
    parser.add_argument("MODEL", nargs="?")
    parser.add_argument("--help", "-h", nargs="?", const="", dest=_HELP)
    parser.add_argument("--config", dest=_CONFIG)
    for each in settings:
        _add_setting(parser, each)
    for foreign in FOREIGN_FLAGS:
        _add_foreign(parser, foreign)
    return parser


def _add_setting(parser: CommandParser, each: Setting) -> None:
    if each.kind is Kind.SWITCH:
        _add_switch(parser, (each.flag, *each.aliases), each.name)
    elif each.one_flag_many:
        parser.add_argument(each.flag, *each.aliases, dest=each.name, nargs="+", action="extend")
    else:
        parser.add_argument(each.flag, *each.aliases, dest=each.name, action="append")


def _add_switch(parser: CommandParser, flags: tuple[str, ...], name: str) -> None:
    negated = ["--no-" + flag.removeprefix("--") for flag in flags if flag.startswith("--")]
    parser.add_argument(*flags, dest=name, action="append_const", const="true")
    parser.add_argument(*negated, dest=name, action="append_const", const="false")


def _add_foreign(parser: CommandParser, foreign: ForeignFlag) -> None:
    if foreign.switch:
        _add_switch(parser, foreign.flags, _FOREIGN + foreign.key)
    else:
        nargs = "*" if foreign.many else "?"
        parser.add_argument(*foreign.flags, dest=_FOREIGN + foreign.key, nargs=nargs, action="append")


def _texts(given: Sequence[Any] | None, foreign: ForeignFlag) -> list[str]:
    """One text per occurrence of the flag on the command line."""
    if foreign.many:
        return [" ".join(values) for values in given or ()]
    return [value or "" for value in given or ()]


def _normalised(arguments: Sequence[str], settings: Sequence[Setting]) -> list[str]:
    """Spell flags in one way: dashes for underscores, and JSON for dotted flags.

    --override-generation-config.top_k 5 becomes --override-generation-config {"top_k": 5}.
    """
    objects = {each.flag for each in settings if each.kind is Kind.JSON}
    normalised: list[str] = []
    remaining = list(reversed(arguments))
    while remaining:
        argument = remaining.pop()
        if argument == "--":
            return [*normalised, argument, *reversed(remaining)]
        if not argument.startswith("--"):
            normalised.append(argument)
            continue
        name, equals, value = argument.partition("=")
        base, dot, path = name.partition(".")
        base = base.replace("_", "-")
        if dot and base in objects:
            if not equals:
                value = remaining.pop() if remaining else ""
            normalised += [base, _nested(path, value)]
        else:
            normalised.append(base + dot + path + equals + value)
    return normalised


def _nested(path: str, text: str) -> str:
    """A JSON object with the value at the dotted path. A value that is not JSON is a string."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    for key in reversed(path.split(".")):
        value = {key: value}
    return json.dumps(value)


def _take_positional(findings: Findings, model: str | None) -> None:
    if model is None:
        return
    if "model" in findings.given and findings.given["model"].texts[-1] != model:
        other = findings.given["model"].texts[-1]
        findings.problems.append(f"MODEL is {model} and --model is {other}; keep one")
    findings.given["model"] = Given(texts=(model,), label="MODEL")


def _unknown(rest: Sequence[str], settings: Sequence[Setting]) -> list[str]:
    """One problem per unknown flag; if there is none, one per surplus argument.

    An argument next to an unknown flag may be its value, so it is not reported.
    """
    known = [flag for each in settings for flag in (each.flag, *each.aliases)]
    known += [flag for foreign in FOREIGN_FLAGS for flag in foreign.flags]
    unknown = [argument.partition("=")[0] for argument in rest if argument.startswith("-")]
    if not unknown:
        return [f"unexpected argument '{argument}'" for argument in rest]
    return [f"{flag}: unknown flag.{did_you_mean(flag, known)}" for flag in unknown]
