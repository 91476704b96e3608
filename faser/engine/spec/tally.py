"""What speculation did, in counters: by slot for the request's summary, in all for the metrics.

Arrays that take in a whole step at once. Knows neither policies nor sequences; a slot is a line of the arrays.
"""

import numpy as np
from numpy.typing import NDArray

from faser.speculation import DEFAULT_CLASS, DRAFT_METHODS
from faser.types import MethodStats, SpeculationStats, SpeculationSummary

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_STEPS, _GAMMA_SUM, _DRAFTS, _DRAFTED, _PRUNED, _VERIFIED, _ACCEPTED = range(7)
_COLUMNS = 7


class Tally:
    """num_slots lines, drafts of at most cap tokens. classes: names beside the default one.

    details: keep every draft's verdict for the summaries, which costs a line of Python each.
    """

    def __init__(self, num_slots: int, cap: int, classes: tuple[str, ...], *, details: bool = False) -> None:
        self._details: dict[int, list[tuple[int, int]]] | None = {} if details else None
        self._classes = tuple(dict.fromkeys((DEFAULT_CLASS, *classes)))
        self._class_of: Ints = np.zeros(num_slots, dtype=np.int64)
        self._lines: Ints = np.zeros((num_slots, _COLUMNS), dtype=np.int64)
        self._depths: Ints = np.zeros((num_slots, cap), dtype=np.int64)
        self._gammas: Ints = np.zeros((len(self._classes), cap + 1), dtype=np.int64)
        self._methods: Ints = np.zeros((len(DRAFT_METHODS), _COLUMNS), dtype=np.int64)
        self._expected: Floats = np.zeros(len(DRAFT_METHODS))
        self._accepted_per_position: Ints = np.zeros(cap, dtype=np.int64)

    def start(self, slot: int, class_name: str) -> None:
        self._class_of[slot] = self._classes.index(class_name)
        self._lines[slot] = 0
        self._depths[slot] = 0
        if self._details is not None:
            self._details[slot] = []

    def summary(self, slot: int, before: SpeculationSummary | None, policy: str) -> SpeculationSummary:
        """The line of a slot, added to what its sequence had before a preemption."""
        before = before or SpeculationSummary(policy=policy, accepted_per_position=(0,) * self._depths.shape[1])
        line = self._lines[slot].tolist()
        return SpeculationSummary(
            policy=policy,
            steps=before.steps + line[_STEPS],
            gamma_sum=before.gamma_sum + line[_GAMMA_SUM],
            drafts=before.drafts + line[_DRAFTS],
            drafted=before.drafted + line[_DRAFTED],
            pruned=before.pruned + line[_PRUNED],
            verified=before.verified + line[_VERIFIED],
            accepted=before.accepted + line[_ACCEPTED],
            accepted_per_position=tuple((self._depths[slot] + before.accepted_per_position).tolist()),
            per_step=before.per_step + (() if self._details is None else tuple(self._details[slot])),
        )

    def release(self, slot: int) -> None:
        """The slot is given up."""
        if self._details is not None:
            del self._details[slot]

    def plain(self, slots: Ints) -> None:
        """A step brought each of these one token, without a draft."""
        self._lines[slots, _STEPS] += 1
        self._gammas[:, 0] += np.bincount(self._class_of[slots], minlength=len(self._classes))

    def drafted(
        self, slots: Ints, methods: Ints, lengths: Ints, kept: Ints, accepted: Ints, expected: Floats
    ) -> None:
        """A step judged drafts. All [S]; expected: accepted tokens that were predicted of the kept ones."""
        lines = np.stack(
            (np.ones_like(kept), kept, (kept > 0).astype(np.int64), lengths, lengths - kept, kept, accepted),
            axis=-1,
        )
        self._lines[slots] += lines
        reached = np.arange(self._depths.shape[1]) < accepted[:, None]
        self._depths[slots] += reached
        self._accepted_per_position += reached.sum(0)
        if self._details is not None:
            for slot, pair in zip(slots.tolist(), zip(kept.tolist(), accepted.tolist(), strict=True), strict=True):
                if pair[0]:
                    self._details[slot].append(pair)
        for method in np.flatnonzero(np.bincount(methods)).tolist():
            chosen = methods == method
            self._methods[method] += lines[chosen].sum(0)
            self._expected[method] += expected[chosen].sum()
        width = self._gammas.shape[1]
        cells = np.bincount(self._class_of[slots] * width + kept, minlength=self._gammas.size)
        self._gammas += cells.reshape(self._gammas.shape)

    def stats(self, policy: str, method: str) -> SpeculationStats:
        lines, expected = self._methods.tolist(), self._expected.tolist()
        return SpeculationStats(
            policy=policy,
            method=method,
            num_drafts=sum(line[_DRAFTS] for line in lines),
            methods=tuple(
                MethodStats(
                    method=name,
                    drafted=line[_DRAFTED],
                    pruned=line[_PRUNED],
                    verified=line[_VERIFIED],
                    accepted=line[_ACCEPTED],
                    expected=mass,
                )
                for name, line, mass in zip(DRAFT_METHODS, lines, expected, strict=True)
            ),
            accepted_per_position=tuple(self._accepted_per_position.tolist()),
            gammas=tuple(zip(self._classes, map(tuple, self._gammas.tolist()), strict=True)),
        )
