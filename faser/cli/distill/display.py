"""What `faser distill` shows on stderr: bars on a terminal; in a log, lines alone."""

import sys
from types import TracebackType
from typing import Self

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


class TokenBar:
    """A bar over tokens, with the remaining time. Use it in a `with`; call it with (stage, done, total)."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = None if self._bar.disable else self._bar.add_task("", total=0)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, description=stage, completed=done, total=total)

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
