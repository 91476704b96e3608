"""JsonLines: writes each log record as one JSON object on one line."""

import json
import logging
from datetime import UTC, datetime
from typing import Any

from faser.logs.context import bound

_ACCESS = "uvicorn.access"
_ACCESS_FIELDS = ("client", "method", "path", "http_version", "status")
_OF_A_REQUEST = ("request_id", "trace_id", "span_id")


class JsonLines(logging.Formatter):
    """Keys: ts, level, logger, message, process; and where there is one, request_id, trace_id, span_id, exception.

    ts: ISO 8601 in UTC, to the microsecond. process: front-end or engine. exception: the traceback. A line of the
    access log has client, method, path, http_version and status too. A record's `extra` may name a request.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": self._process,
        }
        fields = bound()
        for name in _OF_A_REQUEST:
            value = record.__dict__.get(name) or fields.get(name)
            if value is not None:
                line[name] = str(value)
        if record.name == _ACCESS and isinstance(record.args, tuple) and len(record.args) == len(_ACCESS_FIELDS):
            line.update(zip(_ACCESS_FIELDS, record.args, strict=True))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            line["exception"] = record.exc_text
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str)  # ASCII: no character in it ends a line
