"""When verdicts reach the estimates, and what of a step's drafts is counted. Oracles: twins that were told less.

Planted bugs that these tests have caught: a sequence that was preempted teaches by a draft that was not chosen;
verdicts do not wait for the end of a cached decision; tokens that the step itself cut count as verified; the KV of
a draft from text is taken to be in the draft model's cache.
"""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from faser.config.drafters import DRAFT_METHODS
from faser.engine.contract.drafts import Drafts
from faser.engine.contract.plan import Draft, SequenceResult, StepResult
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.sequence import Status
from faser.engine.control.speculation.acceptance import Acceptance, DraftArrays, DraftReader, ReadDrafts
from faser.engine.control.speculation.control import OutcomeLearner
from faser.engine.control.speculation.state import SpeculationState
from faser.engine.control.speculation.statistics import SpeculationStatistics
from faser.engine.control.step_cost import CostModel
from tests.engine.control.speculation.test_state import CAP, NUM_SLOTS, candidates_of, sequence_in

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

DRAFTED, OTHER = (1, 1), 7  # a draft, and the token that comes in its place
TIMES = {
    Role.STEP: CostTable(rows=(1, 2), seconds=(0.01, 0.01)),
    Role.PASS: CostTable(rows=(1, 2), seconds=(0.002, 0.002)),
    Role.TEXT: CostTable(rows=(1, 2), seconds=(0.0, 0.0)),
}


class World:
    """A learner whose sequences have each drafted two tokens, all of them wrong."""

    def __init__(self, count: int, *, method: str = "draft_model") -> None:
        self.method = method
        self.sequences = [sequence_in(slot) for slot in range(count)]
        self.acceptance = Acceptance(NUM_SLOTS, CAP)
        self.state = SpeculationState(NUM_SLOTS, CAP, SimulatedClock())
        self.statistics = SpeculationStatistics(NUM_SLOTS, CAP, ())
        self.costs = CostModel(StepTimes(tables=TIMES))
        self.learner = OutcomeLearner(self.costs, self.acceptance, self.state, self.statistics)
        for each in self.sequences:
            each.status = Status.RUNNING
            self.state.start(each)
            self.statistics.start(each.held_slot, "default")

    def read(self) -> ReadDrafts:
        return DraftReader(CAP).read([self.draft(each.held_slot) for each in self.sequences])

    def draft(self, slot: int, length: int = len(DRAFTED)) -> Draft:
        token_ids = DRAFTED[:length]
        return Draft(slot=slot, method=self.method, token_ids=token_ids, confidences=(0.5,) * length)

    def result(self, *, failed: tuple[int, ...] = (), num_cut: int = 0) -> StepResult:
        results = tuple(
            SequenceResult(slot=slot, token_ids=() if slot in failed else (OTHER,), num_cut=num_cut)
            for slot in range(len(self.sequences))
        )
        return StepResult(step=1, sequences=results, run_s=0.01)

    def verify(self, *, failed: tuple[int, ...] = (), num_cut: int = 0) -> None:
        count = len(self.sequences)
        drafted = DraftArrays(
            drafts=self.read(), kept=np.full(count, len(DRAFTED)), survival=np.ones((count, CAP + 1))
        )
        self.learner.learn_verified(drafted, self.result(failed=failed, num_cut=num_cut), self.sequences)

    def expected(self) -> Floats:
        """[S] chance of the first token of each sequence's next draft."""
        count = len(self.sequences)
        methods = np.full(count, DRAFT_METHODS.index(self.method))
        confidences = np.full((count, CAP), 0.5)
        ones = np.ones(count, dtype=np.int64)
        return self.acceptance.drafted_survival(np.arange(count), methods, ones, confidences)[:, 1]

    def missing_kv(self) -> list[int]:
        missing: list[int] = self.state.missing_kv(self.state.batch(self.sequences)).tolist()
        return missing


def test_without_a_cached_decision_verdicts_teach_at_once() -> None:
    world = World(4)
    before = world.expected()
    world.verify()
    assert (world.expected() < before).all()


def test_while_a_cached_decision_serves_verdicts_wait_for_its_end() -> None:
    world = World(32)
    world.state.cache_decision(candidates_of(32), np.full(32, len(DRAFTED)), None, 32)
    before = world.expected()
    world.verify()
    world.learner.learn_not_chosen(world.read(), world.result(), world.sequences)
    assert (world.expected() == before).all()
    world.state.expire_decision()
    world.verify()
    assert (world.expected() < before).all()


def test_a_sequence_that_failed_or_was_preempted_teaches_nothing_and_is_not_counted() -> None:
    world = World(3)
    world.sequences[1].status = Status.WAITING
    before = world.expected()
    world.verify(failed=(2,))
    counted = [world.statistics.summary(slot, None, "faser").verified for slot in range(3)]
    assert counted == [len(DRAFTED), 0, 0]
    fall = before - world.expected()
    assert fall[0] > 1.1 * fall[1] > 0  # the curve, which holds for all, has moved a little
    assert fall[1] == fall[2]


def test_a_draft_that_was_not_chosen_teaches_by_the_tokens_that_came_and_is_not_counted() -> None:
    world = World(3, method="suffix")
    world.sequences[1].status = Status.WAITING
    before = world.expected()
    world.learner.learn_not_chosen(world.read(), world.result(failed=(2,)), world.sequences)
    fall = before - world.expected()
    assert fall[0] > 1.1 * fall[1] > 0
    assert fall[1] == fall[2]
    assert world.statistics.summary(0, None, "faser").steps == 0


def test_tokens_that_the_step_gave_up_do_not_count_as_verified() -> None:
    world, whole = World(2), World(2)
    world.verify(num_cut=1)
    whole.verify()
    assert world.statistics.summary(0, None, "faser").verified == 1
    assert whole.statistics.summary(0, None, "faser").verified == 2
    assert world.expected().tolist() == whole.expected().tolist()


def test_a_sequence_without_a_draft_is_counted_as_such() -> None:
    world = World(2)
    drafted = DraftArrays(drafts=world.read(), kept=np.full(2, 2), survival=np.ones((2, CAP + 1)))
    world.learner.learn_verified(drafted.among(np.array([1])), world.result(), world.sequences)
    assert [world.statistics.summary(slot, None, "faser").steps for slot in range(2)] == [1, 1]
    assert [world.statistics.summary(slot, None, "faser").drafts for slot in range(2)] == [0, 1]


@pytest.mark.parametrize("method, grows", [("draft_model", 1), ("suffix", 0)])
def test_the_draft_cache_holds_what_its_model_has_drafted(method: str, grows: int) -> None:
    world = World(2, method=method)
    before = world.missing_kv()
    world.verify()
    assert [old - new for old, new in zip(before, world.missing_kv(), strict=True)] == [grows, grows]


def test_missing_kv_is_refilled_for_the_sequences_that_a_model_drafted_for() -> None:
    world = World(2)
    methods = np.array([DRAFT_METHODS.index("draft_model"), DRAFT_METHODS.index("suffix")])
    drafts = Drafts(step=1, drafts=(world.draft(0), world.draft(1)), run_s=0.01, passes=2)
    candidates = replace(candidates_of(2), missing_kv=np.array([5, 5]))
    before = world.missing_kv()
    world.learner.learn_drafting(drafts, candidates, methods, np.array([2, 2]))
    assert [old - new for old, new in zip(before, world.missing_kv(), strict=True)] == [5, 0]


def test_passes_whose_tokens_were_all_dropped_are_part_of_the_time() -> None:
    """Drafts of one token took three passes of two milliseconds: exactly what the table says."""
    world = World(2)
    drafts = Drafts(step=1, drafts=(world.draft(0, 1), world.draft(1, 1)), run_s=0.006, passes=3)
    methods = np.full(2, DRAFT_METHODS.index("draft_model"))
    world.learner.learn_drafting(drafts, candidates_of(2), methods, np.array([1, 1]))
    assert world.costs.factor(Role.PASS) == pytest.approx(1.0)
