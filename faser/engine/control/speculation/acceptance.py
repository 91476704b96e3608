"""Acceptance: how likely draft tokens are to be accepted, learned from earlier drafts.

Two questions are asked:

    after drafting    how likely is this draft, with these confidences, to survive?       drafted_survival
    before drafting   how likely would the draft be that the sequence gets next?          survival

The first is answered by a logistic curve for each method (confidence and depth to acceptance), an offset for each
method and slot (this text is easier or harder than the curve says), and a shift for all requests whose tokens are
drawn at random. All of these learn from decided tokens alone; a token that was not reached teaches nothing (arXiv
2406.14066 counts it as rejected). The second is the mean of what the first said about earlier drafts, of the slot
and of all slots: so it knows how often there is no draft, how long drafts are and how confident, whether their
tokens were verified or not.

A request that edits logits is refused tokens that the model alone would have chosen. It teaches its own slot only.

What a step decides of a draft:

    draft          x1      x2      x3      x4      x5      x3, x4, x5 are cut, by the policy or by the step itself
    verified by    row 0   row 1   row 2   -       -       row 2, of x2, is computed anyway
    sampled        x1      x2      y                       y is the bonus token
    decided        yes     yes     yes     no      no      x3 was right if it equals y

A draft token that is a point mass is right if it equals the token sampled at its place, whether it was verified or
not. So the first token that is cut is decided for nothing, and so is a draft of which no token is verified.
"""

from collections.abc import Sequence as Many
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from faser.config.speculation import DRAFT_METHODS, DRAFTERS, PASS_METHODS, Confidence
from faser.engine.contract.drafts import DraftTable
from faser.engine.contract.native_acceptance import MakeNativeAcceptance, NativeAcceptance
from faser.engine.control.speculation.logistic_curve import (
    CURVE_KEPT,
    DEPTH_SCALE,
    EDGE,
    LARGEST_MARGIN,
    LONGEST_STEP,
    CurveMemory,
    LogisticCurve,
)
from faser.types.arrays import Bools, Floats, Ints

# Reasoned, not fitted: how throughput changes with each halved or doubled is in results/control-constants.json.
# Those that meet arrays in every step are arrays: see types/arrays.py.
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
_PRECISION_KEPT = 0.5 ** (1 / 60)  # of what is known of an offset after one more decided token
_SHIFT_PRECISION = 1.0  # of the prior of the shift of requests that sample: its variance is 1
_SHIFT_KEPT = 0.5 ** (1 / 400)  # of what is known of that shift after one more decided token
_LARGEST_OFFSET = 4.0  # logits: a bound that no simulated run reaches
_LOWEST, _HIGHEST = np.array(0.005), np.array(0.995)  # of a chance: certainty could not be unlearned
_LEAST_SURVIVAL = np.array(0.01)  # a token that is less likely to be reached and right counts as none
_NOT_SAMPLED = -2  # neither a token id nor NO_TOKEN
_MODEL, _TEXT = 0, 1  # kinds of drafters; each has means of its own
_CONFIDENCES = (*Confidence,)


NUMBERS = {
    "depth_scale": DEPTH_SCALE,
    "curve_kept": CURVE_KEPT,
    "longest_step": LONGEST_STEP,
    "largest_offset": _LARGEST_OFFSET,
    "precision_kept": _PRECISION_KEPT,
    "shift_prior": _SHIFT_PRECISION,
    "shift_kept": _SHIFT_KEPT,
    "lowest": float(_LOWEST),
    "highest": float(_HIGHEST),
    "least_survival": float(_LEAST_SURVIVAL),
    "largest_margin": LARGEST_MARGIN,
    "edge": EDGE,
    "own_kept": float(_OWN_KEPT),
    "all_kept": _ALL_KEPT,
}


class DraftOutcomes(NamedTuple):
    """Outcomes of S drafts in a step; a slot may recur.

    decided: [S] tokens, from the first one on; at most one of them was not accepted, and it is the last.
    accepted: [S] of these.
    """

    drafts: DraftTable
    decided: Ints
    accepted: Ints

    def take(self, at: Ints | Bools) -> "DraftOutcomes":
        """Those at these positions, or where a mask is true."""
        return DraftOutcomes(self.drafts.take(at), self.decided[at], self.accepted[at])


class Acceptance:
    """Estimates for num_slots slots and drafts of up to cap tokens, K. All of them are in arrays that never move.

    make_native: makes what computes with these arrays and learns from outcomes, in native code. Its formulas are
    those of PythonAcceptance, the oracle of its tests (tests/engine/control/speculation/python_acceptance.py).
    """

    def __init__(self, num_slots: int, cap: int, make_native: MakeNativeAcceptance) -> None:
        assert cap >= 1, "a draft has at least one token"
        methods = len(DRAFTERS)
        self._cap = cap
        self._teaches = np.ones(num_slots, dtype=np.bool_)  # by slot: it says something about other slots too
        self._samples = np.zeros(num_slots)  # by slot: 1 where the target draws its tokens at random
        self._prior_precision = np.full(num_slots, _OFFSET_PRECISION)  # by slot: of the prior of its offsets
        self._offset = np.zeros((methods, num_slots))  # logits by which a slot does better than the curve says
        self._precision = np.zeros((methods, num_slots))  # of the offset, in addition to the prior's
        self._shift = np.zeros(methods)  # logits by which tokens do better where they are drawn at random
        self._shift_precision = np.zeros(methods)
        # By kind of drafter: sums over drafts of the chance to reach a depth, and of the chance to pass it.
        self._own = np.zeros((2, num_slots, 2, cap))
        self._all = np.zeros((2, 2, cap))
        curves = CurveMemory(*(np.zeros((methods, *shape)) for shape in ((3,), (3, 3), (3, 3), (2,))))
        self._curves = tuple(
            LogisticCurve(drafter, CurveMemory(*(each[i] for each in curves)))
            for i, drafter in enumerate(DRAFTERS.values())
        )
        self.native: NativeAcceptance = make_native(self._arrays(curves), NUMBERS)

    def _arrays(self, curves: CurveMemory) -> dict[str, NDArray[Any]]:
        """All that native code reads and writes."""
        names = ("teaches", "samples", "prior_precision", "offset", "precision", "shift", "shift_precision")
        kinds = np.array([_CONFIDENCES.index(each.confidence) for each in DRAFTERS.values()])
        found = {name: getattr(self, f"_{name}") for name in (*names, "own", "all")}
        return {**found, **curves._asdict(), "kinds": kinds}

    def forget(self) -> None:
        """Start over, for running sequences too."""
        self.learn_held()
        for curve in self._curves:
            curve.forget()
        for each in (self._offset, self._precision, self._shift, self._shift_precision, self._own, self._all):
            each[:] = 0.0

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
        self.native.drop(slot)
        self.start(slot)

    def survival(self, slots: Ints, *, by_model: bool) -> Floats:
        """Return [S, K + 1]; column k: the chance that a draft has k tokens or more and the first k are accepted.

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
        """Return the chance [K] to pass each depth once it is reached, over all slots.

        Depths that few drafts have reached are like the others: how else could a longer draft ever seem to pay?
        """
        reached, passed = self._all[kind]
        prior = float(_PRIOR_DRAFTS)
        usual = (float(passed.sum()) + prior * _PRIOR_CHANCE[kind]) / (float(reached.sum()) + prior)
        found: Floats = passed + _PRIOR_DRAFTS * usual
        found /= reached + _PRIOR_DRAFTS
        return found

    def drafted_survival(self, drafts: DraftTable) -> Floats:
        """Return the survival [S, K + 1] of drafts that are there, from the confidences of their tokens.

        It is 0 beyond their lengths, and where it is negligible.
        """
        return self.native.survival(drafts)

    def choose(
        self, drafts: DraftTable, count: int, requested: Ints | None, row_price: float = 0.0
    ) -> tuple[Ints, DraftTable, Floats]:
        """Take for each of count sequences the draft from text that is worth most beyond the price of its rows.

        Tokens whose survival does not exceed row_price will be cut, so they count only where no draft has a better
        one: then the draft with the most expected tokens is taken, as a target may need them at any price.

        drafts: of every sequence by one method, then by the next. requested: [S] tokens that the look-ups were
        asked for; None: what they found is not noted. Returns the positions, [S], the drafts there, and their
        survival.
        """
        taken, columns, survival = self.native.choose(drafts, count, requested, row_price)
        return taken, DraftTable(*columns), survival

    def calibration(self, method: str, slots: Ints | None = None) -> tuple[float, float]:
        """Acceptance of a token is about sigmoid(intercept + slope * confidence), for StopRule. Models only.

        slots: their mean offset is part of the intercept.
        """
        assert method in PASS_METHODS, f"{method} has no passes to stop"
        number = DRAFT_METHODS.index(method)
        intercept, slope = self._curves[number].line()
        if slots is not None and len(slots):
            intercept += float(self._offsets(number, slots).sum()) / len(slots)
        return intercept, slope

    def note_drafts(
        self, slots: Ints, requested: Ints, lengths: Ints, survival: Floats, *, by_model: bool
    ) -> None:
        """Drafts have come; no slot occurs twice. requested >= lengths: [S] tokens.

        survival: [S, K + 1], as of drafted_survival. A look-up that proposes less than was requested had no more;
        a model that does so was stopped, and what it would have proposed next is not known.
        """
        self.native.note(slots, lengths if by_model else requested, survival, from_text=not by_model)

    def hold(self, outcomes: DraftOutcomes) -> None:
        """Keep a step's outcomes for learn_held: while a decision serves several steps nothing reads them."""
        self.native.hold(*outcomes)

    def learn_held(self) -> None:
        """Learn the outcomes that are held, all at once."""
        self.native.learn()

    def learn(self, *steps: DraftOutcomes) -> None:
        """Learn from a step, or from several steps, in which each slot had one sequence only."""
        for each in steps:
            self.native.hold(*each)
        self.native.learn()

    def _offsets(self, method: int, slots: Ints) -> Floats:
        """Return the term that is added to the logits of this method's curve for each of these slots."""
        found: Floats = self._samples.take(slots)
        found *= self._shift[method]
        found += self._offset[method].take(slots)
        return found


def _within(chances: Floats) -> Floats:
    """Limit chances so that none is certain or impossible; in place."""
    np.maximum(chances, _LOWEST, out=chances)
    np.minimum(chances, _HIGHEST, out=chances)
    return chances


def point_mass_outcomes(drafts: DraftTable, sampled: Ints) -> DraftOutcomes:
    """Return the outcomes of point masses of which none was verified. sampled: as of sampled_tokens."""
    accepted = np.logical_and.accumulate(drafts.token_ids == sampled, axis=1).sum(axis=1)
    decided = np.minimum(accepted + 1, drafts.lengths)
    return DraftOutcomes(drafts, np.minimum(decided, np.count_nonzero(sampled != _NOT_SAMPLED, axis=1)), accepted)


def sampled_tokens(token_ids: Many[tuple[int, ...]], width: int) -> Ints:
    """Return the first tokens [S, width] that a step sampled for each sequence, padded with no token id."""
    found = np.full((len(token_ids), width), _NOT_SAMPLED, dtype=np.int64)
    lengths = np.array([len(each) for each in token_ids], dtype=np.int64)
    if lengths.max() > width:
        token_ids, lengths = [each[:width] for each in token_ids], np.minimum(lengths, width)
    found[np.arange(width) < lengths[:, None]] = np.fromiter(chain.from_iterable(token_ids), np.int64)
    return found


def with_dropped(
    lengths: Ints, requested: Ints, survival: Floats, *, passes: int, row_price: float
) -> tuple[Ints, Floats]:
    """Lengths and survival of a model's drafts, with the token that a StopRule dropped from the end of each.

    lengths, requested: [S]. survival: [S, K + 1], of drafted_survival. A draft shorter than the passes that were
    made has lost its last token. All that is known of this token is that its survival did not exceed row_price, so
    it gets this price. Without it a model of which every token is dropped would never be seen to be bad.
    """
    tried = np.minimum(np.minimum(lengths + 1, requested), passes)
    dropped = (tried > lengths).nonzero()[0]
    if not len(dropped):
        return lengths, survival
    ends, survival = lengths[dropped], survival.copy()
    survival[dropped, ends + 1] = np.minimum(survival[dropped, ends], row_price)
    return np.maximum(tried, lengths), survival
