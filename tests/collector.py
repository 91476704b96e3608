"""An OTLP collector on a loopback port, in a thread: what it received, decoded."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.waiting import PATIENCE_S, until

PATH = "/v1/traces"
ERROR = 2  # Status.STATUS_CODE_ERROR
UNSET = 0
SERVER, INTERNAL = 2, 1  # Span.SpanKind


@dataclass(frozen=True, kw_only=True)
class ReceivedSpan:
    """One span. Ids are hexadecimal digits; times are Unix nanoseconds. resource: of its process."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    status: int
    began_ns: int
    ended_ns: int


class Collector:
    """status: that of its answers; spans count as received only where it is 200."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.status = 200
        self.url = ""

    def roots(self, count: int = 1) -> list[ReceivedSpan]:
        """The spans of requests, once there are so many of them, in the order of their ends."""
        until(lambda: len(self._roots()) >= count)
        found = self._roots()
        assert len(found) == count, [span.name for span in found]
        return found

    def children(self, root: ReceivedSpan) -> list[ReceivedSpan]:
        found = [span for span in self.spans if span.parent_id == root.span_id]
        return sorted(found, key=lambda span: span.began_ns)

    def _roots(self) -> list[ReceivedSpan]:
        return sorted((span for span in self.spans if span.kind == SERVER), key=lambda span: span.ended_ns)

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        self.headers.append(headers)
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.bodies.append(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _values(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [_span(span, resource) for span in scope.spans]


def _span(span: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes=_values(span.attributes),
        resource=resource,
        status=span.status.code,
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    """A collector that takes spans at its url. port: 0: any free one."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == PATH and collector.status == 200:
                collector.take(body, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(collector.status if self.path == PATH else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            del format, arguments

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}{PATH}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE_S)
