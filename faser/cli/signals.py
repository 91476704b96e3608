"""SIGTERM as an end that cleans up: downloads and compilers that a command has started end with it."""

import contextlib
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def exit_on_sigterm(status: int) -> Iterator[None]:
    """Make SIGTERM raise SystemExit. By default the first process of a container ignores SIGTERM."""

    def leave(number: int, frame: object) -> None:
        del number, frame
        sys.exit(status)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
