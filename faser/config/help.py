"""Help texts built from the settings: the common flags, a group, one flag, all, or the tables of the docs."""

import json
import textwrap
from collections.abc import Sequence

from faser.config.declaration import GROUPS, Kind, Setting, did_you_mean, limits, shown
from faser.config.foreign import Foreign, Support
from faser.config.sources import FOREIGN_FLAGS, UsageError
from faser.config.speculation import SpeculationConfig
from faser.config.speculation_keys import FIELDS, KEYS
from faser.config.vllm_names import FOREIGN_KEYS

_DEFAULTS = SpeculationConfig()
_INDENT = 32
_WIDTH = 100


def help_text(prog: str, topic: str, settings: Sequence[Setting]) -> str:
    """The output of --help=topic: a group, a flag, "all" or "markdown"; the common flags for an empty topic.

    Raises UsageError for any other topic.
    """
    if topic == "":
        return _common(prog, [each for each in settings if each.common])
    if topic == "all":
        return "\n\n".join(_group(group, settings) for group in GROUPS)
    if topic == "markdown":
        return markdown(settings)
    name = topic.lower().replace("_", "-").lstrip("-")
    if name in GROUPS:
        return _group(name, settings)
    for each in settings:
        if name == each.flag.lstrip("-"):
            return _details(each)
    known = [*GROUPS, *(each.flag.lstrip("-") for each in settings), "all", "markdown"]
    raise UsageError(
        [f"--help={topic}: no such topic.{did_you_mean(name, known)} Groups: {', '.join(GROUPS)}, all"]
    )


def markdown(settings: Sequence[Setting]) -> str:
    """Tables of all settings and of vLLM's other flags."""
    parts = ["# Flags of `faser serve`\n\nMade by `faser serve --help=markdown`.\n"]
    parts.append(
        "Every setting is a flag, a variable and a key of the file given with `--config`. Flags win over\n"
        "variables, variables over the file. `--max-num-seqs 8`, `FASER_MAX_NUM_SEQS=8` and the key\n"
        "`max-num-seqs: 8` are the same.\n"
        "Switches have a `--no-` form. `FASER_CACHE_DIR` says where models, compiled kernels and measured step\n"
        "times are kept. `FASER_CPU_ISA` names an instruction set that the CPU has, such as avx2: kernels for it\n"
        "compute the same bits on every machine of a mixed fleet. `faser env` shows the one in use.\n"
        "`FASER_STEP_TIMES_SECONDS` is for how long a first start times steps: 3.5 on a CPU, 30 on a GPU. Fewer\n"
        "make a shorter start and rougher prices of drafts.\n"
    )
    for group, title in GROUPS.items():
        parts.append(f"## {group.capitalize()}: {title}\n")
        parts.append("| flag | default | limits | what it does |\n| --- | --- | --- | --- |")
        parts.append("\n".join(_row(each) for each in settings if each.group == group) + "\n")
    parts.append("## Keys of `--speculative-config`\n")
    parts.append(
        '`--speculative-config \'{"method": "ngram"}\'` and `--speculative-config.method ngram` are the same.\n'
        "[speculation.md](speculation.md) explains them.\n\n"
        "| key | default | limits | what it does |\n| --- | --- | --- | --- |"
    )
    parts.append("\n".join(_key_row(key) for key in KEYS) + "\n")
    parts.append("Known by name and refused, or accepted with a warning where they can only change speed:\n")
    parts.append("| key | accepted | because |\n| --- | --- | --- |")
    parts.append("\n".join(_foreign_key_rows()) + "\n")
    parts.append("## Flags of vLLM and llama.cpp, and earlier ones\n")
    parts.append(
        "Known by name. A value that means off, one or the default is accepted for each of them.\n\n"
        "| flag | else | because |\n| --- | --- | --- |"
    )
    parts.append("\n".join(_foreign_rows()))
    return "\n".join(parts)


def _foreign_rows() -> list[str]:
    words = {
        Support.ACCEPT: "accepted",
        Support.WARN: "accepted, with a warning",
        Support.REFUSE: "refused",
    }
    return [
        f"| `{' '.join(each.names)}` | {words[each.support]} | {each.reason}"
        f"{f'; use {each.instead}' if each.instead else ''} |"
        for each in FOREIGN_FLAGS
    ]


def _key_row(key: Setting) -> str:
    default = None if key.kind is Kind.JSON else getattr(_DEFAULTS, FIELDS.get(key.name, key.name), None)
    text = key.help.replace("|", "\\|")
    return f"| `{key.name}` | {'none' if default is None else default} | {limits(key)} | {text} |"


def _foreign_key_rows() -> list[str]:
    return [f"| `{name}` | {_accepted(each)} | {each.reason} |" for name, each in FOREIGN_KEYS.items()]


def _accepted(each: Foreign) -> str:
    return "all" if each.support is Support.WARN else ", ".join(json.dumps(value) for value in each.neutral)


def _row(each: Setting) -> str:
    flags = ", ".join(f"`{flag}`" for flag in (each.flag, *each.aliases))
    text = each.help.replace("|", "\\|")
    return f"| {flags} | {_default(each)} | {limits(each)} | {text} |"


def _common(prog: str, common: Sequence[Setting]) -> str:
    topics = "\n".join(f"  --help={name:<22} {title}" for name, title in GROUPS.items())
    return (
        f"usage: {prog} [MODEL] [flags]\n\n"
        f"Serve a model over HTTP. Without MODEL: the embedded SmolLM2-135M-Instruct.\n\n"
        f"Common flags:\n{_lines(common)}\n\n"
        f"More help:\n{topics}\n"
        f"  --help=max-num-seqs           one flag\n  --help=all                    everything"
    )


def _group(group: str, settings: Sequence[Setting]) -> str:
    own = [each for each in settings if each.group == group]
    return f"{group}: {GROUPS[group]}\n{_lines(own)}"


def _lines(settings: Sequence[Setting]) -> str:
    return "\n".join(_line(each) for each in settings)


def _line(each: Setting) -> str:
    usage = each.flag if each.kind is Kind.SWITCH else f"{each.flag} {each.placeholder}"
    default = "" if each.default in (None, ()) else f" [{_default(each)}]"  # its help says what it is then
    text = ("\n" + " " * _INDENT).join(textwrap.wrap(each.help + default, _WIDTH - _INDENT))
    gap = "\n" + " " * _INDENT if len(usage) > _INDENT - 4 else " " * (_INDENT - 2 - len(usage))
    return f"  {usage}{gap}{text}"


def _details(each: Setting) -> str:
    lines = [_line(each).strip(), f"  variable: {each.variable}", f"  key in --config: {each.flag.lstrip('-')}"]
    if each.aliases:
        lines.append(f"  same as: {' '.join(each.aliases)}")
    if limits(each):
        lines.append(f"  must be: {limits(each)}")
    if each.kind is Kind.SWITCH:
        lines.append(f"  off: --no-{each.flag.lstrip('-')}")
    if each.name == "speculative_config":
        lines += ["  keys:", *(f"    {key.name:<38} {key.help}" for key in KEYS)]
    return "\n".join(lines)


def _default(each: Setting) -> str:
    return "none" if each.default in (None, ()) else shown(each, each.default)
