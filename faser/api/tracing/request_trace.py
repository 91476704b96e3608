"""RequestTrace: what one HTTP request tells its span. It lies in the ASGI scope, where there is a span."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.types import Scope

from faser.tracing import AttributeValue, Phase

_KEY = "request_trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation, as far as it has come. operation, model: they make the span's name."""

    operation: str
    model: str
    attributes: Mapping[str, AttributeValue]
    phases: Sequence[Phase]


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """describe: is called once, when the span ends; None: the request was refused before it was understood.

    late_status: that of a failure after the answer had begun, had it come before. exception: the name of one that
    nothing turned into an answer.
    """

    describe: Callable[[], Generation] | None = field(default=None)
    late_status: int | None = None
    exception: str | None = None


def trace_of(scope: Scope) -> RequestTrace | None:
    """None: the request has no span, or its trace is not sampled."""
    trace: RequestTrace | None = scope.get("state", {}).get(_KEY)
    return trace


def set_trace(scope: Scope, trace: RequestTrace) -> None:
    scope.setdefault("state", {})[_KEY] = trace
