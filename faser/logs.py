"""The log: where lines go, how they look, and which request they are about.

start_logging makes the one handler of a process, on standard error. What begin and bind say of a request (its id,
its trace) is in every line that is logged for it, where lines are JSON.
"""

import json
import logging
import re
import sys
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType, TracebackType
from typing import Any, Literal

from faser.optional import given

FRONT_END, ENGINE = "front-end", "engine"

_NOTHING: Mapping[str, str] = MappingProxyType({})
_bound: ContextVar[Mapping[str, str]] = ContextVar("faser_log_fields", default=_NOTHING)
_ACCESS = "uvicorn.access"
_ACCESS_FIELDS = ("client", "method", "path", "http_version", "status")
_QUERY = re.compile(r"(\?|%3F).*")  # encoded too: a client that quotes a whole URL sends it so
_OF_A_REQUEST = ("request_id", "trace_id", "span_id")
LogFormat = Literal["text", "json"]
_log = logging.getLogger("faser")


def start_logging(level: str, log_format: str, process: str) -> None:
    """Send the lines of this process to standard error.

    level: as logging names it, in any case. process: FRONT_END or ENGINE. As JSON, warnings of libraries and
    exceptions that nothing catches are lines of the log too.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonLines(process))
        logging.captureWarnings(True)
        sys.excepthook = _uncaught
        threading.excepthook = _uncaught_in_thread
    else:
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger(_ACCESS).addFilter(without_query)


def without_query(record: logging.LogRecord) -> bool:
    """Leave the query string out of a line of the access log: some clients put their key there. Drops no line."""
    parts = record.args
    if isinstance(parts, tuple) and len(parts) == len(_ACCESS_FIELDS):
        named = zip(_ACCESS_FIELDS, parts, strict=True)
        record.args = tuple(_QUERY.sub("", str(part)) if name == "path" else part for name, part in named)
    return True


def log_format() -> LogFormat:
    """Return the format in which this process logs."""
    return (
        "json" if any(isinstance(each.formatter, JsonLines) for each in logging.getLogger().handlers) else "text"
    )


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _log.critical("uncaught %s", kind.__name__, exc_info=(kind, error, trace))


def _uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is None:
        return
    name = "a thread" if arguments.thread is None else f"thread {arguments.thread.name}"
    _log.critical(
        "uncaught %s in %s",
        arguments.exc_type.__name__,
        name,
        exc_info=(arguments.exc_type, arguments.exc_value, arguments.exc_traceback),
    )


def begin(**fields: str) -> None:
    """Replace all fields of this context, such as a task's; tasks that it starts have them too."""
    _bound.set(fields)


def bind(**fields: str) -> None:
    """Add fields to those of this context."""
    _bound.set({**_bound.get(), **fields})


def bound() -> Mapping[str, str]:
    return _bound.get()


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
        of_request = given({name: record.__dict__.get(name) or fields.get(name) for name in _OF_A_REQUEST})
        line |= {name: str(value) for name, value in of_request.items()}
        if record.name == _ACCESS and isinstance(record.args, tuple) and len(record.args) == len(_ACCESS_FIELDS):
            line.update(zip(_ACCESS_FIELDS, record.args, strict=True))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            line["exception"] = record.exc_text
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str)  # ASCII: no character in it ends a line
