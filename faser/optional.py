"""Values that may be missing: fields that JSON leaves out, settings that were not given. They are None."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

_Value = TypeVar("_Value")
_Found = TypeVar("_Found")


def given(fields: Mapping[str, _Value | None]) -> dict[str, _Value]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def present(values: Iterable[_Value | None]) -> list[_Value]:
    """Return the values that are there, in order."""
    return [value for value in values if value is not None]


def first_given(*values: _Value | None, default: _Value) -> _Value:
    """Return the first value that is there, or the default."""
    return next((value for value in values if value is not None), default)


def maybe(change: Callable[[_Value], _Found], value: _Value | None) -> _Found | None:
    """Return the changed value, or None for one that is missing."""
    return None if value is None else change(value)
