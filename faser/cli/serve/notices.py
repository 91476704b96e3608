"""What the command tells the operator: plain text, or lines of the log where the log is JSON."""

import logging
import sys

from faser.errors import ConfigError, FaserError
from faser.logs.setup import log_format

_PROG = "faser serve"
_log = logging.getLogger("faser.serve")


def notice(text: str, level: int = logging.INFO, *, to_stdout: bool = False) -> None:
    """text: one line. to_stdout: where plain text goes; else to standard error."""
    if log_format() == "json":
        _log.log(level, "%s", text)
        return
    print(f"{_PROG}: {text}", file=sys.stdout if to_stdout else sys.stderr, flush=True)


def progress_line(text: str) -> None:
    """One line about a stage of the start."""
    if log_format() == "json":
        _log.info("%s", text)
    else:
        print(text, file=sys.stderr, flush=True)


def failed(error: FaserError) -> int:
    """The exit status of an error that has been logged here. Raises it instead where the log is plain text."""
    if log_format() == "text":
        raise error
    for problem in getattr(error, "problems", None) or [str(error)]:
        notice(problem, logging.CRITICAL)
    return 2 if isinstance(error, ConfigError) else 1
