"""Traces: what the front-end needs from a tracing library. tracing_sdk.py implements it with OpenTelemetry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

AttributeValue = str | bool | int | float | Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a request, which becomes a child span. Times are of time.monotonic()."""

    name: str
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanContent:
    """Content of a span when it ends. No text of prompts or answers is in it.

    error_type: of few values; None: success. failed: the server is at fault, so the span's status is an error.
    """

    name: str
    attributes: Mapping[str, AttributeValue]
    phases: Sequence[Phase] = field(default=())
    error_type: str | None = None
    failed: bool = False


class RequestSpan(Protocol):
    """The span of one request; it begins when it is made."""

    @property
    def recording(self) -> bool:
        """False: the trace is not sampled, and end does nothing."""
        ...

    @property
    def ids(self) -> tuple[str, str]:
        """Trace id and span id in hexadecimal digits."""
        ...

    def end(self, content: SpanContent) -> None: ...


class Tracer(Protocol):
    """Makes spans, and sends them in the background. All calls but close come from one event loop."""

    def start(self, headers: Sequence[tuple[bytes, bytes]]) -> RequestSpan:
        """headers: of the request, names in lower case; its traceparent, if valid, is the parent."""
        ...

    def close(self, timeout_s: float) -> None:
        """Send what is left, for at most timeout_s, and end. Blocks."""
        ...
