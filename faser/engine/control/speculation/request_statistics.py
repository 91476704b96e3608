"""What speculation did, in counters: by slot for the request's summary, in all for the metrics.

A step only notes down its arrays; the counters take in many steps at once, before anybody reads them. Knows
neither policies nor sequences; a slot is a line of the arrays.
"""

import numpy as np
from numpy.typing import NDArray

from faser.config.drafters import DRAFT_METHODS
from faser.engine.control.speculation.acceptance.estimator import Outcomes, joined
from faser.types import DEFAULT_CLASS, MethodStats, SpeculationStats, SpeculationSummary

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_STEPS, _GAMMA_SUM, _DRAFTS, _DRAFTED, _PRUNED, _VERIFIED, _ACCEPTED = range(7)
_OF_DROPPED = [_DRAFTED, _PRUNED]
_COLUMNS = 7
_MOST_NOTED = 64  # steps


class RequestStatistics:
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
        self._dropped: Ints = np.zeros(len(DRAFT_METHODS), dtype=np.int64)
        self._left: Ints = np.zeros(len(DRAFT_METHODS), dtype=np.int64)
        self._expected: Floats = np.zeros(len(DRAFT_METHODS))
        self._accepted_per_position: Ints = np.zeros(cap, dtype=np.int64)
        self._upto = np.tri(cap + 1, cap, -1, dtype=np.int64)  # line n: 1 for the first n depths, 0 for the others
        self._plain: list[Ints] = []
        self._drafted: list[tuple[Outcomes, Floats]] = []

    def start(self, slot: int, class_name: str) -> None:
        self._settle()
        self._class_of[slot] = self._classes.index(class_name)
        self._lines[slot] = 0
        self._depths[slot] = 0
        if self._details is not None:
            self._details[slot] = []

    def summary(self, slot: int, before: SpeculationSummary | None, policy: str) -> SpeculationSummary:
        """The line of a slot, added to what its sequence had before a preemption."""
        self._settle()
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
        self._settle()
        if self._details is not None:
            del self._details[slot]

    def plain(self, slots: Ints) -> None:
        """A step brought each of these one token, without a draft."""
        self._plain.append(slots)
        if len(self._plain) >= _MOST_NOTED:
            self._settle()

    def drafted(self, outcomes: Outcomes, survival: Floats) -> None:
        """A step judged drafts. survival: [S, K + 1] as predicted; the verified tokens' was expected to come."""
        self._drafted.append((outcomes, survival))
        if len(self._drafted) >= _MOST_NOTED:
            self._settle()

    def dropped(self, slots: Ints, methods: Ints, counts: Ints) -> None:
        """Drafted ahead, and never sent: so many tokens of each, [S]; no slot twice."""
        self._lines[slots[:, None], _OF_DROPPED] += counts[:, None]
        for column in _OF_DROPPED:
            np.add.at(self._methods[:, column], methods, counts)
        np.add.at(self._dropped, methods, counts)

    def left(self, methods: Ints, counts: Ints) -> None:
        """Of drafts that a step judged: so many tokens of each left between layers; they are not verified, [S]."""
        np.add.at(self._left, methods, counts)

    def stats(self, policy: str, method: str) -> SpeculationStats:
        self._settle()
        lines, expected = self._methods.tolist(), self._expected.tolist()
        dropped, left = self._dropped.tolist(), self._left.tolist()
        return SpeculationStats(
            policy=policy,
            method=method,
            num_drafts=sum(line[_DRAFTS] for line in lines),
            methods=tuple(
                MethodStats(
                    method=name,
                    drafted=line[_DRAFTED],
                    pruned=line[_PRUNED],
                    dropped=lost,
                    left=gone,
                    verified=line[_VERIFIED],
                    accepted=line[_ACCEPTED],
                    expected=mass,
                )
                for name, line, lost, gone, mass in zip(DRAFT_METHODS, lines, dropped, left, expected, strict=True)
            ),
            accepted_per_position=tuple(self._accepted_per_position.tolist()),
            gammas=tuple(zip(self._classes, map(tuple, self._gammas.tolist()), strict=True)),
        )

    def _settle(self) -> None:
        """Take in what was noted."""
        if self._plain:
            slots = np.concatenate(self._plain)
            self._plain.clear()
            self._lines[:, _STEPS] += np.bincount(slots, minlength=len(self._lines))
            self._gammas[:, 0] += np.bincount(self._class_of[slots], minlength=len(self._classes))
        if self._drafted:
            noted = self._drafted
            self._drafted = []
            self._settle_drafted(noted)

    def _settle_drafted(self, noted: list[tuple[Outcomes, Floats]]) -> None:
        outcomes = joined([each for each, _ in noted])
        slots, methods = outcomes.slots, outcomes.methods
        lengths, kept, accepted = outcomes.drafted, outcomes.verified, outcomes.accepted
        survival = np.concatenate([each for _, each in noted])
        lines = np.stack(
            (np.ones_like(kept), kept, (kept > 0).astype(np.int64), lengths, lengths - kept, kept, accepted),
            axis=-1,
        )
        reached = self._upto[accepted]
        np.add.at(self._lines, slots, lines)
        np.add.at(self._depths, slots, reached)
        np.add.at(self._methods, methods, lines)
        np.add.at(self._expected, methods, (survival[:, 1:] * self._upto[kept]).sum(axis=1))
        self._accepted_per_position += reached.sum(axis=0)
        if self._details is not None:
            for slot, num_kept, num_accepted in zip(slots.tolist(), kept.tolist(), accepted.tolist(), strict=True):
                if num_kept:
                    self._details[slot].append((num_kept, num_accepted))
        width = self._gammas.shape[1]
        cells = np.bincount(self._class_of[slots] * width + kept, minlength=self._gammas.size)
        self._gammas += cells.reshape(self._gammas.shape)
