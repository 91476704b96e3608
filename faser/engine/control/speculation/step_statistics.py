"""What steps were and what they took: modes, why nobody drafted, time predicted and measured, time of deciding.

Owns those counters, and tells the cost model what a step and deciding took. Knows neither sequences nor drafts.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.step_times import Role
from faser.engine.control.timing.cost_model import CostModel, ErrorTracker
from faser.types import RoleStats, SpeculationStats

_FOLLOW = 0.05  # weight of the newest step in what deciding takes
PLAIN, SERIAL = "plain", "serial"
REQUEST, MEMORY, LOAD, GAIN = "request", "memory", "load", "gain"
BYPASS_REASONS = (LOAD, GAIN, MEMORY, REQUEST)


class StepStatistics:
    """partition: the name of the mode in which drafts are made beside steps.

    times_itself: the time that deciding takes is among the costs of drafting; not where time is simulated.
    """

    def __init__(self, costs: CostModel, partition: str, *, times_itself: bool) -> None:
        self._costs = costs
        self._partition = partition
        self._times_itself = times_itself
        self.predicted_s = 0.0  # of the step that was launched last
        self.catchup_tokens = 0
        self._drafting_s = (0.0, 0.0)  # of the step that is being made: predicted, measured
        self._whole = ErrorTracker()
        self._decide_s = self._decided_s = 0.0  # of all steps; before the step that is being made
        self._deciding = [0.0, 0.0]  # host time of a step in which nobody drafts, or somebody, followed
        self._mode = self._next_mode = PLAIN
        self._mode_steps: Counter[str] = Counter(dict.fromkeys((PLAIN, SERIAL, partition), 0))
        self._switches: Counter[tuple[str, str]] = Counter()
        self._bypasses: Counter[str] = Counter(dict.fromkeys(BYPASS_REASONS, 0))

    def drafting(self, predicted_s: float, measured_s: float) -> None:
        """The drafts of the next step have come."""
        self._drafting_s = (predicted_s, measured_s)

    def launched(self, predicted_s: float, *, drafts: bool) -> None:
        """A step is about to run, with drafts among its rows or without."""
        self.predicted_s = predicted_s
        self._next_mode = SERIAL if drafts else PLAIN

    def shortened(self, seconds: float) -> None:
        """Rows left it early: it should have taken so much less."""
        self.predicted_s -= seconds

    def drafts_beside(self) -> None:
        """Drafts are made beside that step."""
        self._next_mode = self._partition

    def stepped(self, run_s: float, *, beside: bool) -> None:
        """It is done. beside: together with drafts, so that its time says nothing of the step alone."""
        self._mode_steps[self._next_mode] += 1
        if self._next_mode != self._mode:
            self._switches[self._mode, self._next_mode] += 1
            self._mode = self._next_mode
        if not beside:
            predicted_s, measured_s = self._drafting_s
            self._costs.observe(Role.STEP, self.predicted_s, run_s)
            self._whole.add(self.predicted_s + predicted_s, run_s + measured_s)
            self._drafting_s = (0.0, 0.0)

    def decided(self, seconds: float) -> None:
        """So much time went into deciding, or learning."""
        self._decide_s += seconds

    def closes(self, *, drafted: bool) -> None:
        """A step is over. What deciding takes longer with drafts than without is a cost of drafts."""
        if not self._times_itself:
            return
        step_s, self._decided_s = self._decide_s - self._decided_s, self._decide_s
        usual_s = self._deciding[drafted]
        self._deciding[drafted] += (step_s - usual_s) * (_FOLLOW if usual_s else 1.0)
        self._costs.deciding_s = max(self._deciding[True] - self._deciding[False], 0.0)

    def bypasses(self, reason: str, count: int) -> None:
        """So many sequences did not draft in a step, for this reason."""
        self._bypasses[reason] += count

    def bypassed(self, reason: str, mask: NDArray[np.bool_]) -> None:
        """The same of those in mask."""
        self.bypasses(reason, int(np.count_nonzero(mask)))

    def stats(self, tally: SpeculationStats, lanes: tuple[RoleStats, ...]) -> SpeculationStats:
        """tally completed. The target's forward is called verify: the model's role of that name is part of a step.

        lanes: of drafting beside steps.
        """
        verify = [replace(each, role="verify") if each.role == Role.STEP else each for each in self._costs.stats()]
        return replace(
            tally,
            mode=self._mode,
            mode_steps=tuple(self._mode_steps.items()),
            switches=tuple((one, other, times) for (one, other), times in self._switches.items()),
            bypasses=tuple(self._bypasses.items()),
            roles=(self._whole.stats("step"), *verify, *lanes),
            decide_s=self._decide_s,
            catchup_tokens=self.catchup_tokens,
        )
