"""GapTimer: how long a step was, and how long the device had no work in it, from what the engine sees of it.

    begin | propose | drafts' run_s | keep, plan | the step's run_s | commit, statistics, messages | next begin
          '-- gap --'               '--- gap ----'                  '------------ gap -------------'

So what a step leaves to do is part of its own gap: what its drafts teach is learned after it. A step after which
the engine has nothing to do has no gap.
"""

import time
from collections.abc import Callable

from faser.engine.contract.drafts import Drafts
from faser.engine.contract.plan import StepResult, StepSpan


class GapTimer:
    """now: the clock, in seconds. last: the step before the one that began last; None: not known."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.last: StepSpan | None = None
        self._now = now
        self._began_s: float | None = None  # None: the step before left nothing to do
        self._worked_s = 0.0  # since then

    def begin_step(self) -> None:
        """The step before has ended, and so has all that it left to do."""
        now_s, before_s = self._now(), self._began_s
        self.last = None if before_s is None else StepSpan(now_s - before_s, now_s - before_s - self._worked_s)
        self._began_s, self._worked_s = now_s, 0.0

    def drafted(self, drafts: Drafts) -> None:
        """Drafts were made before the step."""
        self._worked_s += drafts.run_s

    def ran(self, result: StepResult, overlapped: Drafts | None = None) -> None:
        """The step has run. overlapped: the drafts that a drafter made at the same time."""
        self._worked_s += _together_s(result, overlapped) - result.prepared_s

    def restart(self) -> None:
        """The engine has nothing to do."""
        self._began_s = None


def _together_s(result: StepResult, overlapped: Drafts | None) -> float:
    """Seconds in which the step or its overlapped drafts were running."""
    if overlapped is None:
        return result.run_s
    ended_s = max(result.began_s + result.run_s, overlapped.began_s + overlapped.run_s)
    return ended_s - min(result.began_s, overlapped.began_s)
