"""One span for each HTTP request that asks for an answer.

TracingMiddleware begins it, and ends it when the last byte has been handed to the connection or the client has
left. What the request tells its span lies in the ASGI scope, as a RequestTrace. Names: OpenTelemetry's semantic
conventions for HTTP servers, and those for generative AI (status: development).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from faser.api.bodies.errors import CLIENT_CLOSED_REQUEST, error_type
from faser.api.http.paths import route_of
from faser.api.middleware.outer import get_request_id
from faser.logs import bind
from faser.optional import given
from faser.tracing import AttributeValue, Phase, SpanContent, Tracer

_KEY = "request_trace"

# Routes whose requests have spans, and what the conventions call them; None: the body decides.
_OPERATIONS: dict[str, str | None] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/invocations": None,
}
_LEFT = "ClientDisconnect"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationAttributes:
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

    describe: Callable[[], GenerationAttributes] | None = field(default=None)
    late_status: int | None = None
    exception: str | None = None


def trace_of(scope: Scope) -> RequestTrace | None:
    """None: the request has no span, or its trace is not sampled."""
    trace: RequestTrace | None = scope.get("state", {}).get(_KEY)
    return trace


class TracingMiddleware:
    """ASGI middleware, inside of the one that checks keys: a request without a key makes no span."""

    def __init__(self, app: ASGIApp, *, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        route = route_of(scope["path"], scope.get("root_path", ""))
        if route not in _OPERATIONS:
            await self._app(scope, receive, send)
            return
        span = self._tracer.start(scope["headers"])
        trace_id, span_id = span.ids
        bind(trace_id=trace_id, span_id=span_id)
        if not span.recording:
            await self._app(scope, receive, send)
            return
        sent = _Sent(send)
        trace = RequestTrace()
        scope.setdefault("state", {})[_KEY] = trace
        try:
            await self._app(scope, receive, sent)
        except BaseException as error:
            trace.exception = type(error).__name__
            raise
        finally:
            span.end(_content(scope, route, sent))


class _Sent:
    """Hands messages on, and remembers how far the answer got. status: None: it has not begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self.complete = False

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)


def _content(scope: Scope, route: str, sent: _Sent) -> SpanContent:
    trace = trace_of(scope)
    assert trace is not None
    attributes = _http_attributes(scope, route, sent.status)
    operation = _OPERATIONS[route]
    attributes |= given({"gen_ai.operation.name": operation})
    generation = None if trace.describe is None else trace.describe()
    name, phases = f"POST {route}", tuple[Phase, ...]()
    if generation is not None:
        name, phases = f"{generation.operation} {generation.model}", tuple(generation.phases)
        attributes |= generation.attributes
    error, failed = _outcome(trace, sent)
    return SpanContent(name=name, attributes=attributes, phases=phases, error_type=error, failed=failed)


def _outcome(trace: RequestTrace, sent: _Sent) -> tuple[str | None, bool]:
    """(error.type, whether the server is at fault). It is at none when a client errs or leaves."""
    status = trace.late_status or sent.status
    if trace.exception is not None:
        return trace.exception, True
    if status is None or status == CLIENT_CLOSED_REQUEST or not sent.complete:
        return _LEFT, False
    return (None, False) if status < 400 else (error_type(status), status >= 500)


def _http_attributes(scope: Scope, route: str, status: int | None) -> dict[str, AttributeValue]:
    """server.address and server.port are those of the socket, so they tell replicas apart."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.provider.name": "faser",
        "gen_ai.request.id": get_request_id(scope),
        "http.request.method": "POST",
        "http.route": route,
    }
    address, port = scope.get("server") or (None, None)
    return attributes | given(
        {"http.response.status_code": status, "server.address": address, "server.port": port}
    )
