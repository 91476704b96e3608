"""Probes: short drafts of sequences that do not draft, which show whether drafting would pay again.

Owns when each slot is due next, and an account of time. Every step pays a fixed share of its time into the
account, and a probe is taken only when the account can pay for it: so probing never costs more than that share.
"""

import numpy as np
from numpy.typing import NDArray

from faser.engine.control.speculation.policies.objective import Objective
from faser.engine.control.speculation.policies.policy import Candidates, Ints
from faser.engine.control.step_cost import CostModel

SHARE = 0.004  # of the time that probing takes at most
_FIRST_WAIT, _LONGEST_WAIT = 16, 256  # steps
PROBE_TOKENS = 2
_SAVED_STEPS = 400.0  # steps whose share the account holds at most
_NO_WAIT = 0


class Probes:
    def __init__(self) -> None:
        self._step = 0
        self._due = np.zeros(0, dtype=np.int64)  # by slot: step of the next probe; 0: none is planned
        self._wait = np.zeros(0, dtype=np.int64)  # by slot: steps from the last probe to the next one
        self._hope = np.zeros(0)  # by slot: expected first acceptance at the last probe
        self._saved_s = 0.0
        self._closed_until = 0

    def add(self, candidates: Candidates, lengths: Ints, objective: Objective, costs: CostModel) -> Ints:
        """lengths with probes for the sequences that are due, cheapest first, as far as the account allows."""
        self._step += candidates.since
        share_s = SHARE * objective.seconds_without_drafts
        self._saved_s = min(self._saved_s + candidates.since * share_s, _SAVED_STEPS * share_s)
        if np.count_nonzero(lengths) == np.count_nonzero(candidates.limit):
            if np.count_nonzero(self._due):
                self._cover(candidates.slots)
                self._due[candidates.slots] = _NO_WAIT
            return lengths
        idle = (lengths == 0) & (candidates.limit > 0)
        self._cover(candidates.slots)
        due = self._plan(candidates, idle)
        if not len(due) or self._step < self._closed_until:
            return lengths
        return self._pay(candidates, lengths, due, objective, costs)

    def _cover(self, slots: Ints) -> None:
        missing = int(slots.max()) + 1 - len(self._due)
        if missing > 0:
            self._due = np.concatenate((self._due, np.zeros(missing, dtype=np.int64)))
            self._wait = np.concatenate((self._wait, np.zeros(missing, dtype=np.int64)))
            self._hope = np.concatenate((self._hope, np.zeros(missing)))

    def _plan(self, candidates: Candidates, idle: NDArray[np.bool_]) -> Ints:
        """Positions of the sequences whose probe is due. A sequence that has become idle is given a date."""
        slots = candidates.slots
        self._due[slots[~idle]] = _NO_WAIT
        fresh = slots[idle & (self._due[slots] == _NO_WAIT)]
        self._wait[fresh] = _FIRST_WAIT
        self._due[fresh] = self._step + _FIRST_WAIT
        return np.flatnonzero(idle & (self._due[slots] <= self._step))

    def _pay(
        self, candidates: Candidates, lengths: Ints, due: Ints, objective: Objective, costs: CostModel
    ) -> Ints:
        """Probe as many due sequences as the account can pay for; if none, do not try again for a few steps."""
        due = due[np.argsort(candidates.missing_kv[due], kind="stable")]
        unprobed_s = self._cost_s(candidates, lengths, objective, costs)
        while len(due):
            probed = lengths.copy()
            probed[due] = np.minimum(candidates.limit[due], PROBE_TOKENS)
            cost_s = self._cost_s(candidates, probed, objective, costs) - unprobed_s
            if cost_s <= self._saved_s:
                self._saved_s -= max(cost_s, 0.0)
                self._settle(candidates, due)
                return probed
            due = due[: len(due) // 4]
        self._closed_until = self._step + _FIRST_WAIT // 2
        return lengths

    def _cost_s(self, candidates: Candidates, lengths: Ints, objective: Objective, costs: CostModel) -> float:
        drafted = lengths.sum(keepdims=True)
        gap_s = objective.drafting_gap_s if drafted.item(0) else 0.0
        return costs.draft_s(lengths, candidates.missing_kv) + float(objective.verify_s(drafted)[0]) + gap_s

    def _settle(self, candidates: Candidates, due: Ints) -> None:
        slots = candidates.slots[due]
        hope = candidates.survival[due, 1]
        rising = hope > self._hope[slots]
        wait = np.where(rising, self._wait[slots] // 2, self._wait[slots] * 2)
        self._wait[slots] = np.clip(wait, _FIRST_WAIT // 4, _LONGEST_WAIT)
        self._due[slots] = self._step + self._wait[slots]
        self._hope[slots] = hope
