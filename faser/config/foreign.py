"""Foreign: a name that FASER does not have and knows, from another program or from an earlier version.

A value that asks for nothing ("off", "one", the default) is accepted for each of them. A name that can only change
speed or logging is accepted with a warning. Every other one is refused, with the reason and what to use instead.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from faser import __version__

VALUE = "VALUE"  # in Foreign.instead: what the flag was given
_ALWAYS_NEUTRAL = ("none", "null", "off", "false", "")


class Support(Enum):
    ACCEPT = "FASER always does what the name asks for"
    WARN = "the name has no effect on answers"
    REFUSE = "the name would change answers, or what is reachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A flag with its short forms, or a key. neutral: values that ask for nothing; for flags also _ALWAYS_NEUTRAL.

    switch: takes no value. many: takes several values. instead: what to use; VALUE in it is the flag's value.
    origin: which program has it.
    """

    names: tuple[str, ...]
    support: Support
    reason: str
    neutral: tuple[Any, ...] = ()
    switch: bool = False
    many: bool = False
    instead: str = ""
    origin: str = "vLLM"

    @property
    def key(self) -> str:
        return self.names[0].removeprefix("--")

    def answer(self, label: str, value: Any) -> tuple[list[str], list[str]]:
        """(problems, warnings) for a value; both empty when FASER does what it asks for anyway."""
        is_flag = self.names[0].startswith("-")
        neutral = any(value == each and type(value) is type(each) for each in self.neutral)
        if self.support is Support.ACCEPT or neutral:
            return [], []
        if self.support is Support.WARN:
            return [], [f"{label} has no effect: {self.reason}"]
        if is_flag and value.lower() in _ALWAYS_NEUTRAL:
            return [], []
        instead = self.instead.replace(VALUE, str(value) or VALUE) if is_flag else self.instead
        given = f": '{value}'" if is_flag and not self.switch else ""
        return [f"{label}{given} {not_supported(self.reason, instead, self.origin)}"], []


def not_supported(reason: str, instead: str, origin: str = "vLLM") -> str:
    """The end of the sentence about a name that is refused."""
    alternative = f"Remove it or use {instead}." if instead else "Remove it."
    return f"is known from {origin} but not supported by FASER {__version__}: {reason}. {alternative}"


def refuse(names: str, reason: str, **more: Any) -> Foreign:
    return Foreign(names=tuple(names.split()), support=Support.REFUSE, reason=reason, **more)


def warn(names: str, reason: str, **more: Any) -> Foreign:
    return Foreign(names=tuple(names.split()), support=Support.WARN, reason=reason, **more)


def accept(names: str, reason: str, **more: Any) -> Foreign:
    return Foreign(names=tuple(names.split()), support=Support.ACCEPT, reason=reason, **more)


def by_name(*names: Foreign) -> dict[str, Foreign]:
    return {each.key: each for each in names}
