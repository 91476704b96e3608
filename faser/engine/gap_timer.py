"""GapTimer: how long the device had no work between two steps, from what the engine sees of them.

    end of step 1 | commit, propose | drafts' run_s | keep, plan | step 2's run_s | end of step 2
                  '------ gap ------'               '---- gap ---'

A gap before which the engine had nothing to do is none: the next step is a first step again.
"""

import time
from collections.abc import Callable

from faser.engine.contract.plan import Drafts, StepResult


class GapTimer:
    """now: the clock, in seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._ended_s: float | None = None  # when the step before ended; None: the next step is a first one
        self._drafting_s = 0.0  # since then

    def add_drafting(self, drafts: Drafts) -> None:
        """Drafts came before the step."""
        self._drafting_s += drafts.run_s

    def end_step(self, result: StepResult, overlapped: Drafts | None = None) -> float | None:
        """The step's work has just ended. Returns the seconds of its gap; None for a first step.

        overlapped: the drafts that a drafter made at the same time.
        """
        now_s, before_s = self._now(), self._ended_s
        worked_s = self._drafting_s + _together_s(result, overlapped) - result.prepared_s
        self._ended_s, self._drafting_s = now_s, 0.0
        return None if before_s is None else now_s - before_s - worked_s

    def restart(self) -> None:
        """The engine has nothing to do."""
        self._ended_s, self._drafting_s = None, 0.0


def _together_s(result: StepResult, overlapped: Drafts | None) -> float:
    """Seconds in which the step or its overlapped drafts were running."""
    if overlapped is None:
        return result.run_s
    ended_s = max(result.began_s + result.run_s, overlapped.began_s + overlapped.run_s)
    return ended_s - min(result.began_s, overlapped.began_s)
