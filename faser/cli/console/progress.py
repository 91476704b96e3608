"""What long work shows on the terminal: a bar where somebody watches, lines in a log otherwise.

Called from any thread. Knows stages and numbers, not what they stand for.
"""

import sys
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_LINE_EVERY_S = 2.0


def runs_bar() -> Progress:
    """A bar over runs of about the same length, with the time that is left; shows nothing in a log."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class ProgressReporter:
    """Shows stages, one after the other. Use it in a `with`; call it with (stage, done, total).

    done and total share a unit of the stage's own; total 0 means that nobody knows how much there is;
    such a stage ends when the next one begins.
    """

    def __init__(self, *, live: bool | None = None) -> None:
        self._live = sys.stderr.isatty() if live is None else live
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._said_s: dict[str, float] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not self._live,
        )

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            if self._live:
                self._draw(stage, done, total)
            else:
                self._say(stage, done, total)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the bars as they are. Idempotent."""
        self._bars.stop()

    def _draw(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            for task in self._bars.tasks:
                if task.total is None:
                    self._bars.update(task.id, completed=1, total=1)
            self._tasks[stage] = self._bars.add_task(stage, total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)

    def _say(self, stage: str, done: int, total: int) -> None:
        """A line when a stage begins and ends, and now and then between."""
        now = time.monotonic()
        ended = total > 0 and done >= total
        if stage in self._said_s and not ended and now - self._said_s[stage] < _LINE_EVERY_S:
            return
        if self._said_s.get(stage) == float("inf"):
            return
        self._said_s[stage] = float("inf") if ended else now
        share = f": {100 * done // total} %" if total else ""
        print(f"{stage}{share}", file=sys.stderr, flush=True)
