"""ExportLog: one warning when spans cannot be sent, and one line when they can again.

The SDK and its exporter log every attempt; while a collector is away that would be several lines a batch.
"""

import logging
import re
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

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
    """What an exporter says of an attempt, without the names of its library's classes."""
    system = _SYSTEM_ERROR.search(said)
    return system[1].strip() if system else said[:_MOST_CHARS]


class LoggedExporter(SpanExporter):
    """An exporter whose results an ExportLog is told."""

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
