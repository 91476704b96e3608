"""Progress of commands, on stderr: bars on a terminal, lines in a log otherwise.

ProgressReporter shows the stages of a start, runs_bar runs of similar length; the others are of `faser distill`.
"""

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

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

if TYPE_CHECKING:
    from faser.distill.trainer import TrainingProgress

TERMINATED = 143  # 128 + SIGTERM, as shells say it

_LINE_EVERY_S = 2.0
_DISTILL_LINE_EVERY_S = 60.0
_SHARES = 1000  # of a bar
_DISTILL = "faser distill"


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


class TokenBar:
    """A bar over tokens, with the remaining time. Use it in a `with`; call it with (stage, done, total).

    In a log it is a line a minute.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        unit: str = "tokens",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} " + unit),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._unit = unit
        self._clock = clock
        self._printed_s = clock()
        self._task = None if self._bar.disable else self._bar.add_task("", total=0)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, description=stage, completed=done, total=total)
        elif self._clock() - self._printed_s >= _DISTILL_LINE_EVERY_S:
            self._printed_s = self._clock()
            self.say(f"{stage}: {done} of {total} {self._unit}")

    def say(self, line: str) -> None:
        """Print a line above the bar, or into the log."""
        if self._task is None:
            print(f"{_DISTILL}: {line}", file=sys.stderr, flush=True)
        else:
            self._console.print(line, highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class TrainingBar:
    """A bar over a training: loss, expected accepted tokens of a draft, remaining time. Use it in a `with`.

    In a log it is a line a minute.
    """

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._printed_s = float("-inf")
        self._first: tuple[float, float] | None = None  # when, and the share of then
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = None if self._bar.disable else self._bar.add_task("", total=_SHARES)

    def __call__(self, found: "TrainingProgress") -> None:
        said = f"loss {found.loss:.3f}, {found.expected_length:.2f} tokens accepted"
        if self._task is not None:
            self._bar.update(self._task, description=said, completed=_SHARES * found.share)
            return
        now = self._clock()
        if now - self._printed_s < _DISTILL_LINE_EVERY_S:
            return
        self._printed_s = now
        began_s, began_at = self._first = self._first or (now, found.share)
        learned = found.share - began_at
        remaining = f", {_minutes((now - began_s) * (1 - found.share) / learned)} remain" if learned > 0 else ""
        print(
            f"{_DISTILL}: {100 * found.share:.1f} % of the training (epoch {found.epoch + 1}): {said}, "
            f"{found.rows_per_s:.0f} tokens/s{remaining}",
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def _minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
