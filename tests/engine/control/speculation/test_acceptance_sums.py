"""Acceptance by whole arrays. Oracle: the same formulas draft by draft and token by token, in plain loops.

Planted bugs that this test has caught: an offset follows with the precision of the step before; a token of a slot
that does not teach is a token of the curve; a look-up without a result counts for all slots where its own slot
does not teach; the prior of all slots loses weight with every draft; a model's draft counts as asked for, not as
made.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from faser.config.speculation import DRAFT_METHODS, DRAFTERS, PASS_METHODS, Confidence
from faser.engine.contract.native_acceptance import MakeNativeAcceptance
from faser.engine.control.speculation.acceptance import Acceptance, DraftOutcomes
from faser.kernels.cpu.acceptance import CompiledAcceptance
from faser.kernels.cpu.text_index import text_library
from faser.types.arrays import Floats
from tests.engine.control.speculation.building import full, ints, note_nothing, outcomes, table
from tests.engine.control.speculation.python_acceptance import PythonAcceptance

CAP, NUM_SLOTS = 5, 4
OFFSET_PRECISION, EDITED_PRECISION, PRECISION_KEPT, LARGEST_OFFSET = 4.0, 0.25, 0.5 ** (1 / 60), 4.0
CURVATURE_KEPT, OWN_KEPT, ALL_KEPT = 0.5 ** (1 / 400), 0.5 ** (1 / 5), 0.5 ** (1 / 200)
SHRINK, PRIOR_DRAFTS, LEAST_SURVIVAL = 4.0, 8.0, 0.01
PRIOR_CHANCE = {True: 0.7, False: 0.6 * 0.5}  # of a model's token; of a token from text


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def within(chance: float) -> float:
    return min(max(chance, 0.005), 0.995)


class SlowCurve:
    """One method's logistic curve."""

    def __init__(self, method: str) -> None:
        info = DRAFTERS[method]
        self.confidence = info.confidence
        centre = info.prior_centre
        logit = math.log(info.prior_acceptance / (1 - info.prior_acceptance))
        self.weights = np.array([logit - info.prior_slope * centre, info.prior_slope, 0.0])
        usual = np.array([1.0, centre, 0.0])
        self.prior = 2.0 * np.outer(usual, usual) + np.diag([0.02, 4.0, 40.0])
        self.curvature = np.zeros((3, 3))
        self.depth_sum, self.depth_count = 0.0, 1e-9

    def feature(self, confidence: float, depth: int) -> Floats:
        match self.confidence:
            case Confidence.MARGIN:
                found = min(max(confidence, -12.0), 12.0)
            case Confidence.PROBABILITY:
                inside = min(max(confidence, 0.01), 0.99)
                found = math.log(inside / (1 - inside))
            case Confidence.MATCH_LENGTH:
                found = math.log(max(confidence, 1.0))
        return np.array([1.0, found, depth / 8])

    def logit(self, confidence: float, depth: int) -> float:
        return float(self.weights @ self.feature(confidence, depth))

    def fit(self, tokens: list[tuple[Floats, float, float]]) -> None:
        """(feature, missed, spread) of each token: one Newton step."""
        if not tokens:
            return
        kept = CURVATURE_KEPT ** len(tokens)
        self.curvature = self.curvature * kept
        gradient = np.zeros(3)
        for feature, missed, spread in tokens:
            self.curvature += spread * np.outer(feature, feature)
            gradient += missed * feature
        move = np.linalg.solve(self.curvature + self.prior, gradient)
        longest = max(abs(float(feature @ move)) for feature, _, _ in tokens)
        self.weights = self.weights + move * min(1.0, 1.0 / longest)
        self.weights[1] = max(self.weights[1], 0.0)
        self.depth_sum = self.depth_sum * kept + sum(float(feature[2]) * 8 for feature, _, _ in tokens)
        self.depth_count = self.depth_count * kept + len(tokens)


@dataclass
class SlowDraft:
    """One draft, and what is decided about it."""

    slot: int
    method: int
    decided: int
    accepted: int
    confidences: list[float]


class SlowAcceptance:
    """What Acceptance says, computed token by token."""

    def __init__(self) -> None:
        self.curves = [SlowCurve(method) for method in DRAFT_METHODS]
        self.offset = {(m, s): 0.0 for m in range(len(DRAFT_METHODS)) for s in range(NUM_SLOTS)}
        self.precision = dict(self.offset)
        self.teaches = [True] * NUM_SLOTS
        self.own = {(k, s): [[0.0, 0.0] for _ in range(CAP)] for k in (True, False) for s in range(NUM_SLOTS)}
        self.all = {kind: [[0.0, 0.0] for _ in range(CAP)] for kind in (True, False)}

    def start(self, slot: int, *, teaches: bool) -> None:
        self.teaches[slot] = teaches
        for method in range(len(DRAFT_METHODS)):
            self.offset[method, slot] = self.precision[method, slot] = 0.0
        for kind in (True, False):
            self.own[kind, slot] = [[0.0, 0.0] for _ in range(CAP)]

    def learn(self, drafts: list[SlowDraft]) -> None:
        for method, curve in enumerate(self.curves):
            lessons = []
            by_slot: dict[int, list[tuple[float, float]]] = {}
            for draft in drafts:
                if draft.method != method:
                    continue
                for depth in range(draft.decided):
                    confidence = draft.confidences[depth]
                    chance = sigmoid(curve.logit(confidence, depth) + self.offset[method, draft.slot])
                    missed, spread = float(depth < draft.accepted) - chance, chance * (1 - chance)
                    by_slot.setdefault(draft.slot, []).append((missed, spread))
                    if self.teaches[draft.slot]:
                        lessons.append((curve.feature(confidence, depth), missed, spread))
            curve.fit(lessons)
            for slot, tokens in by_slot.items():
                at = (method, slot)
                kept = self.precision[at] * PRECISION_KEPT ** len(tokens)
                self.precision[at] = kept + sum(spread for _, spread in tokens)
                prior = OFFSET_PRECISION if self.teaches[slot] else EDITED_PRECISION
                step = sum(missed for missed, _ in tokens) / (self.precision[at] + prior)
                self.offset[at] = min(max(self.offset[at] + step, -LARGEST_OFFSET), LARGEST_OFFSET)

    def note(self, notes: list[tuple[int, int, list[float]]], *, by_model: bool) -> None:
        """The drafts of one step: (slot, tokens of which it is known how likely they are, survival) each."""
        for slot, known, survival in notes:
            add(self.own[by_model, slot], OWN_KEPT, [(known, survival)])
        teaching = [(known, survival) for slot, known, survival in notes if self.teaches[slot]]
        add(self.all[by_model], ALL_KEPT ** len(teaching), teaching)

    def survival(self, slot: int, *, by_model: bool) -> list[float]:
        of_all, prior = self.all[by_model], PRIOR_CHANCE[by_model]
        usual = (sum(passed for _, passed in of_all) + PRIOR_DRAFTS * prior) / (
            sum(reached for reached, _ in of_all) + PRIOR_DRAFTS
        )
        found = [1.0]
        for (reached, passed), (own_reached, own_passed) in zip(of_all, self.own[by_model, slot], strict=True):
            common = (passed + PRIOR_DRAFTS * usual) / (reached + PRIOR_DRAFTS)
            found.append(found[-1] * within((own_passed + SHRINK * common) / (own_reached + SHRINK)))
        return found

    def drafted_survival(self, slot: int, method: int, confidences: list[float]) -> list[float]:
        found = [1.0]
        for depth, confidence in enumerate(confidences):
            logit = self.curves[method].logit(confidence, depth) + self.offset[method, slot]
            found.append(found[-1] * within(sigmoid(logit)))
        found = [each for each in found if each >= LEAST_SURVIVAL]
        return found + [0.0] * (CAP + 1 - len(found))

    def calibration(self, method: int, slots: list[int]) -> tuple[float, float]:
        curve = self.curves[method]
        depth = curve.depth_sum / curve.depth_count
        mean = sum(self.offset[method, slot] for slot in slots) / len(slots)
        intercept, slope, fall = curve.weights.tolist()
        return intercept + fall * depth / 8 + mean, slope


def add(sums: list[list[float]], kept: float, drafts: list[tuple[int, list[float]]]) -> None:
    """Add the chances to reach and to pass each depth that is known of these drafts."""
    for depth, pair in enumerate(sums):
        lines = [survival for known, survival in drafts if depth < known]
        pair[0] = pair[0] * kept + sum(line[depth] for line in lines)
        pair[1] = pair[1] * kept + sum(line[depth + 1] for line in lines)


class Pair:
    """Both, given the same."""

    def __init__(self, seed: int, make_native: MakeNativeAcceptance) -> None:
        self.rng = np.random.default_rng(seed)
        self.fast, self.slow = Acceptance(NUM_SLOTS, CAP, make_native), SlowAcceptance()

    def some_slots(self) -> list[int]:
        slots: list[int] = self.rng.permutation(NUM_SLOTS)[: self.rng.integers(1, NUM_SLOTS + 1)].tolist()
        return slots

    def confidences(self, method: int) -> list[float]:
        found = self.rng.exponential(3.0, CAP) - 1
        if DRAFTERS[DRAFT_METHODS[method]].confidence is Confidence.PROBABILITY:
            found = self.rng.random(CAP)
        drawn: list[float] = found.tolist()
        return drawn

    def start(self) -> None:
        slot, teaches = int(self.rng.integers(NUM_SLOTS)), bool(self.rng.random() < 0.6)
        self.fast.start(slot, teaches=teaches)
        self.slow.start(slot, teaches=teaches)

    def learn(self) -> None:
        """One step to three, in one call."""
        steps, drafts = [], []
        for _ in range(self.rng.integers(1, 4)):
            of_step = []
            for slot in self.some_slots():
                decided = int(self.rng.integers(0, CAP + 1))
                accepted = max(decided - int(self.rng.integers(0, 2)), 0)
                method = int(self.rng.integers(len(DRAFT_METHODS)))
                of_step.append(SlowDraft(slot, method, decided, accepted, self.confidences(method)))
            steps.append(outcomes_of(of_step))
            drafts += of_step
        self.fast.learn(*steps)
        self.slow.learn(drafts)

    def note(self, *, by_model: bool) -> None:
        slots, notes = self.some_slots(), []
        requested = self.rng.integers(1, CAP + 1, len(slots))
        lengths = (self.rng.random(len(slots)) * (requested + 1)).astype(np.int64)
        chances = self.rng.random((len(slots), CAP)) * (np.arange(CAP) < lengths[:, None])
        survival = np.concatenate((np.ones((len(slots), 1)), chances.cumprod(axis=1)), axis=1)
        self.fast.note_drafts(np.array(slots), requested, lengths, survival, by_model=by_model)
        known = lengths if by_model else requested
        for slot, count, line in zip(slots, known.tolist(), survival.tolist(), strict=True):
            notes.append((slot, count, line))
        self.slow.note(notes, by_model=by_model)

    def note_nothing(self) -> None:
        slots = self.some_slots()
        note_nothing(self.fast, np.array(slots))
        nothing = [1.0, *[0.0] * CAP]
        self.slow.note([(slot, 1, nothing) for slot in slots], by_model=False)

    def check(self) -> None:
        every = np.arange(NUM_SLOTS)
        for by_model in (True, False):
            found = self.fast.survival(every, by_model=by_model)
            expected = [self.slow.survival(slot, by_model=by_model) for slot in range(NUM_SLOTS)]
            assert found == pytest.approx(np.array(expected), rel=1e-9)
        methods = self.rng.integers(0, len(DRAFT_METHODS), NUM_SLOTS)
        drafts = [self.confidences(method) for method in methods.tolist()]
        lengths = self.rng.integers(0, CAP + 1, NUM_SLOTS)
        found = self.fast.drafted_survival(table(every, methods, lengths, np.array(drafts)))
        for slot, (method, length) in enumerate(zip(methods.tolist(), lengths.tolist(), strict=True)):
            expected_line = self.slow.drafted_survival(slot, method, drafts[slot][:length])
            assert found[slot] == pytest.approx(expected_line, rel=1e-9)
        for method, name in enumerate(PASS_METHODS):
            slots = self.some_slots()
            line = self.fast.calibration(name, np.array(slots))
            assert line == pytest.approx(self.slow.calibration(method, slots), rel=1e-9)


def outcomes_of(drafts: list[SlowDraft]) -> DraftOutcomes:
    """Of whole drafts: more tokens than were decided have a confidence."""
    made = table(
        ints(*(each.slot for each in drafts)),
        ints(*(each.method for each in drafts)),
        full(len(drafts), CAP),
        np.array([each.confidences for each in drafts]),
    )
    decided = ints(*(each.decided for each in drafts))
    return outcomes(made, [each.accepted for each in drafts], decided)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_native", [False, True], ids=["python", "native"])
def test_whole_arrays_say_what_single_tokens_say(seed: int, is_native: bool, kernel_cache: Path) -> None:
    pair = Pair(seed, partial(CompiledAcceptance, text_library(kernel_cache)) if is_native else PythonAcceptance)
    pair.check()
    for _ in range(60):
        match int(pair.rng.integers(8)):
            case 0:
                pair.start()
            case 1:
                pair.note(by_model=False)
            case 2:
                pair.note(by_model=True)
            case 3:
                pair.note_nothing()
            case _:
                pair.learn()
        pair.check()
