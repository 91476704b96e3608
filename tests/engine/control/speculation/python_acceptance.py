"""The formulas of acceptance in Python: the oracle of native/acceptance.cpp, over the same arrays.

An offset follows its tokens as in a Kalman filter: their surprise over the precision with which it is known, which
decided tokens raise and time lowers. A curve makes a Newton step for each call.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
from numpy.typing import NDArray

from faser.config.speculation import DRAFTERS, Confidence, DrafterInfo
from faser.engine.contract.drafts import NO_DRAFTS, DraftTable, joined
from faser.engine.contract.native_acceptance import SampledStep
from faser.engine.control.speculation.acceptance import NUMBERS, DraftOutcomes, point_mass_outcomes, sampled_tokens
from faser.engine.control.speculation.draft_lengths import best_first
from faser.engine.control.speculation.logistic_curve import DEPTH_SCALE, CurveMemory, LogisticCurve
from faser.types.arrays import Bools, Floats, Ints

Columns = tuple[Ints, Ints, Ints, Ints, Floats]


class PythonCurve(LogisticCurve):
    """A curve that computes and learns. numbers: the constants of the formulas, by their names in native code."""

    def __init__(
        self, drafter: DrafterInfo, memory: CurveMemory | None = None, numbers: Mapping[str, float] = NUMBERS
    ) -> None:
        super().__init__(drafter, memory)
        self._confidence, self._numbers = drafter.confidence, numbers

    def features(self, confidences: Floats, depths: Ints) -> Floats:
        """Return the features [T, 3] of T tokens; depths count from 0."""
        found = np.empty((len(confidences), 3))
        found[:, 0] = 1.0
        found[:, 1] = self._feature(confidences)
        found[:, 2] = depths * DEPTH_SCALE
        return found

    def logits(self, confidences: Floats) -> Floats:
        """Return the logits [S, K] of acceptance of tokens at depth 0 … K - 1."""
        intercept, slope, fall = self._weights.tolist()
        found: Floats = self._feature(confidences) * slope
        found += DEPTH_SCALE * np.arange(found.shape[1], dtype=np.float64) * fall + intercept
        return found

    def learn(
        self, features: Floats, good: Bools, offsets: Floats, teaching: Bools | None = None
    ) -> tuple[Floats, Floats]:
        """Learn T decided tokens. offsets: [T] logits of their sequences, which the curve does not explain.

        teaching: [T] tokens to learn from; None: all. Returns, for all, [T] outcome minus its chance as predicted
        before, and the variance of this.
        """
        chances = sigmoid(features.dot(self._weights) + offsets)
        missed, spread = good - chances, chances * (1 - chances)
        at = slice(None) if teaching is None else teaching
        if len(missed[at]):
            self._fit(features[at], missed[at], spread[at])
        return missed, spread

    def _fit(self, features: Floats, missed: Floats, spread: Floats) -> None:
        kept, longest_step = self._numbers["curve_kept"] ** len(missed), self._numbers["longest_step"]
        self._curvature *= kept
        self._curvature += (features.T * spread).dot(features)
        curvature = self._curvature + self._prior_curvature
        move = np.array(_solved(curvature.tolist(), missed.dot(features).tolist()))
        moved = np.abs(features.dot(move))
        longest = moved.item(moved.argmax())
        if longest > longest_step:
            move *= longest_step / longest
        self._weights += move
        self._weights[1] = max(self._weights[1], 0.0)  # more confidence is never less chance
        self._depths *= kept
        self._depths += np.add.reduce(features[:, 2]) / DEPTH_SCALE, len(missed)

    def _feature(self, confidences: Floats) -> Floats:
        edge, largest = self._numbers["edge"], self._numbers["largest_margin"]
        match self._confidence:
            case Confidence.PROBABILITY:
                inside = np.minimum(np.maximum(confidences, edge), 1 - edge)
                return np.asarray(np.log(inside / (1 - inside)))
            case Confidence.MATCH_LENGTH:
                return np.asarray(np.log(np.maximum(confidences, 1.0)))
            case Confidence.MARGIN:
                return np.asarray(np.minimum(np.maximum(confidences, -largest), largest))


class PythonAcceptance:
    """See NativeAcceptance; looks nothing up."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], numbers: Mapping[str, float]) -> None:
        self._a, self._n = dict(arrays), dict(numbers)
        self._cap = arrays["all"].shape[-1]
        self._num_slots = arrays["offset"].shape[1]
        self._upto: Floats = np.tri(self._cap + 1, self._cap, -1)  # line n: 1 for the first n depths
        self._held: list[DraftOutcomes] = []
        memory = [arrays[name] for name in CurveMemory._fields]
        self._curves = [
            PythonCurve(info, CurveMemory(*(each[i] for each in memory)), numbers)
            for i, info in enumerate(DRAFTERS.values())
        ]

    def survival(self, drafts: DraftTable) -> Floats:
        chances = self._by_confidence(drafts) * self._upto.take(drafts.lengths, axis=0)
        found = np.ones((len(drafts.slots), self._cap + 1))
        np.multiply.accumulate(chances, axis=1, out=found[:, 1:])
        found *= found >= self._n["least_survival"]
        return found

    def choose(
        self, drafts: DraftTable, count: int, requested: Ints | None, row_price: float
    ) -> tuple[Ints, Columns, Floats]:
        taken = np.arange(count)
        if np.count_nonzero(drafts.lengths):
            survival = self.survival(drafts)
            beyond = np.maximum(survival[:, 1:] - row_price, 0.0)
            worth = np.add.reduce(beyond, axis=1).reshape(-1, count)
            expected = np.add.reduce(survival, axis=1).reshape(-1, count)
            taken += np.where(np.maximum.reduce(worth) > 0, worth, expected).argmax(axis=0) * count
            survival = survival[taken]
        else:
            survival = np.zeros((count, self._cap + 1))
            survival[:, 0] = 1.0
        table = drafts.take(taken)
        if requested is not None:
            self.note(table.slots, requested, survival, from_text=True)
        columns = table.slots, table.methods, table.lengths, table.token_ids, table.confidences
        return taken, columns, survival

    def look(self, *_: object) -> tuple[Columns, Floats, int]:
        raise AssertionError("the oracle looks nothing up")

    def judge_look(self, *_: object) -> Ints:
        raise AssertionError("the oracle looks nothing up")

    def note(self, slots: Ints, reached: Ints, survival: Floats, *, from_text: bool) -> None:
        upto = self._upto.take(reached, axis=0)
        counts = np.stack((upto * survival[:, :-1], upto * survival[:, 1:]), axis=1)
        own, of_all = self._a["own"][int(from_text)], self._a["all"][int(from_text)]
        own[slots] = own.take(slots, axis=0) * self._n["own_kept"] + counts
        counts = counts[self._a["teaches"].take(slots)]
        of_all *= self._n["all_kept"] ** len(counts)
        of_all += np.add.reduce(counts, axis=0)

    def hold(self, drafts: DraftTable, decided: Ints, accepted: Ints) -> None:
        self._held.append(DraftOutcomes(drafts, decided, accepted))

    def judge(
        self,
        sampled: SampledStep,
        drafts: DraftTable,
        kept: Ints,
        looked: DraftTable,
        taken: Ints,
        by_model: Ints,
        *,
        num_decided: int,
        is_drawn: bool,
    ) -> Ints:
        by_slot = sampled.by_slot()
        tokens = [by_slot.get(slot, ()) for slot in drafts.slots.tolist()]
        accepted: Ints = np.array([*map(len, tokens)], dtype=np.int64) - 1
        at = (accepted >= 0).nonzero()[0]
        if len(at):
            last_ids = np.array([tokens[i][-1] for i in at.tolist()], dtype=np.int64)
            found = outcomes(
                drafts.take(at), kept[at], accepted[at], last_ids, num_decided=num_decided, is_drawn=is_drawn
            )
            self.hold(*found)
        others = not_taken(looked, taken, by_model)
        if len(others.slots):
            came = sampled_tokens([by_slot.get(slot, ()) for slot in others.slots.tolist()], others.width)
            self.hold(*point_mass_outcomes(others, came))
        return accepted

    def drop(self, slot: int) -> None:
        self._held = [each.take(each.drafts.slots != slot) for each in self._held]

    def learn(self) -> None:
        if not self._held:
            return
        drafts, decided, accepted = _joined(self._held)
        self._held = []
        is_decided = self._upto.take(decided, axis=0) > 0
        for method in np.unique(drafts.methods).tolist():
            of_method = is_decided & (drafts.methods == method)[:, None]
            rows, depths = of_method.nonzero()
            if len(rows):
                good = depths < accepted.take(rows)
                self._learn_tokens(method, drafts.slots.take(rows), drafts.confidences[of_method], depths, good)

    def best_prefixes(
        self, survival: Floats, least: Ints | None, lengths: Ints, seconds: Floats, worth: float
    ) -> tuple[Ints, float]:
        offered, tokens, num_first = best_first(survival[:, 1:], lengths, least)
        rates = np.add.accumulate(np.concatenate(([worth], offered))) / seconds[: len(offered) + 1]
        best = num_first + int(rates[num_first:].argmax())
        kept = np.bincount(tokens[:best] // (survival.shape[1] - 1), minlength=len(lengths))
        return kept, rates.item(best)

    def _learn_tokens(self, method: int, slots: Ints, confidences: Floats, depths: Ints, good: Bools) -> None:
        curve, offset, precision = self._curves[method], self._a["offset"][method], self._a["precision"][method]
        features, count = curve.features(confidences, depths), self._num_slots
        teaching = self._a["teaches"].take(slots)
        offsets = self._offsets(method, slots)
        missed, spread = curve.learn(features, good, offsets, None if teaching.all() else teaching)
        self._learn_shift(method, slots, missed, spread)
        precision *= self._n["precision_kept"] ** np.bincount(slots, minlength=count)
        precision += np.bincount(slots, spread, count)
        offset += np.bincount(slots, missed, count) / (precision + self._a["prior_precision"])
        np.clip(offset, -self._n["largest_offset"], self._n["largest_offset"], out=offset)

    def _learn_shift(self, method: int, slots: Ints, missed: Floats, spread: Floats) -> None:
        drawn = self._a["samples"].take(slots) * self._a["teaches"].take(slots)
        count = float(np.add.reduce(drawn))
        if count:
            kept = self._a["shift_precision"].item(method) * self._n["shift_kept"] ** count
            precision = kept + float(drawn.dot(spread))
            self._a["shift_precision"][method] = precision
            self._a["shift"][method] += float(drawn.dot(missed)) / (precision + self._n["shift_prior"])

    def _offsets(self, method: int, slots: Ints) -> Floats:
        found: Floats = self._samples(slots) * self._a["shift"][method] + self._a["offset"][method].take(slots)
        return found

    def _samples(self, slots: Ints) -> Floats:
        found: Floats = self._a["samples"].take(slots)
        return found

    def _by_confidence(self, drafts: DraftTable) -> Floats:
        logits = np.empty_like(drafts.confidences)
        for method in np.unique(drafts.methods).tolist():
            chosen = drafts.methods == method
            logits[chosen] = self._curves[method].logits(drafts.confidences[chosen])
            logits[chosen] += self._offsets(method, drafts.slots[chosen])[:, None]
        return np.clip(sigmoid(logits), self._n["lowest"], self._n["highest"])


def not_taken(looked: DraftTable, taken: Ints, by_model: Ints) -> DraftTable:
    """The drafts from text in whose place another one was taken."""
    others = looked.lengths > 0
    if len(others):
        stayed = np.ones(len(taken), dtype=np.bool_)
        stayed[by_model] = False
        others[taken[stayed]] = False
    return looked.take(others) if np.count_nonzero(others) else NO_DRAFTS


def outcomes(
    drafts: DraftTable, kept: Ints, accepted: Ints, last_ids: Ints, *, num_decided: int = 0, is_drawn: bool = False
) -> DraftOutcomes:
    """A step's outcomes of drafts.

    kept, accepted, last_ids: [D] verified tokens, those of them that were accepted, and the last token that the
    step sampled.
    """
    if is_drawn:
        return DraftOutcomes(drafts, np.minimum(accepted + 1, kept), accepted)
    accepted, kept = accepted + num_decided, kept + num_decided
    first_cut = drafts.token_ids[np.arange(len(kept)), np.minimum(kept, drafts.width - 1)]
    right = (first_cut == last_ids) & (accepted == kept) & (kept < drafts.lengths)
    return DraftOutcomes(drafts, np.minimum(accepted + 1, drafts.lengths), accepted + right)


def sigmoid(logits: Floats) -> Floats:
    found: Floats = 1.0 / (1.0 + np.exp(-logits))
    return found


def _joined(steps: Many[DraftOutcomes]) -> DraftOutcomes:
    return DraftOutcomes(
        joined([each.drafts for each in steps]),
        np.concatenate([each.decided for each in steps]),
        np.concatenate([each.accepted for each in steps]),
    )


def _solved(matrix: list[list[float]], right: list[float]) -> tuple[float, float, float]:
    """x of matrix @ x = right, where the 3 by 3 matrix is symmetric and positive definite; by Cholesky."""
    (a, b, c), (_, d, e), (_, _, f) = matrix
    lower_b, lower_c = b / a, c / a
    pivot = d - lower_b * b
    rest = e - lower_b * c
    lower_e = rest / pivot
    last = f - lower_c * c - lower_e * rest
    second = right[1] - lower_b * right[0]
    z = (right[2] - lower_c * right[0] - lower_e * second) / last
    y = second / pivot - lower_e * z
    return right[0] / a - lower_b * y - lower_c * z, y, z
