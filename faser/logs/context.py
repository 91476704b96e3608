"""What every line that is logged for a request says of it: its id, and its trace."""

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

_NOTHING: Mapping[str, str] = MappingProxyType({})
_bound: ContextVar[Mapping[str, str]] = ContextVar("faser_log_fields", default=_NOTHING)


def begin(**fields: str) -> None:
    """Replace all fields of this context, such as a task's; tasks that it starts have them too."""
    _bound.set(fields)


def bind(**fields: str) -> None:
    """Add fields to those of this context."""
    _bound.set({**_bound.get(), **fields})


def bound() -> Mapping[str, str]:
    return _bound.get()
