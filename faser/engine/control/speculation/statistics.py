"""SpeculationStatistics: what speculation did, counted for reports alone. No decision reads it.

Owns the counters of every slot (a request's summary), of every method and class, the modes of steps, the reasons
for steps without drafts, and predicted against measured times. A step only notes its arrays; the counters take in
many steps at once, before they are read. Knows neither policies nor sequences.
"""

import time
from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from faser.config.speculation import DRAFT_METHODS
from faser.engine.contract.drafts import DraftTable
from faser.engine.contract.step_times import Role
from faser.engine.control.speculation.drafter_watch import DrafterWatch
from faser.engine.control.step_cost import ErrorTracker
from faser.types.answer import SpeculationSummary
from faser.types.arrays import Bools, Floats, Ints
from faser.types.request import DEFAULT_CLASS
from faser.types.statistics import (
    MethodStats,
    PaidRatio,
    PruneStats,
    RoleStats,
    SpeculationBalance,
    SpeculationStats,
)

PLAIN, SERIAL = "plain", "serial"  # modes: a step without drafts; one whose drafts were made before it
REQUEST, MEMORY, LOAD, GAIN = "request", "memory", "load", "gain"
BYPASS_REASONS = (LOAD, GAIN, MEMORY, REQUEST)

_STEPS, _GAMMA_SUM, _DRAFTS, _DRAFTED, _PRUNED, _VERIFIED, _ACCEPTED = range(7)
_COLUMNS = 7
_DROPPED_COLUMNS = [_DRAFTED, _PRUNED]
_TOKENS_COLUMNS = [_STEPS, _ACCEPTED]  # a step brings its accepted tokens and one more
_MOST_NOTED = 64  # steps that may wait to be counted


class SpeculationStatistics:
    """Counters of num_slots slots and drafts of at most cap tokens. classes: the operator's, by name.

    partition: the mode of a step with concurrent drafting. details: summaries list every draft, at the price of a
    line of Python for each. watch: is told of the drafts; None makes one.
    """

    def __init__(
        self,
        num_slots: int,
        cap: int,
        classes: tuple[str, ...],
        *,
        partition: str = SERIAL,
        details: bool = False,
        watch: DrafterWatch | None = None,
    ) -> None:
        self._watch = watch or DrafterWatch(num_slots)
        self._details: dict[int, list[tuple[int, int]]] | None = {} if details else None
        self._classes = tuple(dict.fromkeys((DEFAULT_CLASS, *classes)))
        self._class_of: Ints = np.zeros(num_slots, dtype=np.int64)
        self._lines: Ints = np.zeros((num_slots, _COLUMNS), dtype=np.int64)
        self._depths: Ints = np.zeros((num_slots, cap), dtype=np.int64)
        self._gammas: Ints = np.zeros((len(self._classes), cap + 1), dtype=np.int64)
        self._methods: Ints = np.zeros((len(DRAFT_METHODS), _COLUMNS), dtype=np.int64)
        self._dropped: Ints = np.zeros(len(DRAFT_METHODS), dtype=np.int64)
        self._pruned_rows: Ints = np.zeros(len(DRAFT_METHODS), dtype=np.int64)
        self._expected: Floats = np.zeros(len(DRAFT_METHODS))
        self._accepted_at: Ints = np.zeros((len(self._classes), cap), dtype=np.int64)
        self._upto = np.tri(cap + 1, cap, -1, dtype=np.int64)  # line n: 1 for the first n depths, 0 for the others
        self._no_survival = np.zeros((0, cap))
        self._undrafted: list[Many[int]] = []  # slots of steps that are not counted yet
        self._drafted: list[_VerifiedDrafts] = []
        self.pruning: PruneStats | None = None  # the data plane's latest
        self._partition = partition
        self._mode = self._next_mode = PLAIN
        self._mode_steps: Counter[str] = Counter(dict.fromkeys((PLAIN, SERIAL, partition), 0))
        self._switches: Counter[tuple[str, str]] = Counter()
        self._bypasses: Counter[str] = Counter(dict.fromkeys(BYPASS_REASONS, 0))
        self._catchup_tokens = 0
        self._drafting_s = (0.0, 0.0)  # before the step that is being made: predicted, measured
        self._step_times, self._verify_lane, self._draft_lane = ErrorTracker(), ErrorTracker(), ErrorTracker()
        self._overlap_s = 0.0
        self._entered_s = 0.0
        self._decide_s = 0.0

    def start(self, slot: int, class_name: str) -> None:
        """A sequence of this class takes over the slot, whose counters start from 0."""
        self._settle()
        self._class_of[slot] = self._classes.index(class_name)
        self._lines[slot] = 0
        self._depths[slot] = 0
        if self._details is not None:
            self._details[slot] = []

    def release(self, slot: int) -> None:
        """The sequence leaves the slot."""
        self._settle()
        if self._details is not None:
            del self._details[slot]

    def summary(self, slot: int, before: SpeculationSummary | None, policy: str) -> SpeculationSummary:
        """The counters of a slot, added to what its sequence had before a preemption."""
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

    def count_undrafted(self, slots: Many[int]) -> None:
        """A step sampled one token for each of these slots, without a draft."""
        self._undrafted.append(slots)
        if len(self._undrafted) >= _MOST_NOTED:
            self._settle()

    def count_drafts(
        self, drafts: DraftTable, kept: Ints, survival: Floats, accepted: Ints, *, num_decided: int = 0
    ) -> None:
        """A step verified drafts.

        Kept, accepted: [S] tokens. survival: [S, K + 1]; num_decided: as in StepDrafts.
        """
        lengths = drafts.lengths - num_decided
        expected = self._no_survival
        if np.count_nonzero(kept):
            expected = survival[kept.nonzero()[0], 1:]
        self._drafted.append(_VerifiedDrafts(drafts.slots, drafts.methods, lengths, kept, accepted, expected))
        if len(self._drafted) >= _MOST_NOTED:
            self._settle()

    def count_dropped(self, slots: Ints, methods: Ints, counts: Ints) -> None:
        """Overlapped drafts lost `counts` tokens each, which the target never sees. [S]; no slot occurs twice."""
        self._lines[slots[:, None], _DROPPED_COLUMNS] += counts[:, None]
        for column in _DROPPED_COLUMNS:
            np.add.at(self._methods[:, column], methods, counts)
        np.add.at(self._dropped, methods, counts)

    def count_pruned_rows(self, methods: Ints, counts: Ints) -> None:
        """`counts` rows of each draft left the step between two layers, [S]; they do not count as verified."""
        np.add.at(self._pruned_rows, methods, counts)

    def count_bypasses(self, reason: str, count: int) -> None:
        """`count` sequences went through a step without a draft, for this reason."""
        self._bypasses[reason] += count

    def count_bypassed(self, reason: str, mask: Bools) -> None:
        """The sequences in mask went through a step without a draft, for this reason."""
        self.count_bypasses(reason, int(np.count_nonzero(mask)))

    def count_catchup(self, num_tokens: int) -> None:
        """The draft model computed the missing KV of num_tokens tokens."""
        self._catchup_tokens += num_tokens

    def launch(self, *, drafts: bool) -> None:
        """A step is about to run, with drafts among its rows or without."""
        self._next_mode = SERIAL if drafts else PLAIN

    def launch_overlapped(self) -> None:
        """Drafts are made concurrently with that step."""
        self._next_mode = self._partition

    def count_mode(self) -> None:
        """The step that was launched is done."""
        self._mode_steps[self._next_mode] += 1
        if self._next_mode != self._mode:
            self._switches[self._mode, self._next_mode] += 1
            self._mode = self._next_mode

    def time_drafting(self, predicted_s: float, measured_s: float) -> None:
        """The drafts of the next step have come."""
        self._drafting_s = (predicted_s, measured_s)

    def time_step(self, predicted_s: float, measured_s: float) -> None:
        """A step without concurrent drafting is done. Its drafting time is added."""
        draft_predicted_s, draft_measured_s = self._drafting_s
        self._step_times.add(predicted_s + draft_predicted_s, measured_s + draft_measured_s)
        self._drafting_s = (0.0, 0.0)

    def time_lanes(self, verify: tuple[float, float], draft: tuple[float, float], overlap_s: float) -> None:
        """A step with concurrent drafting is done. verify, draft: predicted and measured seconds of each lane.

        overlap_s: time in which both lanes were busy.
        """
        self._verify_lane.add(*verify)
        self._draft_lane.add(*draft)
        self._overlap_s += overlap_s

    def deciding(self) -> "SpeculationStatistics":
        """Return a context in which the host decides or learns; its time is counted."""
        return self

    def __enter__(self) -> None:
        self._entered_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._decide_s += time.perf_counter() - self._entered_s

    def snapshot(
        self,
        *,
        policy: str,
        method: str,
        roles: tuple[RoleStats, ...],
        cycle: RoleStats | None,
        draft_share: float,
        partition_fallback: str,
        paid: tuple[PaidRatio, ...],
        balance: SpeculationBalance | None,
    ) -> SpeculationStats:
        """All counters. roles: the cost model's times; its role of whole forwards is reported as verify.

        cycle: times of steps with concurrent drafting; None: the engine has no lanes.
        """
        self._settle()
        verify = [replace(each, role="verify") if each.role == Role.STEP else each for each in roles]
        lanes: tuple[RoleStats, ...] = ()
        if cycle is not None:
            lanes = (cycle, self._verify_lane.stats("verify"), self._draft_lane.stats("draft"))
        return SpeculationStats(
            policy=policy,
            method=method,
            num_drafts=int(self._methods[:, _DRAFTS].sum()),
            methods=self._method_stats(),
            accepted_at=tuple(zip(self._classes, map(tuple, self._accepted_at.tolist()), strict=True)),
            gammas=tuple(zip(self._classes, map(tuple, self._gammas.tolist()), strict=True)),
            mode=self._mode,
            mode_steps=tuple(self._mode_steps.items()),
            switches=tuple((one, other, times) for (one, other), times in self._switches.items()),
            bypasses=tuple(self._bypasses.items()),
            roles=(self._step_times.stats("step"), *verify, *lanes),
            decide_s=self._decide_s,
            catchup_tokens=self._catchup_tokens,
            draft_share=draft_share,
            overlap_s=self._overlap_s,
            partition=self._partition,
            partition_fallback=partition_fallback,
            pruning=self.pruning,
            paid=paid,
            balance=balance,
            rebuilds=tuple((drafter, cause, count) for (drafter, cause), count in self._watch.rebuilds.items()),
        )

    def _method_stats(self) -> tuple[MethodStats, ...]:
        counters = (self._methods, self._dropped, self._pruned_rows, self._expected)
        return tuple(
            MethodStats(
                method=name,
                drafted=line[_DRAFTED],
                pruned=line[_PRUNED],
                dropped=dropped,
                cut=pruned_rows,
                verified=line[_VERIFIED],
                accepted=line[_ACCEPTED],
                expected=expected,
            )
            for name, line, dropped, pruned_rows, expected in zip(
                DRAFT_METHODS, *(each.tolist() for each in counters), strict=True
            )
        )

    def _settle(self) -> None:
        """Count the steps that were noted."""
        if self._undrafted:
            slots = np.array([*chain.from_iterable(self._undrafted)], dtype=np.int64)
            self._undrafted.clear()
            self._lines[:, _STEPS] += np.bincount(slots, minlength=len(self._lines))
            self._gammas[:, 0] += np.bincount(self._class_of[slots], minlength=len(self._classes))
        if self._drafted:
            noted = self._drafted
            self._drafted = []
            self._settle_drafted(noted)

    def _settle_drafted(self, noted: list["_VerifiedDrafts"]) -> None:
        slots, methods, lengths, kept, accepted, survival = map(np.concatenate, zip(*noted, strict=True))
        lines = np.stack((np.ones_like(kept), kept, kept > 0, lengths, lengths - kept, kept, accepted), axis=-1)
        _add_lines(self._lines, slots, lines)
        _add_depths(self._depths, slots, accepted)
        self._watch.take(slots, methods, kept, accepted, self._lines[slots][:, _TOKENS_COLUMNS].sum(axis=1))
        _add_lines(self._methods, methods, lines)
        verifying = kept.nonzero()[0]
        expected = (survival * self._upto[kept[verifying]]).sum(axis=1)
        self._expected += np.bincount(methods[verifying], expected, len(self._expected))
        _add_depths(self._accepted_at, self._class_of[slots], accepted)
        if self._details is not None:
            for slot, num_kept, num_accepted in zip(slots.tolist(), kept.tolist(), accepted.tolist(), strict=True):
                if num_kept:
                    self._details[slot].append((num_kept, num_accepted))
        width = self._gammas.shape[1]
        cells = np.bincount(self._class_of[slots] * width + kept, minlength=self._gammas.size)
        self._gammas += cells.reshape(self._gammas.shape)


def _add_lines(counters: Ints, at: Ints, lines: Ints) -> None:
    """Add lines, [N, C], to those lines of the counters, [L, C], of which some may recur."""
    width = counters.shape[1]
    cells = (at[:, None] * width + np.arange(width)).ravel()
    found = np.bincount(cells, lines.ravel(), counters.size)
    counters += found.reshape(counters.shape).astype(np.int64)


def _add_depths(counters: Ints, at: Ints, counts: Ints) -> None:
    """Add 1 to the first counts[i] counters of line at[i]; counters: [L, K]."""
    width = counters.shape[1] + 1
    ends = np.bincount(at * width + counts, minlength=len(counters) * width).reshape(-1, width)
    counters += ends[:, :0:-1].cumsum(axis=1)[:, ::-1]


class _VerifiedDrafts(NamedTuple):
    """The drafts that a step verified: [S] each. survival: [V, K] of those that keep a token."""

    slots: Ints
    methods: Ints
    lengths: Ints
    kept: Ints
    accepted: Ints
    survival: Floats
