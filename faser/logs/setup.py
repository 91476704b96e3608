"""start_logging: the one handler of a process, on standard error."""

import logging
import sys
import threading
from types import TracebackType
from typing import Literal

from faser.logs.json_lines import JsonLines

LogFormat = Literal["text", "json"]
FRONT_END, ENGINE = "front-end", "engine"

_log = logging.getLogger("faser")


def start_logging(level: str, log_format: str, process: str) -> None:
    """level: as logging names it, in any case. process: FRONT_END or ENGINE.

    As JSON, warnings of libraries and exceptions that nothing catches are lines of the log too.
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


def log_format() -> LogFormat:
    """How this process logs."""
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
