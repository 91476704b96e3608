"""The sources of settings: flags override FASER_* variables, which override the config file and the defaults.

Every source provides texts with a label, so that a problem names the flag, variable or key of the value; the
declarations convert and check them. All problems of all sources are reported together. The command line is read
with argparse, whose parser is built from the declared settings, and from vLLM's other flags, so that each of those
is accepted or refused with its own reason.
"""

import argparse
import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import yaml

from faser.config.declaration import (
    Kind,
    Setting,
    did_you_mean,
    find_problems,
    flag_label,
    read,
    settings_of,
    shortened,
)
from faser.config.engine import EngineConfig
from faser.config.environment import flag_environment
from faser.config.foreign import Foreign
from faser.config.llamacpp_names import LLAMACPP_FLAGS
from faser.config.server import ServerConfig
from faser.config.vllm_names import VLLM_FLAGS
from faser.errors import ConfigError

_log = logging.getLogger("faser")

SETTINGS = settings_of(EngineConfig) + settings_of(ServerConfig)
FOREIGN_FLAGS = VLLM_FLAGS + LLAMACPP_FLAGS

ReadEnvironment = Callable[[Sequence[Setting]], tuple[dict[str, tuple[str, str]], list[str]]]
Number = TypeVar("Number", int, float)

_HELP, _CONFIG, _FOREIGN = "faser help", "faser config", "vllm "  # in the names of argparse's values
_KUBERNETES_VARIABLE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")
_KUBERNETES_VALUE = re.compile(r"(tcp|udp|sctp)://")


class UsageError(ConfigError):
    """Settings that cannot be used. problems: one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The value of one setting in one source. label: the name of the setting in that source."""

    texts: tuple[str, ...]
    label: str


@dataclass(slots=True)
class Findings:
    """The settings, problems and warnings of the sources read so far.

    topic: of --help; None: no help was asked for. config_file: of --config.
    """

    given: dict[str, Given] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    topic: str | None = None
    config_file: str | None = None

    def add_foreign(self, foreign: Foreign, label: str, text: str) -> None:
        problems, warnings = foreign.answer(label, text)
        self.problems += problems
        self.warnings += warnings

    def label(self, name: str) -> str:
        """Return the name of a setting in messages: the flag, variable or key that gives it; else its flag."""
        return self.given[name].label if name in self.given else flag_label(name)

    def fill(self, source: Mapping[str, Given]) -> None:
        """Add the settings that no earlier source has."""
        self.given = {**source, **self.given}


def settle(findings: Findings, config_types: Sequence[Any]) -> list[Any]:
    """Build one config of each type. Raises UsageError with every problem of every source."""
    values, unreadable = _read_all(findings, [each for kind in config_types for each in settings_of(kind)])
    problems = [*findings.problems, *unreadable.values()]

    def own(config_type: type) -> dict[str, Any]:
        return {each.name: values[each.name] for each in settings_of(config_type) if each.name in values}

    for config_type in config_types:
        names = [each.name for each in settings_of(config_type)]
        problems += find_problems(
            config_type, own(config_type), findings.label, [n for n in names if n in unreadable]
        )
    if problems:
        raise UsageError(problems)
    return [config_type(**own(config_type)) for config_type in config_types]


def _read_all(findings: Findings, settings: Iterable[Setting]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values by name of the setting, and the problems of those that cannot be read."""
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for each in settings:
        if each.name in findings.given:
            given = findings.given[each.name]
            if not any(text.strip() for text in given.texts):
                problems[each.name] = f"{given.label} is empty; give it a value, or leave it out"
                continue
            try:
                values[each.name] = read(each, given.texts)
            except ValueError as reason:
                text = "***" if each.secret else shortened(" ".join(given.texts))
                problems[each.name] = f"{given.label} is {text}; {reason}"
    return values, problems


def server_settings(findings: Findings) -> tuple[EngineConfig, ServerConfig]:
    """Add the variables and the file of --config to the flags, and build both configs. Raises UsageError."""
    add_environment(findings, SETTINGS)
    if findings.config_file is not None:
        add_file(findings, findings.config_file, SETTINGS)
    return settle_server(findings)


def settle_server(findings: Findings) -> tuple[EngineConfig, ServerConfig]:
    """Build both configs of a server, the engine's as the other needs it. Raises UsageError."""
    found = settle(findings, (EngineConfig, ServerConfig))
    engine, server = cast(EngineConfig, found[0]), cast(ServerConfig, found[1])
    if server.needs_lora and not engine.enable_lora:
        if "enable_lora" in findings.given:
            name = "lora_modules" if server.lora_modules else "allow_runtime_lora_updating"
            raise UsageError([f"{findings.label('enable_lora')} is false; {findings.label(name)} needs it"])
        engine = replace(engine, enable_lora=True)
    return engine, server


def engine_settings(prog: str, arguments: Sequence[str]) -> Findings:
    """The flags and variables of an engine, for a command other than `serve`. Variables may be a server's too."""
    findings = engine_flags(prog, arguments)
    add_environment(findings, SETTINGS)
    return findings


def engine_flags(prog: str, arguments: Sequence[str]) -> Findings:
    """Only the flags."""
    findings = parse(prog, arguments, settings_of(EngineConfig))
    if findings.config_file is not None:
        findings.problems.append(f"--config is {findings.config_file}; only faser serve reads a config file")
    return findings


def engine_config(findings: Findings) -> EngineConfig:
    (config,) = settle(findings, (EngineConfig,))
    return cast(EngineConfig, config)


class CommandParser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError instead of leaving the process."""

    def __init__(self, prog: str, **options: str) -> None:
        super().__init__(prog=prog, add_help=False, allow_abbrev=False, **options)  # type: ignore[arg-type]

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Allow no abbreviation of a flag with one dash either; allow_abbrev is about two. So -c is not -cc."""
        found: list[Any] = super()._get_option_tuples(option_string)
        return [each for each in found if each[1] == option_string[:2]]

    def error(self, message: str) -> NoReturn:
        """argparse says "argument --rounds: it is 0; …" for "--rounds is 0; …"."""
        raise UsageError([re.sub(r"^argument (\S+): it is", r"\1 is", message)])


def number(
    kind: Callable[[str], Number], limits: str, within: Callable[[Number], bool]
) -> Callable[[str], Number]:
    """A type for argparse: reads a number, and names its limits where a text is no such number."""

    def read_number(text: str) -> Number:
        with contextlib.suppress(ValueError):
            if within(found := kind(text)):
                return found
        raise argparse.ArgumentTypeError(f"it is {text}; it must be {limits}")

    return read_number


whole_number = number(int, "a whole number of at least 1", lambda found: found >= 1)


def parse(prog: str, arguments: Sequence[str], settings: Sequence[Setting]) -> Findings:
    """Read a command line of settings, with one positional MODEL. Raises UsageError for a missing value.

    Unknown and unsupported flags become problems in the findings, to be shown together with all others.
    """
    parser = _parser(prog, settings)
    found, rest = parser.parse_known_args(_normalised(arguments, settings))
    values = vars(found)
    findings = Findings(topic=values.get(_HELP), config_file=values.get(_CONFIG))
    for each in settings:
        if values.get(each.name) is not None:
            findings.given[each.name] = Given(texts=tuple(values[each.name]), label=each.flag)
    _take_positional(findings, values.get("MODEL"))
    for foreign in FOREIGN_FLAGS:
        for text in _foreign_texts(values.get(_FOREIGN + foreign.key), foreign):
            findings.add_foreign(foreign, foreign.names[0], text)
    findings.problems += _unknown(rest, settings)
    return findings


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


def _add_foreign(parser: CommandParser, foreign: Foreign) -> None:
    if foreign.switch:
        _add_switch(parser, foreign.names, _FOREIGN + foreign.key)
    else:
        nargs = "*" if foreign.many else "?"
        parser.add_argument(*foreign.names, dest=_FOREIGN + foreign.key, nargs=nargs, action="append")


def _foreign_texts(given: Sequence[Any] | None, foreign: Foreign) -> list[str]:
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
    unknown = [argument.partition("=")[0] for argument in rest if argument.startswith("-")]
    if not unknown:
        return [f"unexpected argument '{argument}'" for argument in rest]
    return [f"{flag}: unknown flag.{did_you_mean(flag, known)}" for flag in unknown]


def add_environment(
    findings: Findings, settings: Sequence[Setting], read_environment: ReadEnvironment = flag_environment
) -> None:
    """Read the FASER_* variables, except those that Kubernetes sets for a service named faser.

    Several values of one variable are separated by commas.
    """
    multi_valued = {each.name for each in settings if each.one_flag_many or each.kind is Kind.TEXTS}
    found, unknown = read_environment(settings)
    source = {}
    for name, (variable, text) in found.items():
        if _KUBERNETES_VALUE.match(text) and _KUBERNETES_VARIABLE.search(variable):
            findings.warnings.append(
                f"{variable} is {text}: set by Kubernetes for a service, not read as a setting"
            )
            continue
        several = name in multi_valued and not text.lstrip().startswith("{")  # JSON has commas of its own
        texts = tuple(part.strip() for part in text.split(",")) if several else (text,)
        source[name] = Given(texts=texts, label=variable)
    known = [each.variable for each in settings]
    for variable in unknown:
        if not _KUBERNETES_VARIABLE.search(variable):
            findings.problems.append(f"{variable}: unknown variable.{did_you_mean(variable, known)}")
    findings.fill(source)


def add_file(findings: Findings, path: str, settings: Sequence[Setting]) -> None:
    """Read the keys of a YAML file: the names of the flags, with dashes or underscores."""
    try:
        content = _Loader(Path(path).read_text(encoding="utf-8")).get_single_data()
    except (OSError, UnicodeDecodeError) as error:
        findings.problems.append(f"--config is {path}; it cannot be read: {_reason(error)}")
        return
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits
        findings.problems.append(f"--config is {path}; it is not YAML: {' '.join(str(error).split())}")
        return
    if content is None:
        return
    if not isinstance(content, dict):
        findings.problems.append(f"--config is {path}; it must contain keys and values, like port: 8000")
        return
    _add_keys(findings, content, settings, f"{path}: ", "key")


def engine_options(options: Mapping[str, Any]) -> EngineConfig:
    """Build an engine's settings from the keyword arguments of a script, by the names of the flags.

    Raises UsageError with every problem, in the words that the command line has for it.
    """
    findings = Findings()
    engine, server = settings_of(EngineConfig), settings_of(ServerConfig)
    of_server = {name: options[name] for name in options if any(name == each.name for each in server)}
    findings.problems += [
        f"{name} is a setting of `faser serve`; LLM has no server. Remove it." for name in of_server
    ]
    _add_keys(findings, {name: options[name] for name in options if name not in of_server}, engine, "", "option")
    for warning in findings.warnings:
        _log.warning("%s", warning)
    return engine_config(findings)


def _add_keys(
    findings: Findings, content: Mapping[Any, Any], settings: Sequence[Setting], origin: str, kind: str
) -> None:
    """Add the values of keys that are names of flags, with dashes or underscores. kind: their name."""
    names = {alias.lstrip("-"): each.name for each in settings for alias in (each.flag, *each.aliases)}
    foreign = {each.key: each for each in FOREIGN_FLAGS}
    source = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        label = f"{origin}{key}"
        try:
            texts = _texts(value)
        except (TypeError, ValueError, RecursionError):  # a binary value, a set, or a list that contains itself
            findings.problems.append(f"{label} has a value that JSON has no form for")
            continue
        if name in names:
            if value is not None:
                source[names[name]] = Given(texts=texts, label=label)
        elif name in foreign:
            findings.add_foreign(foreign[name], label, texts[0])
        else:
            findings.problems.append(f"{origin}unknown {kind} '{key}'.{did_you_mean(name, names)}")
    findings.fill(source)


class _Loader(yaml.SafeLoader):
    """YAML without dates: 2026-01-31 is a text, as it is in a flag."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the library's own name and form
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _texts(value: Any) -> tuple[str, ...]:
    """A YAML value as texts, like the values of a flag."""
    if isinstance(value, list | tuple):
        return tuple(_text(each) for each in value) or ("",)
    return (_text(value),)


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str | Path) else json.dumps(value)


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
