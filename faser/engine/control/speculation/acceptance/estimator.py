"""Acceptance: how likely draft tokens are to be accepted, learned from earlier drafts. No torch.

Owns the counts of every slot and of all slots together, by depth, and one logistic curve per method over the
drafter's confidence. Decides nothing. Tokens after the first rejection were not judged and teach nothing (arXiv
2406.14066 counts them as rejected). Tokens that were cut before verification count with their predicted
acceptance: otherwise the estimate would only know the drafts that looked good.

    depth        1      2      3      4      5
    draft        x1     x2     x3     x4     x5        confidences of all five are known
    verified     x1     x2     x3                      x4, x5 were cut
    accepted     yes    no                             x3 was never judged
"""

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.config.drafters import DRAFT_METHODS, DRAFTERS, PASS_METHODS
from faser.engine.control.speculation.acceptance.calibration import LogisticCurve
from faser.engine.control.speculation.acceptance.drift import Drift

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Numbers that meet arrays in every step are arrays themselves: numpy takes half as long over them.
_SHRINK = np.array(20.0)  # judged tokens from which a slot's own evidence outweighs that of all slots
_PRIOR_MASS = 8.0  # judged tokens that the prior is worth
_SLOT_KEPT = np.array(0.5 ** (1 / 60))  # of a slot's evidence after one more judged token of the same depth
_SLOT_LOST = 1 - _SLOT_KEPT
_ALL_KEPT = np.array(0.5 ** (1 / 600))
_DRIFT_LEAVES = 8.0  # judged tokens' worth of the evidence, once it is seen to be out of date
_SEQUENCES_PER_READING = 16  # with 16 sequences two steps teach the curves together, with 32 three
_LEAST, _MOST = 0.005, 0.995
_LOWEST, _HIGHEST = np.array(_LEAST), np.array(_MOST)
_OFFSET_SHRINK = np.array(6.0)
_LARGEST_OFFSET = np.array(3.0)
_SMALLEST_OFFSET = -_LARGEST_OFFSET
_ONE = np.array(1.0)


@dataclass(slots=True, kw_only=True)
class Outcomes:
    """What became of one step's drafts, of S sequences. No slot occurs twice.

    slots, methods: [S]; methods index DRAFT_METHODS. drafted >= verified >= accepted: [S] tokens.
    confidences: [S, K], as in Draft; what lies beyond drafted is ignored.
    """

    slots: Ints
    methods: Ints
    drafted: Ints
    verified: Ints
    accepted: Ints
    confidences: Floats

    def without(self, slot: int) -> "Outcomes":
        """Those of the other slots."""
        others = self.slots != slot
        return Outcomes(
            slots=self.slots[others],
            methods=self.methods[others],
            drafted=self.drafted[others],
            verified=self.verified[others],
            accepted=self.accepted[others],
            confidences=self.confidences[others],
        )


class Acceptance:
    """Estimates for num_slots slots and drafts of up to cap tokens, K.

    always_drafts: the drafter proposes as many tokens as are requested (models), so survival is acceptance alone.
    method: its prior is that of a slot before the first draft.
    """

    def __init__(self, num_slots: int, cap: int, *, method: str, always_drafts: bool) -> None:
        assert cap >= 1, "a draft has at least one token"
        self._num_slots = num_slots
        self._cap = cap
        self._first_method = DRAFT_METHODS.index(method)
        self._always_drafts = always_drafts
        self._ones = np.ones(cap)
        self._upto: Floats = np.tri(cap + 1, cap, -1)  # line n: 1 for the first n depths, 0 for the others
        self._is_upto = self._upto > 0
        self._held: list[Outcomes] = []  # of steps that a cached decision has served; see hold
        self.forget()

    def forget(self) -> None:
        """Start over, for running sequences too."""
        slots, methods, cap = self._num_slots, len(DRAFT_METHODS), self._cap
        drafters = DRAFTERS.values()
        prior = np.array([each.prior_acceptance for each in drafters])[:, None]
        self._method = np.full(slots, self._first_method, dtype=np.int64)
        self._evidence = np.zeros((slots, 2, cap))  # tokens judged, tokens accepted
        self._all_evidence = np.full((methods, 2, cap), _PRIOR_MASS)
        self._all_evidence[:, 1] *= prior
        self._requested = np.zeros((slots, 2, cap))  # tokens requested, tokens proposed
        self._all_requested = np.full((2, cap), _PRIOR_MASS)
        self._all_requested[1] /= 2
        self._drift = Drift(slots, methods)
        self._surprise = np.zeros((2, slots + 1))  # by slot: decayed surprise of the curve, and its weight
        self._offset = np.zeros(slots + 1)  # logits by which a slot's tokens do better than the curve predicts
        self._curves = tuple(map(LogisticCurve, drafters))
        self._unread: list[Outcomes] = []  # the newest steps, from which the curves have not learned yet
        self._unread_ends: list[Ints] = []  # of the same steps, see _judged_and_accepted
        self._num_read = 0  # steps before the unread ones
        self._since = np.zeros(slots, dtype=np.int64)  # number of the first step of a slot's sequence
        self._newest = 0  # the latest of these
        self._usual = np.empty((methods, 2 * cap + 1))  # of all slots, see _sum_up
        self._sum_up(range(methods))
        self._shown: tuple[Ints, Floats] | None = None  # slots, and their acceptance as _by_depth last found it

    @property
    def cap(self) -> int:
        return self._cap

    def start(self, slot: int) -> None:
        """A new sequence takes the slot. It starts from what holds for all slots."""
        self._since[slot] = self._newest = self._num_read + len(self._unread)
        self._shown = None
        self._method[slot] = self._first_method
        self._drift.start(slot)
        for table in (self._evidence, self._requested, self._offset):
            table[slot] = 0.0
        self._surprise[:, slot] = 0.0

    def release(self, slot: int) -> None:
        """The slot is free. What its sequence has taught about all stays; what is still held is lost."""
        if self._held:
            self._held = [each.without(slot) for each in self._held]
        self.start(slot)

    def survival(self, slots: Ints, cap: int | None = None) -> Floats:
        """[S, cap + 1]; column k: the chance that a draft has k tokens or more and the first k are accepted."""
        cap = self._cap if cap is None else cap
        found = np.empty((len(slots), cap + 1))
        found[:, 0] = 1.0
        np.multiply.accumulate(self._by_depth(slots)[:, :cap], axis=1, out=found[:, 1:])
        if not self._always_drafts:
            found[:, 1:] *= self._available(slots)[:, :cap]
        return found

    def drafted_survival(self, slots: Ints, methods: Ints, lengths: Ints, confidences: Floats) -> Floats:
        """[S, K + 1], of drafts that are there, from their tokens' own confidences; 0 beyond lengths.

        Arguments as in Outcomes.
        """
        chances = self._by_confidence(slots, methods, confidences)
        chances *= self._upto.take(lengths, axis=0)
        found = np.empty((len(slots), self._cap + 1))
        found[:, 0] = 1.0
        np.multiply.accumulate(chances, axis=1, out=found[:, 1:])
        return found

    def calibration(self, method: str, slots: Ints | None = None) -> tuple[float, float]:
        """Acceptance of a token is about sigmoid(intercept + slope * confidence), for StopRule. Models only.

        slots: their mean offset is part of the intercept.
        """
        assert method in PASS_METHODS, f"{method} has no passes to stop"
        intercept, slope = self._curves[DRAFT_METHODS.index(method)].line()
        if slots is not None and len(slots):
            intercept += float(np.add.reduce(self._offset.take(slots))) / len(slots)
        return intercept, slope

    def learn_lengths(self, slots: Ints, requested: Ints, drafted: Ints) -> None:
        """Of `requested` tokens the drafter proposed `drafted`: [S] each, requested >= drafted."""
        if self._always_drafts or not len(slots):
            return
        counts = self._upto.take(_pairs(requested, drafted), axis=0)
        _decay(self._requested, slots, counts)
        of_all = np.add.reduce(counts, axis=0)
        self._all_requested *= _ALL_KEPT ** of_all[0]
        self._all_requested += of_all

    def hold(self, outcomes: Outcomes) -> None:
        """Keep a step's outcomes for learn_held: while a decision serves several steps nothing reads them."""
        self._held.append(outcomes)

    def learn_held(self) -> None:
        """Learn the outcomes that are held, all at once."""
        if self._held:
            self.learn(*self._held)
            self._held.clear()

    def learn(self, *steps: Outcomes) -> None:
        """Learn from a step, or from several steps in their order, in which each slot had one sequence only.

        Several steps at once forget less, and notice a change later. Sequences without a draft may be among them.
        """
        outcomes = joined(steps)
        accepted, verified = outcomes.accepted, outcomes.verified
        if not len(accepted):
            return
        ends = _judged_and_accepted(outcomes)
        counts = self._upto.take(ends, axis=0)  # [S, 2, K]
        cut = ((accepted == verified) & (verified < outcomes.drafted)).nonzero()[0]
        if len(cut):
            self._impute(outcomes, cut, counts)
        slots, methods, of_slots = outcomes.slots, outcomes.methods, counts
        present = _present(methods)
        if len(steps) > 1:
            slots, methods, of_slots = self._by_slot(steps, counts)
        expected = self._by_depth(slots)
        self._learn_counts(slots, outcomes.methods, present, counts, of_slots)
        stale = self._drift.watch(slots, methods, expected, of_slots)
        if stale is not None:
            self._drop(*stale)
        self._unread.extend(steps)
        self._unread_ends.append(ends)
        if len(self._unread) > len(slots) // _SEQUENCES_PER_READING:
            self._read()
        self._note_methods(outcomes, present)
        self._shown = None

    def _note_methods(self, outcomes: Outcomes, present: list[int]) -> None:
        """Note which method each slot's drafts come from, if that may have changed."""
        if len(present) == 1 and not np.count_nonzero(self._method.take(outcomes.slots) != present[0]):
            return
        with_draft = outcomes.drafted > 0
        self._method[outcomes.slots[with_draft]] = outcomes.methods[with_draft]

    def _by_depth(self, slots: Ints) -> Floats:
        """[S, K] acceptance by depth, read only: a slot's counts, shrunk to the common ones at the slot's odds."""
        if self._shown is not None and self._shown[0] is slots:
            return self._shown[1]
        cap, usual_of_all = self._cap, self._usual.take(self._method.take(slots), axis=0)
        common, against, mean = usual_of_all[:, :cap], usual_of_all[:, cap:-1], usual_of_all[:, -1]
        evidence = self._evidence.take(slots, axis=0)
        judged, accepted = evidence[:, 0], evidence[:, 1]
        mass, own = evidence.reshape(-1, cap).dot(self._ones).reshape(-1, 2).T
        mass += _SHRINK
        own += mean
        usual = (judged * common).dot(self._ones)
        usual += mean
        odds = (own * (mass - usual) / (usual * (mass - own)))[:, None]
        total = against + odds
        found: Floats = np.divide(odds * _SHRINK, total, out=total)
        found += accepted
        found /= judged + _SHRINK
        self._shown = slots, _within(found)
        return found

    def _sum_up(self, methods: Iterable[int]) -> None:
        """Update the lines of _usual, [2 K + 1], of these methods from what all their slots have taught.

        Acceptance by depth, shrunk to its mean; the odds against it; accepted tokens among _SHRINK tokens that are
        spread over all depths.
        """
        for method in methods:
            evidence = self._all_evidence[method]
            num_judged, num_accepted = np.add.reduce(evidence, axis=1).tolist()
            usual = _PRIOR_MASS * num_accepted / num_judged
            judged, accepted = evidence.tolist()
            chances = [
                min(max((good + usual) / (count + _PRIOR_MASS), _LEAST), _MOST)
                for good, count in zip(accepted, judged, strict=True)
            ]
            line = self._usual[method]
            line[:-1] = chances + [(1 - chance) / chance for chance in chances]
            line[-1] = np.add.reduce(line[: self._cap]) * (_SHRINK / self._cap)

    def _available(self, slots: Ints) -> Floats:
        """[S, K] chance that a draft has at least 1, 2, … tokens; never rises with depth."""
        common = self._all_requested[1] / self._all_requested[0]
        found = self._requested.take(slots, axis=0)
        chances = (found[:, 1] + _SHRINK * common) / (found[:, 0] + _SHRINK)
        return np.minimum.accumulate(chances, axis=1)

    def _by_confidence(self, slots: Ints, methods: Ints, confidences: Floats) -> Floats:
        """[S, K] acceptance given confidence and depth, moved by the slot's offset."""
        present = _present(methods)
        if len(present) == 1:
            logits = self._curves[present[0]].logits(confidences)
        else:
            logits = np.empty_like(confidences)
            for method in present:
                chosen = methods == method
                logits[chosen] = self._curves[method].logits(confidences[chosen])
        logits += self._offset.take(slots)[:, None]
        np.negative(logits, out=logits)
        np.exp(logits, out=logits)
        logits += _ONE
        np.reciprocal(logits, out=logits)
        return _within(logits)

    def _impute(self, outcomes: Outcomes, cut: Ints, counts: Floats) -> None:
        """Add to counts what the tokens that were cut are predicted to have brought. cut: the lines with cuts."""
        drafted, verified = outcomes.drafted[cut], outcomes.verified[cut]
        missing = self._upto.take(drafted, axis=0) - self._upto.take(verified, axis=0)
        chances = self._by_confidence(outcomes.slots[cut], outcomes.methods[cut], outcomes.confidences[cut])
        reached = np.multiply.accumulate(np.where(missing, chances, 1.0), axis=1)
        reached *= missing
        counts[cut, 1] += reached
        missing[:, 1:] *= np.where(missing[:, :-1], reached[:, :-1], 1.0)
        counts[cut, 0] += missing

    def _read(self) -> None:
        """Teach every method's curve its judged tokens, and every slot's offset what the curve leaves unexplained.

        Tokens of sequences that have left go to the last line, which is no slot's.
        """
        outcomes, ends = joined(self._unread), _stacked(self._unread_ends)
        slots = self._still_there(outcomes.slots)
        self._num_read += len(self._unread)
        self._unread.clear()
        self._unread_ends.clear()
        present = _present(outcomes.methods)
        for method in present:
            judged = self._is_upto.take(ends[:, 0], axis=0)
            if len(present) > 1:
                judged &= (outcomes.methods == method)[:, None]
            rows, depths = judged.nonzero()
            if not len(rows):
                continue
            curve, lines = self._curves[method], slots.take(rows)
            features = curve.features(outcomes.confidences[judged], depths)
            good = depths < ends[:, 1].take(rows)
            surprise, weight = curve.learn(features, good, self._offset.take(lines))
            num_lines = len(self._offset)
            self._surprise *= _SLOT_KEPT ** np.bincount(lines, minlength=num_lines)
            self._surprise[0] += np.bincount(lines, surprise, num_lines)
            self._surprise[1] += np.bincount(lines, weight, num_lines)
        if slots is not outcomes.slots:
            self._surprise[:, -1] = 0.0
        offsets = self._surprise[0] / (self._surprise[1] + _OFFSET_SHRINK)
        np.maximum(offsets, _SMALLEST_OFFSET, out=offsets)
        self._offset = np.minimum(offsets, _LARGEST_OFFSET, out=offsets)
        self._sum_up(present)

    def _still_there(self, slots: Ints) -> Ints:
        """The slots of the unread drafts; num_slots for those of sequences that have left."""
        if self._newest <= self._num_read:
            return slots
        step = self._num_read + np.repeat(np.arange(len(self._unread)), [len(each.slots) for each in self._unread])
        return np.where(step < self._since[slots], self._num_slots, slots)

    def _by_slot(self, steps: Many[Outcomes], counts: Floats) -> tuple[Ints, Ints, Floats]:
        """The slots that occur, [S]; their newest methods, [S]; and the sums of their counts, [S, 2, K]."""
        occurs = np.zeros(self._num_slots, dtype=np.bool_)
        methods = np.zeros(self._num_slots, dtype=np.int64)
        totals = np.zeros((self._num_slots, 2, self._cap))
        first = 0
        for each in steps:
            last = first + len(each.slots)
            occurs[each.slots] = True
            methods[each.slots] = each.methods
            totals[each.slots] += counts[first:last]
            first = last
        slots = occurs.nonzero()[0]
        return slots, methods[slots], totals[slots]

    def _learn_counts(
        self, slots: Ints, methods: Ints, present: list[int], counts: Floats, of_slots: Floats
    ) -> None:
        """counts: [N, 2, K], by draft, of methods [N], of which `present` occur. of_slots: [S, 2, K], by slot."""
        _decay(self._evidence, slots, of_slots)
        for method in present:
            of_method = np.add.reduce(counts if len(present) == 1 else counts[methods == method], axis=0)
            evidence = self._all_evidence[method]
            evidence *= _ALL_KEPT ** of_method[0]
            evidence += of_method

    def _drop(self, slots: Ints, methods: Ints) -> None:
        """Keep _DRIFT_LEAVES judged tokens of what these slots and methods taught: the rest is out of date."""
        for evidence, chosen in ((self._evidence, slots), (self._all_evidence, methods)):
            mass = evidence[chosen, 0].sum(axis=1)
            evidence[chosen] *= (_DRIFT_LEAVES / np.maximum(mass, _DRIFT_LEAVES))[:, None, None]
        self._surprise[:, slots] = 0.0
        self._offset[slots] = 0.0
        for method in methods:
            self._curves[method].forget()
        if len(methods):
            self._sum_up(range(len(self._curves)))


def joined(steps: Many[Outcomes]) -> Outcomes:
    """Several steps as one, in which slots recur."""
    if len(steps) == 1:
        return steps[0]
    return Outcomes(
        slots=np.concatenate([each.slots for each in steps]),
        methods=np.concatenate([each.methods for each in steps]),
        drafted=np.concatenate([each.drafted for each in steps]),
        verified=np.concatenate([each.verified for each in steps]),
        accepted=np.concatenate([each.accepted for each in steps]),
        confidences=np.concatenate([each.confidences for each in steps]),
    )


def _decay(table: Floats, slots: Ints, counts: Floats) -> None:
    """Add counts, [S, 2, K], to the slots' lines of table, which decay with every newly judged token."""
    lines = table.take(slots, axis=0)
    lines *= _ONE - _SLOT_LOST * counts[:, :1]
    lines += counts
    table[slots] = lines


def _judged_and_accepted(outcomes: Outcomes) -> Ints:
    """[S, 2] how many tokens of each draft were judged, and how many of these were accepted."""
    return _pairs(outcomes.accepted + (outcomes.accepted < outcomes.verified), outcomes.accepted)


def _pairs(first: Ints, second: Ints) -> Ints:
    """[S, 2] from two arrays of [S]."""
    found = np.empty((len(first), 2), dtype=np.int64)
    found[:, 0] = first
    found[:, 1] = second
    return found


def _stacked(parts: Many[Ints]) -> Ints:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _present(methods: Ints) -> list[int]:
    """The methods that occur."""
    return methods.tolist() if len(methods) == 1 else np.bincount(methods).nonzero()[0].tolist()


def _within(chances: Floats) -> Floats:
    """Limit chances so that none is certain or impossible; in place."""
    np.maximum(chances, _LOWEST, out=chances)
    np.minimum(chances, _HIGHEST, out=chances)
    return chances
