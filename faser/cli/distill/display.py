"""What `faser distill` shows: bars on a terminal, lines in a log, and the table of acceptance."""

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from faser.cli.distill.arguments import PROG

if TYPE_CHECKING:
    from faser.distill.acceptance import Expected
    from faser.distill.trainer import TrainingProgress

_LINE_EVERY_S = 60.0
_SHARES = 1000  # of a bar


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
        elif self._clock() - self._printed_s >= _LINE_EVERY_S:
            self._printed_s = self._clock()
            self.say(f"{stage}: {done} of {total} {self._unit}")

    def say(self, line: str) -> None:
        """Print a line above the bar, or into the log."""
        if self._task is None:
            print(f"{PROG}: {line}", file=sys.stderr, flush=True)
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
        self._printed_s: float | None = None
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
        told = f"loss {found.loss:.3f}, {found.expected_length:.2f} tokens accepted"
        if self._task is not None:
            self._bar.update(self._task, description=told, completed=_SHARES * found.share)
            return
        now = self._clock()
        if self._printed_s is not None and now - self._printed_s < _LINE_EVERY_S:
            return
        self._printed_s = now
        left = found.seconds * (1 - found.share) / found.share if found.share > 0 else 0.0
        remaining = f", {_minutes(left)} remain" if left else ""
        print(
            f"{PROG}: {100 * found.share:.1f} % of the training (epoch {found.epoch + 1}): {told}, "
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


def acceptance_table(greedy: Sequence[float], sampled: Sequence[float], temperature: float) -> str:
    """Shares of drafts on conversations that were not learned from, as Markdown."""
    steps = len(greedy) or len(sampled)
    lines = [
        "| accepted on held-out answers | "
        + " | ".join(f"token {at + 1}" for at in range(steps))
        + " | tokens of a draft |",
        "| --- |" + " ---: |" * (steps + 1),
    ]
    for name, shares in (("temperature 0", greedy), (f"temperature {temperature:g}, at most", sampled)):
        if shares:
            cells = " | ".join(f"{share:.2f}" for share in shares)
            lines.append(f"| {name} | {cells} | {sum(shares):.2f} |")
    return "\n".join(lines)


def speedup_table(greedy: "Sequence[Expected]", sampled: "Sequence[Expected]", temperature: float) -> str:
    """What the drafts are expected to bring, by load, as Markdown."""
    lines = [
        "| requests at once | " + " | ".join(str(each.requests) for each in greedy or sampled) + " |",
        "| --- |" + " ---: |" * len(greedy or sampled),
    ]
    for name, found in (("temperature 0", greedy), (f"temperature {temperature:g}, at most", sampled)):
        if found:
            cells = " | ".join(f"{each.speedup:.2f}x ({each.draft_tokens})" for each in found)
            lines.append(f"| expected speed-up, {name} (drafted tokens) | {cells} |")
    return "\n".join(lines)


def _minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
