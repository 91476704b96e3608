"""Setting: one knob, declared once. Its flag, variable, config file key, help and documentation follow from it.

Owns how a setting is described, read from text and checked. engine.py and server.py declare the settings,
speculation_keys.py those in the JSON of `--speculative-config`; sources.py and help.py use them.
"""

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

from faser.config.foreign import Foreign
from faser.errors import ConfigError

MODEL, ENGINE, SPECULATION, SERVER, OUTPUT = "model", "engine", "speculation", "server", "output"
GROUPS = {
    MODEL: "the model and its weights",
    ENGINE: "how the engine uses the machine",
    SPECULATION: "how tokens are drafted and verified",
    SERVER: "the HTTP server",
    OUTPUT: "what answers contain",
}

Label = Callable[[str], str]  # what messages call a setting

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_BYTE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SWITCHES = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)


class Kind(StrEnum):
    """Kinds of values that settings take. The text of a member is the placeholder in help."""

    TEXT = "text"
    FILE = "file"
    OUTPUT_FILE = "path"
    INTEGER = "n"
    COUNT = "count"
    COUNTS = "count count …"
    BYTES = "size"
    NUMBER = "x"
    SWITCH = "true|false"
    JSON = "json"
    TEXTS = "name"
    LIST = "text|[…]"


_MEANING = {
    Kind.TEXT: "text",
    Kind.FILE: "the path of a file that can be read",
    Kind.OUTPUT_FILE: "the path of a file that can be written, in a folder that exists",
    Kind.INTEGER: "a whole number",
    Kind.COUNT: "a whole number, such as 4096, 4k (4000) or 4K (4096)",
    Kind.COUNTS: "whole numbers, such as 1 8 64",
    Kind.BYTES: "a size, such as 512M or 2GiB (units are powers of 1024)",
    Kind.NUMBER: "a number",
    Kind.SWITCH: "true or false",
    Kind.JSON: "a JSON object",
    Kind.TEXTS: "text that is not empty",
    Kind.LIST: 'text, or a JSON list such as ["a", "b"]',
}
_LONGEST_SHOWN = 80  # characters of a value in a message
_PARTS = re.compile(r"[^-_.]+")  # of a name
_LONG = 8  # characters of a name in which two errors still say which one is meant
_SHORTEST_BEGINNING = 3  # characters of a part


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One knob. name: the field's, with underscores.

    aliases: further flags. low, high: inclusive limits; above: low itself is excluded.
    synonyms: accepted spellings of a choice, or of None. refused: known values that are not supported, each with
    the reason. numbered: choices that may have a number, as in cuda:1.
    one_flag_many: the flag takes several values at once. secret: the value is never shown. example: of a value.
    common: shown in the short help and in docs/start.md.
    """

    help: str
    group: str
    kind: Kind
    name: str = ""
    default: Any = None
    metavar: str = ""
    aliases: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    above: bool = False
    multiple_of: int | None = None
    choices: tuple[str, ...] = ()
    numbered: tuple[str, ...] = ()
    synonyms: tuple[tuple[str, str | None], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    one_flag_many: bool = False
    example: str = ""
    secret: bool = False
    common: bool = False

    @property
    def flag(self) -> str:
        return flag_label(self.name)

    @property
    def variable(self) -> str:
        return "FASER_" + self.name.upper()

    @property
    def placeholder(self) -> str:
        return self.metavar or ("|".join(self.words) if self.choices else str(self.kind))

    @property
    def words(self) -> tuple[str, ...]:
        """The choices as an operator writes them, those with a number last."""
        return self.choices + tuple(f"{each}:N" for each in self.numbered)


def flag_label(name: str) -> str:
    """A setting as its flag."""
    return "--" + name.replace("_", "-")


def setting(group: str, kind: Kind, default: Any, help: str, **description: Any) -> Any:
    """A dataclass field that is a setting. description: further fields of Setting."""
    described = Setting(help=help, group=group, kind=kind, default=default, **description)
    return field(default=default, metadata={"setting": described})


def settings_of(config_type: type) -> tuple[Setting, ...]:
    """All settings of a config class, in the order of declaration."""
    described = [each for each in fields(config_type) if "setting" in each.metadata]
    return tuple(replace(each.metadata["setting"], name=each.name) for each in described)


def read(each: Setting, texts: tuple[str, ...]) -> Any:
    """The value of the texts that a flag, a variable or a config file gives.

    Raises ValueError that says what is expected. Does not check limits; `complaint` does.
    """
    try:
        return _read(each, texts)
    except (ValueError, KeyError, RecursionError):
        raise ValueError(f"it must be {meaning(each)}") from None


def _read(each: Setting, texts: tuple[str, ...]) -> Any:
    text = texts[-1].strip()
    match each.kind:
        case Kind.TEXT | Kind.FILE | Kind.OUTPUT_FILE:
            return dict(each.synonyms).get(text, text)
        case Kind.INTEGER:
            return int(text)
        case Kind.COUNT if each.default is None and text in ("auto", "-1", *dict(each.synonyms)):
            return None
        case Kind.COUNT:
            return _scaled(r"(?P<number>-?\d{1,999}(\.\d+)?)(?P<unit>[kmgKMG])?", _UNITS, text)
        case Kind.COUNTS:
            return tuple(int(one) for one in texts)
        case Kind.BYTES:
            return parse_bytes(text)
        case Kind.NUMBER:
            return float(text)
        case Kind.SWITCH if each.default is None and text.lower() == "auto":
            return None
        case Kind.SWITCH:
            return _SWITCHES[text.lower()]
        case Kind.JSON:
            return _object(texts)
        case Kind.TEXTS:
            return texts
        case Kind.LIST if len(texts) == 1 and text.startswith("["):  # so vLLM writes it
            return tuple(json.loads(text))
        case Kind.LIST:
            return tuple(one.strip() for one in texts)


def parse_bytes(text: str) -> int:
    """1.5GiB is 1610612736, and so is 1.5GB. Raises ValueError for a text that is no size."""
    pattern = r"(?P<number>-?\d{1,999}(\.\d+)?) ?(?P<unit>[KMGT])?(I?B)?"
    return _scaled(pattern, _BYTE_UNITS, text.upper())


def _scaled(pattern: str, units: Mapping[str, int], text: str) -> int:
    """A number and a unit. Raises ValueError if the result is not whole."""
    found = re.fullmatch(pattern, text)
    if found is None:
        raise ValueError(text)
    number = Fraction(found["number"]) * units[found["unit"] or ""]
    if number.denominator != 1:
        raise ValueError(text)
    return number.numerator


def _object(texts: tuple[str, ...]) -> dict[str, Any]:
    """Several objects are merged, so that dotted flags add up."""
    merged: dict[str, Any] = {}
    for text in texts:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError(text)
        merged = _merged(merged, value)
    return merged


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both objects merged at every depth; other wins where both have a value."""
    both = dict(one)
    for key, value in other.items():
        inner = both.get(key)
        both[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both


def complaint(each: Setting, value: Any) -> str | None:
    """Return why a value is not allowed: "it must be …"; None if it is. A default of None is allowed."""
    if value is None and each.default is None:
        return None
    if not _has_kind(each.kind, value):
        return f"it must be {meaning(each)}"
    for refused, reason in each.refused:
        if value == refused:
            return reason
    several = value if each.kind is Kind.COUNTS else (value,)
    return None if all(_fits(each, one) for one in several) else f"it must be {limits(each)}"


def _fits(each: Setting, value: Any) -> bool:
    return (
        (not each.choices or value in each.choices or _is_numbered(each, value))
        and (each.low is None or (value > each.low if each.above else value >= each.low))
        and (each.high is None or value <= each.high)
        and (each.multiple_of is None or value % each.multiple_of == 0)
    )


def _is_numbered(each: Setting, value: str) -> bool:
    base, _, number = value.partition(":")
    return base in each.numbered and number.isdecimal()


def find_problems(
    config_type: Any, values: Mapping[str, Any], label: Label, unreadable: Collection[str] = ()
) -> list[str]:
    """Every reason why values cannot become a config, one line each.

    values: by field name; a missing one takes its default. label: what messages call a field.
    unreadable: fields whose text could not be read as a value; they are not checked again.
    """
    found = []
    sound = {each.name: values.get(each.name, each.default) for each in settings_of(config_type)}
    sound |= dict.fromkeys(unreadable)
    for each in settings_of(config_type):
        value = sound[each.name]
        if each.name not in unreadable and (reason := complaint(each, value)) is not None:
            found.append(f"{label(each.name)} is {shown(each, value)}; {reason}")
            sound[each.name] = None
    conflicts: list[str] = config_type.conflicts(sound, label)
    return found + conflicts


def read_keys(
    given: Mapping[str, Any],
    keys: Sequence[Setting],
    foreign: Mapping[str, Foreign],
    problems: list[str],
    warnings: list[str],
) -> dict[str, Any]:
    """The sound values of a JSON object, by key; null is the same as absent.

    A key of Kind.JSON has a list or an object, which the caller checks. foreign: keys that are known and not
    supported. problems, warnings: one line each is appended.
    """
    known = {each.name: each for each in keys}
    values = {}
    for name, value in given.items():
        if value is None:
            continue
        if name in known:
            if isinstance(value, str):
                value = dict(known[name].synonyms).get(value, value)
            reason = None if known[name].kind is Kind.JSON else complaint(known[name], value)
            if reason is None:
                values[name] = value
            else:
                problems.append(f"{name} is {as_given(value)}; {reason}")
        elif name in foreign:
            refused, ignored = foreign[name].answer(f"'{name}'", value)
            problems += refused
            warnings += ignored
        else:
            near = did_you_mean(name, [*known, *foreign])
            problems.append(f"unknown key '{name}'.{near} Known keys: {', '.join(known)}")
    return values


def as_given(value: Any) -> str:
    """A value as it stood in the JSON, a text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value, default=repr)


def raise_problems(config: Any) -> None:
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    if problems := find_problems(type(config), values, lambda name: name):
        raise ConfigError("; ".join(problems))


def meaning(each: Setting) -> str:
    """Describe the values of a setting in words."""
    return _MEANING[each.kind] + (f", such as {each.example}" if each.example else "")


def limits(each: Setting) -> str:
    """The allowed values, in words; empty if all of its kind are allowed."""
    if each.choices:
        return f"one of {', '.join(each.words)}"
    parts = []
    if each.multiple_of is not None:
        parts.append(f"a multiple of {each.multiple_of}")
    if each.low is not None:
        parts.append(f"{'above' if each.above else 'at least'} {shown(each, each.low)}")
    if each.high is not None:
        parts.append(f"at most {shown(each, each.high)}")
    return ", ".join([*parts[:-2], " and ".join(parts[-2:])]) if parts else ""


def shown(each: Setting, value: Any) -> str:
    """A value as messages and tables show it."""
    if value is None:
        return "none"
    if each.secret:
        return "***"
    if each.kind is Kind.BYTES and isinstance(value, int):
        return shortened(show_bytes(value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return shortened(" ".join(map(str, value)))
    return shortened(json.dumps(dict(value)) if isinstance(value, Mapping) else str(value))


def shortened(text: str) -> str:
    """A text of an operator, cut where it is too long for one line."""
    if len(text) <= _LONGEST_SHOWN:
        return text
    return f"{text[:_LONGEST_SHOWN]}… ({len(text)} characters)"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x'?", or nothing: a hint at another thing misleads.

    A known word is near if two typing errors lead to it, one in a short word, or if it has all parts of the word,
    longer or shorter (max-model-length), and at most one more (max-seqs).
    """
    parts, most = _PARTS.findall(word), 1 if len(word.strip("-")) < _LONG else 2
    ranked = []
    for each in known:
        theirs = _PARTS.findall(each)
        if (errors := _typing_errors(word, each)) <= most:
            ranked.append((errors, each))
        elif len(theirs) <= len(parts) + 1 and all(
            any(_begin_alike(one, other) for other in theirs) for one in parts
        ):
            ranked.append((most + len(theirs), each))
    return f" Did you mean '{min(ranked)[1]}'?" if ranked else ""


def _begin_alike(one: str, other: str) -> bool:
    shorter = min(len(one), len(other))
    return one == other or (one[:shorter] == other[:shorter] and shorter >= _SHORTEST_BEGINNING)


def _typing_errors(word: str, other: str) -> int:
    """Damerau and Levenshtein's distance: characters missing, wrong, too many or exchanged with the next."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, char in enumerate(word, start=1):
        earlier, before, row = before, row, [i]
        for j, theirs in enumerate(other, start=1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (char != theirs)))
            if i > 1 and j > 1 and (char, word[i - 2]) == (other[j - 2], theirs):
                row[j] = min(row[j], earlier[j - 2] + 1)
    return row[-1]


def show_bytes(size: int) -> str:
    """1536 is "1.5KiB". Rounded to one digit after the point."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _BYTE_UNITS[unit[0]]
        if size >= scale:
            tenths = (10 * size + scale // 2) // scale  # in whole numbers, which have no largest one
            return f"{tenths // 10}.{tenths % 10}".removesuffix(".0") + unit
    return f"{size}B"


def _has_kind(kind: Kind, value: Any) -> bool:
    match kind:
        case Kind.SWITCH:
            return isinstance(value, bool)
        case Kind.INTEGER | Kind.COUNT | Kind.BYTES:
            return isinstance(value, int) and not isinstance(value, bool)
        case Kind.COUNTS:
            return isinstance(value, tuple) and bool(value) and all(_has_kind(Kind.COUNT, one) for one in value)
        case Kind.NUMBER:
            return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        case Kind.JSON:
            return isinstance(value, Mapping)
        case Kind.TEXTS | Kind.LIST:
            return isinstance(value, tuple) and all(isinstance(each, str) and each for each in value)
        case Kind.FILE:
            return isinstance(value, str) and _readable(value)
        case Kind.OUTPUT_FILE:
            return isinstance(value, str) and _writable(Path(value))
        case Kind.TEXT:
            return isinstance(value, str) and bool(value)


def _readable(path: str) -> bool:
    try:
        with Path(path).open("rb"):
            return True
    except OSError:
        return False


def _writable(path: Path) -> bool:
    """Return whether the file can be opened for writing; it is not made."""
    if path.exists():
        return not path.is_dir() and os.access(path, os.W_OK)
    return path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)
