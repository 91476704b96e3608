"""How likely drafted tokens are to be accepted, learnt from what became of earlier ones. No torch.

Owns the counts of every slot and of all together, by depth, and one logistic curve per method over the drafter's
confidence. Decides nothing. Tokens behind the first rejection were not judged and teach nothing (arXiv 2406.14066
counts them as rejected); tokens that were cut before verification count with their predicted acceptance, or the
estimate would only know the drafts that looked good.

    depth        1      2      3      4      5
    draft        x1     x2     x3     x4     x5        confidences of all five are known
    verified     x1     x2     x3                      x4, x5 were cut
    accepted     yes    no                             x3 was never judged
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.engine.spec.calibration import LogisticCurve
from faser.speculation import DRAFT_METHODS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_MODEL_METHODS = ("draft_model", "layer_skip")
_PRIOR = {"draft_model": 0.7, "layer_skip": 0.7, "suffix": 0.6, "ngram": 0.5}

_SHRINK = 20.0  # a slot's own evidence weighs as much as everybody's once it has so many judged tokens
_PRIOR_MASS = 8.0  # judged tokens that the prior is worth
_SLOT_KEPT = 0.5 ** (1 / 60)  # of a slot's evidence after one more judged token of the same depth
_ALL_KEPT = 0.5 ** (1 / 600)
_DRIFT_LOGITS = 2.0  # a change of acceptance by so much is watched for
_SLOT_ALARM, _ALL_ALARM = 8.0, 14.0  # log likelihood ratio: once in e^8 tokens, about, for no reason
_DRIFT_LEAVES = 8.0  # judged tokens' worth of the evidence, once it is seen to be out of date
_SEQUENCES_A_CURVE = 16  # of so many sequences every second step teaches the curves enough, of 32 every third
_LEAST, _MOST = 0.005, 0.995
_OFFSET_SHRINK = 6.0
_LARGEST_OFFSET = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What became of one step's drafts. S sequences, no slot twice.

    slots, methods: [S]; methods index DRAFT_METHODS. drafted, verified, accepted: [S] tokens, in falling order of
    size. confidences: [S, >= max(drafted)], as in Draft; what lies beyond drafted is ignored.
    """

    slots: Ints
    methods: Ints
    drafted: Ints
    verified: Ints
    accepted: Ints
    confidences: Floats


class Acceptance:
    """Estimates for num_slots slots and drafts of up to cap tokens.

    always_drafts: a draft is there whenever it is asked for (models), so it has no part in the expectation.
    method: whose prior a slot has before its first draft.
    """

    def __init__(self, num_slots: int, cap: int, *, method: str, always_drafts: bool) -> None:
        assert cap >= 1, "a draft has at least one token"
        self._num_slots = num_slots
        self._cap = cap
        self._first_method = DRAFT_METHODS.index(method)
        self._always_drafts = always_drafts
        self.forget()

    def forget(self) -> None:
        """Start over, for running sequences too."""
        slots, methods, cap = self._num_slots, len(DRAFT_METHODS), self._cap
        self._num_learnt = 0
        prior = np.array([_PRIOR[name] for name in DRAFT_METHODS])[:, None]
        self._method = np.full(slots, self._first_method, dtype=np.int64)
        self._judged, self._accepted = np.zeros((slots, cap)), np.zeros((slots, cap))
        self._all_judged = np.full((methods, cap), _PRIOR_MASS)
        self._all_accepted = self._all_judged * prior
        self._asked, self._offered = np.zeros((slots, cap)), np.zeros((slots, cap))
        self._all_asked, self._all_offered = np.full(cap, _PRIOR_MASS), np.full(cap, _PRIOR_MASS / 2)
        self._drift = np.zeros((slots + methods, 2))  # of slots, then methods: see _watch_drift
        self._offset = np.zeros((slots, 2))  # decayed surprise of the curve and its weight
        self._curves = tuple(LogisticCurve(name, _PRIOR[name]) for name in DRAFT_METHODS)

    @property
    def cap(self) -> int:
        return self._cap

    def start(self, slot: int) -> None:
        """A new sequence: nothing is known of it but what holds for all."""
        self._method[slot] = self._first_method
        for table in (self._judged, self._accepted, self._asked, self._offered, self._drift, self._offset):
            table[slot] = 0.0

    def release(self, slot: int) -> None:
        """The slot is free; what it taught about all stays."""
        self.start(slot)

    def survival(self, slots: Ints, cap: int | None = None) -> Floats:
        """[S, cap + 1]; column k: the chance that a draft has k tokens or more and the first k are accepted."""
        cap = self._cap if cap is None else cap
        found = np.ones((len(slots), cap + 1))
        np.cumprod(self._by_depth(slots)[:, :cap], axis=1, out=found[:, 1:])
        if not self._always_drafts:
            found[:, 1:] *= self._available(slots)[:, :cap]
        return found

    def drafted_survival(self, slots: Ints, methods: Ints, lengths: Ints, confidences: Floats) -> Floats:
        """[S, cap + 1], of drafts that are there, from their tokens' own confidences; 0 beyond lengths.

        Arguments as in Outcomes.
        """
        chances = self._by_confidence(slots, methods, self._wide(confidences))
        chances *= np.arange(self._cap) < lengths[:, None]
        found = np.ones((len(slots), self._cap + 1))
        np.cumprod(chances, axis=1, out=found[:, 1:])
        return found

    def calibration(self, method: str, slots: Ints | None = None) -> tuple[float, float]:
        """Acceptance of a token is about sigmoid(intercept + slope * confidence), for StopRule. Models only.

        slots: whose mean leaning enters the intercept.
        """
        assert method in _MODEL_METHODS, f"{method} has no passes to stop"
        intercept, slope = self._curves[DRAFT_METHODS.index(method)].line()
        leaning = 0.0 if slots is None or not len(slots) else float(self._leaning(slots).mean())
        return intercept + leaning, slope

    def offered(self, slots: Ints, wished: Ints, drafted: Ints) -> None:
        """Of `wished` tokens asked for, `drafted` came: [S] each, wished >= drafted."""
        if self._always_drafts or not len(slots):
            return
        depth = np.arange(self._cap)
        asked, came = depth < wished[:, None], depth < drafted[:, None]
        kept = np.where(asked, _SLOT_KEPT, 1.0)
        self._asked[slots] = self._asked[slots] * kept + asked
        self._offered[slots] = self._offered[slots] * kept + came
        num_asked = asked.sum(axis=0)
        kept_all = _ALL_KEPT**num_asked
        self._all_asked = self._all_asked * kept_all + num_asked
        self._all_offered = self._all_offered * kept_all + came.sum(axis=0)

    def learn(self, outcomes: Outcomes) -> None:
        """Take one step's verdicts in. Sequences without a draft may be among them."""
        slots, confidences = outcomes.slots, self._wide(outcomes.confidences)
        if not len(slots):
            return
        depth = np.arange(self._cap)
        verified = outcomes.verified[:, None]
        accepted = outcomes.accepted[:, None]
        passed = depth < accepted
        judged = (depth <= accepted) & (depth < verified)
        expected = self._by_depth(slots)
        weight, good = judged.astype(np.float64), passed.astype(np.float64)
        cut = (depth >= verified) & (depth < outcomes.drafted[:, None]) & (accepted == verified)
        if cut.any():
            imputed = self._by_confidence(slots, outcomes.methods, confidences)
            reached = np.cumprod(np.where(cut, imputed, 1.0), axis=1)
            good += cut * reached
            weight[:, 1:] += cut[:, 1:] * reached[:, :-1]
            weight[:, 0] += cut[:, 0]
        if self._num_learnt % (1 + len(slots) // _SEQUENCES_A_CURVE) == 0:
            self._learn_curves(outcomes, confidences, judged, passed)
        self._num_learnt += 1
        self._learn_counts(outcomes, weight, good)
        self._watch_drift(outcomes, expected, weight, good.sum(axis=1))
        with_draft = outcomes.drafted > 0
        self._method[slots[with_draft]] = outcomes.methods[with_draft]

    def _by_depth(self, slots: Ints) -> Floats:
        """[S, cap] acceptance by depth: own counts, shrunk to everybody's moved by how the slot leans."""
        everybody = self._everybody()[self._method[slots]]
        judged, accepted = self._judged[slots], self._accepted[slots]
        mass = np.add.reduce(judged, axis=1) + _SHRINK
        mean = np.add.reduce(everybody, axis=1) * (_SHRINK / self._cap)
        own = (np.add.reduce(accepted, axis=1) + mean) / mass
        usual = (np.einsum("sk,sk->s", judged, everybody) + mean) / mass
        moved = everybody * (own * (1 - usual) / (usual * (1 - own)))[:, None]
        moved /= moved + (1 - everybody)
        moved *= _SHRINK
        moved += accepted
        judged += _SHRINK
        moved /= judged
        return _within(moved)

    def _everybody(self) -> Floats:
        """[methods, cap] acceptance by depth of all slots, shrunk to the mean over depths."""
        mean = self._all_accepted.sum(axis=1) / self._all_judged.sum(axis=1)
        found = (self._all_accepted + _PRIOR_MASS * mean[:, None]) / (self._all_judged + _PRIOR_MASS)
        return _within(found)

    def _available(self, slots: Ints) -> Floats:
        """[S, cap] chance that a draft has at least 1, 2, … tokens; never rises with depth."""
        everybody = self._all_offered / self._all_asked
        found = (self._offered[slots] + _SHRINK * everybody) / (self._asked[slots] + _SHRINK)
        return np.minimum.accumulate(found, axis=1)

    def _by_confidence(self, slots: Ints, methods: Ints, confidences: Floats) -> Floats:
        """[S, cap] acceptance given confidence and depth, moved by how the slot leans."""
        logits = np.empty_like(confidences)
        for method in _present(methods):
            chosen = methods == method
            logits[chosen] = self._curves[method].logits(confidences[chosen])
        logits += self._leaning(slots)[:, None]
        np.negative(logits, out=logits)
        np.exp(logits, out=logits)
        logits += 1.0
        np.reciprocal(logits, out=logits)
        return _within(logits)

    def _leaning(self, slots: Ints) -> Floats:
        """[S] logits by which the slots' tokens do better than the curve of their method says."""
        surprise, weight = self._offset[slots].T
        found: Floats = np.clip(surprise / (weight + _OFFSET_SHRINK), -_LARGEST_OFFSET, _LARGEST_OFFSET)
        return found

    def _learn_curves(
        self, outcomes: Outcomes, confidences: Floats, judged: NDArray[np.bool_], passed: NDArray[np.bool_]
    ) -> None:
        """Every method's curve by its judged tokens, and what the curve leaves unexplained by slot."""
        for method in _present(outcomes.methods):
            rows, depths = np.nonzero(judged & (outcomes.methods == method)[:, None])
            if not len(rows):
                continue
            curve, slots = self._curves[method], outcomes.slots[rows]
            features = curve.features(confidences[rows, depths], depths)
            good = passed[rows, depths]
            leaning = self._leaning(outcomes.slots)[rows]
            surprise, weight = curve.surprise(features, good)
            curve.learn(features, good, leaning)
            kept = _SLOT_KEPT ** np.bincount(slots, minlength=self._num_slots)
            self._offset *= kept[:, None]
            self._offset[:, 0] += np.bincount(slots, surprise, self._num_slots)
            self._offset[:, 1] += np.bincount(slots, weight, self._num_slots)

    def _learn_counts(self, outcomes: Outcomes, weight: Floats, good: Floats) -> None:
        slots = outcomes.slots
        kept = 1 - (1 - _SLOT_KEPT) * weight
        self._judged[slots] = self._judged[slots] * kept + weight
        self._accepted[slots] = self._accepted[slots] * kept + good
        for method in _present(outcomes.methods):
            chosen = outcomes.methods == method
            num_judged = weight[chosen].sum(axis=0)
            kept_all = _ALL_KEPT**num_judged
            self._all_judged[method] = self._all_judged[method] * kept_all + num_judged
            self._all_accepted[method] = self._all_accepted[method] * kept_all + good[chosen].sum(axis=0)

    def _watch_drift(self, outcomes: Outcomes, expected: Floats, weight: Floats, num_good: Floats) -> None:
        """Drop most of the evidence that recent tokens contradict, of a slot or of a method.

        Two cumulative sums a line (Page, Biometrika 41, 1954): the log likelihood ratio of the tokens judged, were
        acceptance two logits lower, or higher, than expected; never below 0. Without it a text that turns from
        prose to noise would be believed in for 30 tokens more.
        """
        deepest = int(outcomes.drafted.max())  # nothing was judged beyond
        expected, weight = expected[:, :deepest], weight[:, :deepest]
        ratios = np.empty((len(num_good), 2))
        for side, logits in enumerate((-_DRIFT_LOGITS, _DRIFT_LOGITS)):
            normal = np.log1p(expected * np.expm1(logits))
            ratios[:, side] = logits * num_good - np.einsum("sk,sk->s", weight, normal)
        by_method = np.zeros((len(DRAFT_METHODS), 2))
        np.add.at(by_method, outcomes.methods, ratios)
        lines = np.concatenate((outcomes.slots, self._num_slots + np.arange(len(DRAFT_METHODS))))
        sums = np.maximum(self._drift[lines] + np.concatenate((ratios, by_method)), 0.0)
        alarm = np.where(lines < self._num_slots, _SLOT_ALARM, _ALL_ALARM)
        stale = sums.max(axis=1) > alarm
        sums[stale] = 0.0
        self._drift[lines] = sums
        if stale.any():
            self._forget(lines[stale])

    def _forget(self, lines: Ints) -> None:
        """Leave _DRIFT_LEAVES judged tokens of what lines (slots, then methods) taught."""
        slots, methods = lines[lines < self._num_slots], lines[lines >= self._num_slots] - self._num_slots
        for judged, accepted, chosen in (
            (self._judged, self._accepted, slots),
            (self._all_judged, self._all_accepted, methods),
        ):
            mass = judged[chosen].sum(axis=1, keepdims=True)
            left = _DRIFT_LEAVES / np.maximum(mass, _DRIFT_LEAVES)
            judged[chosen] *= left
            accepted[chosen] *= left
        self._offset[slots] = 0.0
        for method in methods:
            self._curves[method].forget()

    def _wide(self, confidences: Floats) -> Floats:
        """[S, cap] of confidences [S, any width]; filled with 0."""
        if confidences.shape[1] >= self._cap:
            return confidences[:, : self._cap]
        wide = np.zeros((len(confidences), self._cap))
        wide[:, : confidences.shape[1]] = confidences
        return wide


def _present(methods: Ints) -> Ints:
    """Which methods occur."""
    return np.flatnonzero(np.bincount(methods))


def _within(chances: Floats) -> Floats:
    """Neither certain nor impossible; in place."""
    np.maximum(chances, _LEAST, out=chances)
    return np.minimum(chances, _MOST, out=chances)
