"""Values that may be missing: fields that JSON leaves out, settings that were not given. They are None."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

_Name = TypeVar("_Name")
_Value = TypeVar("_Value")
_Other = TypeVar("_Other")


def given(fields: Mapping[_Name, _Value | None]) -> dict[_Name, _Value]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def present(values: Iterable[_Value | None]) -> list[_Value]:
    """Return the values that are there, in order."""
    return [value for value in values if value is not None]


def or_else(value: _Value | None, default: _Other) -> _Value | _Other:
    """Return the value, or the default for one that is missing."""
    return default if value is None else value


def maybe(change: Callable[[_Value], _Other], value: _Value | None) -> _Other | None:
    """Return the changed value, or None for one that is missing."""
    return None if value is None else change(value)
