"""Acceptance: how likely draft tokens are to be accepted, learned from earlier drafts. No torch.

Two questions are asked:

    after drafting    how likely is this draft, with these confidences, to survive?       drafted_survival
    before drafting   how likely would the draft be that the sequence gets next?          survival

The first is answered by a logistic curve for each method (confidence and depth to acceptance), an offset for each
method and slot (this text is easier or harder than the curve says), and a shift for all requests whose tokens are
drawn at random. All of these learn from judged tokens alone; a token that was not reached teaches nothing (arXiv
2406.14066 counts it as rejected). The second is the mean of what the first said about earlier drafts, of the slot
and of all slots: so it knows how often there is no draft, how long drafts are and how confident, whether their
tokens were verified or not.

A request that edits logits is refused tokens that the model alone would have chosen. It teaches its own slot only.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.config.speculation import DRAFT_METHODS, DRAFTERS, PASS_METHODS
from faser.engine.control.speculation.acceptance.calibration import LogisticCurve

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Numbers that meet arrays in every step are arrays themselves: numpy takes half as long over them.
_SHRINK = np.array(4.0)  # drafts from which a slot's own mean outweighs that of all slots
_OWN_KEPT = np.array(0.5 ** (1 / 5))  # of a slot's mean after one more draft
_ALL_KEPT = 0.5 ** (1 / 200)  # of the mean of all slots
_PRIOR_DRAFTS = np.array(8.0)  # drafts that the prior is worth
_PRIOR_FOUND = 0.5  # share of look-ups that are expected to find another token
_PRIOR_CHANCE = (
    DRAFTERS["draft_model"].prior_acceptance,
    DRAFTERS["suffix"].prior_acceptance * _PRIOR_FOUND,
)  # by kind: of a token, before any draft
_OFFSET_PRECISION = 4.0  # of the prior of offsets: their variance is 1 / 4
_EDITED_PRECISION = 0.25  # of requests that edit logits: they may be like no other
_PRECISION_KEPT = 0.5 ** (1 / 60)  # of what is known of an offset after one more judged token
_SHIFT_PRECISION = 1.0  # of the prior of the shift of requests that sample: its variance is 1
_SHIFT_KEPT = 0.5 ** (1 / 400)  # of what is known of that shift after one more judged token
_LARGEST_OFFSET = np.array(4.0)
_SMALLEST_OFFSET = -_LARGEST_OFFSET
_LOWEST, _HIGHEST = np.array(0.005), np.array(0.995)
_ONE = np.array(1.0)
_MODEL, _TEXT = 0, 1  # kinds of drafters; each has means of its own


@dataclass(slots=True, kw_only=True)
class Verdicts:
    """What a step says about drafts, [S]; a slot may recur.

    methods: index DRAFT_METHODS. judged >= accepted: tokens, from the first one on; at most one judged token was
    not accepted, and it is the last. confidences: [S, K], as in Draft; what lies beyond the judged is ignored.
    """

    slots: Ints
    methods: Ints
    judged: Ints
    accepted: Ints
    confidences: Floats

    def among(self, chosen: Bools) -> "Verdicts":
        return Verdicts(
            slots=self.slots[chosen],
            methods=self.methods[chosen],
            judged=self.judged[chosen],
            accepted=self.accepted[chosen],
            confidences=self.confidences[chosen],
        )


class Acceptance:
    """Estimates for num_slots slots and drafts of up to cap tokens, K."""

    def __init__(self, num_slots: int, cap: int) -> None:
        assert cap >= 1, "a draft has at least one token"
        self._num_slots = num_slots
        self._cap = cap
        self._upto: Floats = np.tri(cap + 1, cap, -1)  # line n: 1 for the first n depths, 0 for the others
        self._is_upto = self._upto > 0
        self._held: list[Verdicts] = []  # of steps that a cached decision has served; see hold
        self._teaches = np.ones(num_slots, dtype=np.bool_)  # by slot: it says something about other slots too
        self._samples = np.zeros(num_slots)  # by slot: 1 where the target draws its tokens at random
        self._prior_precision = np.full(num_slots, _OFFSET_PRECISION)  # by slot: of the prior of its offsets
        self.forget()

    def forget(self) -> None:
        """Start over, for running sequences too."""
        slots, cap = self._num_slots, self._cap
        self._curves = tuple(map(LogisticCurve, DRAFTERS.values()))
        methods = len(DRAFTERS)
        self._offset = np.zeros((methods, slots))  # logits by which a slot's tokens do better than the curve says
        self._precision = np.zeros((methods, slots))  # of the offset, in addition to the prior's
        self._shift = [0.0] * methods  # logits by which tokens do better where they are drawn at random
        self._shift_precision = [0.0] * methods
        # By kind of drafter: sums over drafts of the chance to reach a depth, and of the chance to pass it.
        self._own = np.zeros((2, slots, 2, cap))
        self._all = np.zeros((2, 2, cap))

    @property
    def cap(self) -> int:
        return self._cap

    def start(self, slot: int, *, teaches: bool = True, samples: bool = False) -> None:
        """A new sequence takes the slot. It starts from what holds for all slots.

        teaches: what becomes of its drafts says something about those of other sequences. samples: the target
        draws its tokens at random; such drafts do worse, whatever their confidence.
        """
        self._teaches[slot] = teaches
        self._samples[slot] = samples
        self._prior_precision[slot] = _OFFSET_PRECISION if teaches else _EDITED_PRECISION
        self._offset[:, slot] = self._precision[:, slot] = 0.0
        self._own[:, slot] = 0.0

    def release(self, slot: int) -> None:
        """The slot is free. What its sequence has taught about all stays; what is still held is lost."""
        self._held = [each.among(each.slots != slot) if slot in each.slots else each for each in self._held]
        self.start(slot)

    def survival(self, slots: Ints, *, by_model: bool) -> Floats:
        """[S, K + 1]; column k: the chance that a draft has k tokens or more and the first k are accepted.

        by_model: of drafts by a model, which always has a token to propose; else from text.
        """
        kind = _MODEL if by_model else _TEXT
        found = np.empty((len(slots), self._cap + 1))
        found[:, 0] = 1.0
        common = self._common(kind)
        own = self._own[kind].take(slots, axis=0)
        chances = own[:, 1]
        chances += common * _SHRINK
        chances /= own[:, 0] + _SHRINK
        np.multiply.accumulate(_within(chances), axis=1, out=found[:, 1:])
        return found

    def _common(self, kind: int) -> Floats:
        """[K] the chance to pass each depth once it is reached, of all slots.

        Depths that few drafts have reached are like the others: how else could a longer draft ever seem to pay?
        """
        reached, passed = self._all[kind]
        prior = float(_PRIOR_DRAFTS)
        usual = (float(np.add.reduce(passed)) + prior * _PRIOR_CHANCE[kind]) / (
            float(np.add.reduce(reached)) + prior
        )
        found: Floats = passed + _PRIOR_DRAFTS * usual
        found /= reached + _PRIOR_DRAFTS
        return found

    def drafted_survival(self, slots: Ints, methods: Ints, lengths: Ints, confidences: Floats) -> Floats:
        """[S, K + 1], of drafts that are there, from their tokens' own confidences; 0 beyond lengths: [S].

        Other arguments as in Verdicts.
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
        number = DRAFT_METHODS.index(method)
        intercept, slope = self._curves[number].line()
        if slots is not None and len(slots):
            intercept += float(np.add.reduce(self._offsets(number, slots))) / len(slots)
        return intercept, slope

    def note_drafts(
        self, slots: Ints, requested: Ints, lengths: Ints, survival: Floats, *, by_model: bool
    ) -> None:
        """Drafts have come; no slot occurs twice. requested >= lengths: [S] tokens.

        survival: [S, K + 1], as of drafted_survival. A look-up that proposes less than was requested had no more;
        a model that does so was stopped, and what it would have proposed next is not known.
        """
        reached = self._upto.take(lengths if by_model else requested, axis=0)
        counts = np.empty((len(slots), 2, self._cap))
        np.multiply(reached, survival[:, :-1], out=counts[:, 0])
        np.multiply(reached, survival[:, 1:], out=counts[:, 1])
        kind = _MODEL if by_model else _TEXT
        own = self._own[kind]
        lines = own.take(slots, axis=0)
        lines *= _OWN_KEPT
        lines += counts
        own[slots] = lines
        teaching = self._teaching(slots)
        if teaching is not None:
            counts = counts[teaching]
        of_all = self._all[kind]
        of_all *= _ALL_KEPT ** len(counts)
        of_all += np.add.reduce(counts, axis=0)

    def note_nothing_found(self, slots: Ints) -> None:
        """As note_drafts, where no look-up found a token."""
        own = self._own[_TEXT]
        own[slots] *= _OWN_KEPT
        own[slots, 0, 0] += 1.0
        count = np.count_nonzero(self._teaches.take(slots))
        self._all[_TEXT] *= _ALL_KEPT**count
        self._all[_TEXT, 0, 0] += count

    def hold(self, verdicts: Verdicts) -> None:
        """Keep a step's verdicts for learn_held: while a decision serves several steps nothing reads them."""
        self._held.append(verdicts)

    def learn_held(self) -> None:
        """Learn the verdicts that are held, all at once."""
        if self._held:
            self.learn(*self._held)
            self._held.clear()

    def learn(self, *steps: Verdicts) -> None:
        """Learn from a step, or from several steps, in which each slot had one sequence only."""
        verdicts = _joined(steps)
        methods = verdicts.methods
        judged = self._is_upto.take(verdicts.judged, axis=0)
        present = _present(methods)
        for method in present:
            of_method = judged if len(present) == 1 else judged & (methods == method)[:, None]
            rows, depths = of_method.nonzero()
            if len(rows):
                good = depths < verdicts.accepted.take(rows)
                self._learn_tokens(
                    method, verdicts.slots.take(rows), verdicts.confidences[of_method], depths, good
                )

    def _learn_tokens(self, method: int, slots: Ints, confidences: Floats, depths: Ints, good: Bools) -> None:
        """T judged tokens of one method: the curve makes one step, and then every slot's offset.

        An offset follows as in a Kalman filter: the surprise of its tokens over the precision with which it is
        known, which judged tokens raise and time lowers.
        """
        curve, offset, precision = self._curves[method], self._offset[method], self._precision[method]
        features, count = curve.features(confidences, depths), self._num_slots
        missed, spread = curve.learn(features, good, self._offsets(method, slots), self._teaching(slots))
        self._learn_shift(method, slots, missed, spread)
        precision *= _PRECISION_KEPT ** np.bincount(slots, minlength=count)
        precision += np.bincount(slots, spread, count)
        offset += np.bincount(slots, missed, count) / (precision + self._prior_precision)
        np.maximum(offset, _SMALLEST_OFFSET, out=offset)
        np.minimum(offset, _LARGEST_OFFSET, out=offset)

    def _learn_shift(self, method: int, slots: Ints, missed: Floats, spread: Floats) -> None:
        """As for the offset of a slot, of all slots whose tokens are drawn at random."""
        drawn = self._samples.take(slots)
        drawn *= self._teaches.take(slots)
        count = float(np.add.reduce(drawn))
        if count:
            precision = self._shift_precision[method] * _SHIFT_KEPT**count + float(drawn.dot(spread))
            self._shift_precision[method] = precision
            self._shift[method] += float(drawn.dot(missed)) / (precision + _SHIFT_PRECISION)

    def _offsets(self, method: int, slots: Ints) -> Floats:
        """What is added to the logits of this method's curve for each of these slots."""
        found: Floats = self._samples.take(slots)
        found *= self._shift[method]
        found += self._offset[method].take(slots)
        return found

    def _by_confidence(self, slots: Ints, methods: Ints, confidences: Floats) -> Floats:
        """[S, K] acceptance given confidence and depth, moved by the slot's offset."""
        present = _present(methods)
        if len(present) == 1:
            logits = self._curves[present[0]].logits(confidences)
            logits += self._offsets(present[0], slots)[:, None]
        else:
            logits = np.empty_like(confidences)
            for method in present:
                chosen = methods == method
                logits[chosen] = self._curves[method].logits(confidences[chosen])
                logits[chosen] += self._offsets(method, slots[chosen])[:, None]
        np.negative(logits, out=logits)
        np.exp(logits, out=logits)
        logits += _ONE
        np.reciprocal(logits, out=logits)
        return _within(logits)

    def _teaching(self, slots: Ints) -> Bools | None:
        """Whether each of these slots teaches the others; None, as nearly always: all do."""
        teaching: Bools = self._teaches.take(slots)
        return None if np.count_nonzero(teaching) == len(teaching) else teaching


def _joined(steps: Many[Verdicts]) -> Verdicts:
    if len(steps) == 1:
        return steps[0]
    return Verdicts(
        slots=np.concatenate([each.slots for each in steps]),
        methods=np.concatenate([each.methods for each in steps]),
        judged=np.concatenate([each.judged for each in steps]),
        accepted=np.concatenate([each.accepted for each in steps]),
        confidences=np.concatenate([each.confidences for each in steps]),
    )


def _present(methods: Ints) -> list[int]:
    """The methods that occur."""
    return methods.tolist() if len(methods) == 1 else np.bincount(methods).nonzero()[0].tolist()


def _within(chances: Floats) -> Floats:
    """Limit chances so that none is certain or impossible; in place."""
    np.maximum(chances, _LOWEST, out=chances)
    np.minimum(chances, _HIGHEST, out=chances)
    return chances
