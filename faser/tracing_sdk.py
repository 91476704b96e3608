"""OpenTelemetryTracer: spans by OpenTelemetry's SDK, sent by its batch processor as OTLP over HTTP.

Imported only where traces are asked for. The SDK reads the variables OTEL_* itself: sampler, resource, headers,
certificates, batches. A thread of the SDK sends; its queue is bounded, and what does not fit is lost. No global of
the SDK is set, so that a library's own instrumentation sends nothing. The SDK and its exporter log every attempt;
ExportLog makes of that one warning when spans cannot be sent, and one line when they can again.
"""

import logging
import re
import threading
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as SdkTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from faser.errors import ConfigError
from faser.tracing import SpanContent

_log = logging.getLogger("faser.tracing")

_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] ([^\"'()]+)")
_MOST_CHARS = 200

# Loggers of the libraries whose lines this one replaces.
_REPLACED = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
)


class ExportLog(logging.Filter):
    """Takes the libraries' records. endpoint: as messages name it.

    Written to by the sending thread, and by threads that end spans: a record more or less in a race does no harm.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._reason = ""
        self._num_lost = 0
        self._warned = False
        for name in _REPLACED:
            logging.getLogger(name).addFilter(self)

    def detach(self) -> None:
        for name in _REPLACED:
            logging.getLogger(name).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the reason, drop the record."""
        said = record.getMessage()
        if said.startswith("Queue full"):
            self._warn("the queue of spans is full: the collector is slower than requests end")
        elif said.startswith(("Transient error", "Failed to export")) and "timeout, max retries" not in said:
            self._reason = _shortened(said)
        return False

    def sent(self) -> None:
        if self._warned:
            _log.warning("spans are sent to %s again; at least %d were lost", self._endpoint, self._num_lost)
        self._warned, self._num_lost, self._reason = False, 0, ""

    def lost(self, num_spans: int) -> None:
        self._num_lost += num_spans
        because = f": {self._reason}" if self._reason else ""
        self._warn(f"spans cannot be sent to {self._endpoint} and are lost{because}")

    def late(self, timeout_s: float) -> None:
        """The process ends before everything was sent."""
        _log.warning("spans are lost: %s did not take them within %g s", self._endpoint, timeout_s)

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s; there is no further line until they are sent again", problem)


def _shortened(said: str) -> str:
    """Return an exporter's message about an attempt, without the names of its library's classes."""
    system = _SYSTEM_ERROR.search(said)
    return system[1].strip() if system else said[:_MOST_CHARS]


class LoggedExporter(SpanExporter):
    """An exporter that reports its results to an ExportLog."""

    def __init__(self, exporter: SpanExporter, log: ExportLog) -> None:
        self._exporter = exporter
        self._log = log
        self._closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._log.sent()
        else:
            self._log.lost(len(spans))
        return result

    def shutdown(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self._exporter.shutdown()


_SERVICE = "faser"
_PARENT_HEADERS = (b"traceparent", b"tracestate")
_UNNAMED = "request"  # until the request has been read


class OpenTelemetryTracer:
    """endpoint: the whole URL that takes spans. version: of FASER.

    Raises ConfigError for variables OTEL_* that the SDK refuses.
    """

    def __init__(self, endpoint: str, *, version: str) -> None:
        self._log = ExportLog(endpoint)
        try:
            self._exporter = LoggedExporter(OTLPSpanExporter(endpoint=endpoint), self._log)
            self._provider = TracerProvider(resource=_resource(version), shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        except ValueError as error:
            self._log.detach()
            raise ConfigError(f"a variable OTEL_* cannot be used: {error}") from None
        self._tracer = self._provider.get_tracer("faser", version)
        self._propagator = TraceContextTextMapPropagator()

    def start(self, headers: Sequence[tuple[bytes, bytes]]) -> "OpenTelemetrySpan":
        carrier: dict[str, list[str]] = {}
        for name, value in headers:
            if name in _PARENT_HEADERS:
                carrier.setdefault(name.decode(), []).append(value.decode("latin-1"))
        if len(carrier.get("traceparent", ())) > 1:
            carrier = {}  # none of them can be trusted (W3C Trace Context, section 3.2)
        parent = self._propagator.extract(carrier)
        began_ns = time.time_ns()
        span = self._tracer.start_span(_UNNAMED, context=parent, kind=SpanKind.SERVER, start_time=began_ns)
        return OpenTelemetrySpan(self._tracer, span, began_ns, time.monotonic())

    def close(self, timeout_s: float) -> None:
        closing = threading.Thread(target=self._shut_down, name="faser-traces-end", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            self._log.late(timeout_s)
            self._exporter.shutdown()  # wakes an exporter that waits to try again

    def _shut_down(self) -> None:
        self._provider.shutdown()
        self._log.detach()


class OpenTelemetrySpan:
    """One span of the SDK. began_ns: Unix time; began_s: the same moment by time.monotonic()."""

    def __init__(self, tracer: SdkTracer, span: Span, began_ns: int, began_s: float) -> None:
        self._tracer = tracer
        self._span = span
        self._began_ns = began_ns
        self._began_s = began_s

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    @property
    def ids(self) -> tuple[str, str]:
        context = self._span.get_span_context()
        return f"{context.trace_id:032x}", f"{context.span_id:016x}"

    def end(self, content: SpanContent) -> None:
        span = self._span
        span.update_name(content.name)
        span.set_attributes(dict(content.attributes))
        if content.error_type is not None:
            span.set_attribute("error.type", content.error_type)
        if content.failed:
            span.set_status(StatusCode.ERROR)
        context = set_span_in_context(span)
        for phase in content.phases:
            child = self._tracer.start_span(phase.name, context=context, start_time=self._unix_ns(phase.began_s))
            child.end(self._unix_ns(phase.ended_s))
        span.end(self._unix_ns(time.monotonic()))

    def _unix_ns(self, moment_s: float) -> int:
        """The clock of the whole span is the monotonic one: no child can end before it began."""
        return self._began_ns + round((moment_s - self._began_s) * 1e9)


def _resource(version: str) -> Resource:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over our names."""
    found = Resource.create()
    given = {
        name: value for name, value in found.attributes.items() if not str(value).startswith("unknown_service")
    }
    return found.merge(Resource({"service.name": _SERVICE, "service.version": version})).merge(Resource(given))
