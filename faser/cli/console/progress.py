"""Progress of long stages on stderr: a bar on a terminal, lines in a log otherwise."""

import sys
import threading
import time
from collections.abc import Callable
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
    """A bar over runs of similar length, with the remaining time; shows nothing in a log."""
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
    """Shows one stage at a time. Use it in a `with`; call it with (stage, done, total), from any thread.

    done and total have the same unit. total 0: the size of the stage is unknown; it ends when the next begins.
    live: draw bars; None: on a terminal. write: takes each line that is there instead of bars.
    """

    def __init__(
        self,
        *,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] | None = None,
    ) -> None:
        self._write = write or _write_line
        self._clock = clock
        self._live = sys.stderr.isatty() if live is None else live
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._printed_s: dict[str, float] = {}
        self._began_s: dict[str, float] = {}
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
                self._print(stage, done, total)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop updating the bars. Idempotent."""
        self._bars.stop()

    def _draw(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            for task in self._bars.tasks:
                if task.total is None:
                    self._bars.update(task.id, completed=1, total=1)
            self._tasks[stage] = self._bars.add_task(stage, total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)

    def _print(self, stage: str, done: int, total: int) -> None:
        """One line when a stage begins, one when it ends, and one every _LINE_EVERY_S in between.

        The lines say which share is done; of a stage of unknown size, how long it has taken.
        """
        now = self._clock()
        ended = total > 0 and done >= total
        if stage in self._printed_s and not ended and now - self._printed_s[stage] < _LINE_EVERY_S:
            return
        if self._printed_s.get(stage) == float("inf"):
            return
        self._printed_s[stage] = float("inf") if ended else now
        taken_s = now - self._began_s.setdefault(stage, now)
        said = f": {100 * done // total} %" if total else f": {taken_s:.0f} s" if taken_s else ""
        self._write(f"{stage}{said}")


def _write_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
