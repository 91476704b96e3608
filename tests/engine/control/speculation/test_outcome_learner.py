"""When outcomes reach the estimates, and what of a step's drafts is counted."""

import numpy as np

from faser.engine.contract.plan import SequenceResult, SequenceRows, StepPlan, StepResult
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.sequences.sequence import Sequence, Status
from faser.engine.control.speculation.acceptance.draft_arrays import DraftArrays
from faser.engine.control.speculation.acceptance.estimator import Acceptance
from faser.engine.control.speculation.outcome_learner import OutcomeLearner
from faser.engine.control.speculation.state import SpeculationState
from faser.engine.control.speculation.statistics import SpeculationStatistics
from faser.engine.control.timing.clock import SimulatedClock
from faser.engine.control.timing.cost_model import CostModel
from tests.engine.control.speculation.test_state import CAP, NUM_SLOTS, candidates_of, sequence_in

LENGTH = 2


class World:
    """A learner whose sequences have each drafted two tokens, all of them refused."""

    def __init__(self, count: int) -> None:
        self.sequences = [sequence_in(slot) for slot in range(count)]
        self.acceptance = Acceptance(NUM_SLOTS, CAP)
        self.state = SpeculationState(NUM_SLOTS, CAP, SimulatedClock())
        self.statistics = SpeculationStatistics(NUM_SLOTS, CAP, ())
        costs = CostModel(StepTimes.proportional(step_s=0.01))
        self.learner = OutcomeLearner(costs, self.acceptance, self.state, self.statistics)
        for each in self.sequences:
            each.status = Status.RUNNING
            self.state.start(each)
            self.statistics.start(each.held_slot, "default")

    def verify(self, sequences: list[Sequence], *, failed: tuple[int, ...] = ()) -> None:
        slots = [each.held_slot for each in sequences]
        rows = tuple(
            SequenceRows(slot=slot, start=4, token_ids=(9, 1, 1), new_blocks=(), samples=True, num_drafts=LENGTH)
            for slot in slots
        )
        results = tuple(SequenceResult(slot=slot, token_ids=() if slot in failed else (7,)) for slot in slots)
        count = len(slots)
        drafted = DraftArrays(
            slots=np.array(slots),
            methods=np.zeros(count, dtype=np.int64),
            lengths=np.full(count, LENGTH),
            kept=np.full(count, LENGTH),
            confidences=np.ones((count, CAP)),
            survival=np.ones((count, CAP + 1)),
        )
        plan = StepPlan(step=1, released=(), started=(), rows=rows)
        self.learner.learn_verified(
            drafted, plan, StepResult(step=1, sequences=results, run_s=0.01), self.sequences[: len(slots)]
        )

    def expected(self) -> list[float]:
        found: list[float] = self.acceptance.survival(np.arange(len(self.sequences)))[:, 1].tolist()
        return found


def test_without_a_cached_decision_outcomes_teach_at_once() -> None:
    world = World(4)
    before = world.expected()
    world.verify(world.sequences)
    assert all(after < old for after, old in zip(world.expected(), before, strict=True))


def test_while_a_cached_decision_serves_outcomes_wait_for_its_end() -> None:
    world = World(32)
    world.state.cache_decision(candidates_of(32), np.full(32, LENGTH), None, 32)
    before = world.expected()
    world.verify(world.sequences)
    assert world.expected() == before
    world.state.expire_decision()
    world.verify(world.sequences)
    assert all(after < old for after, old in zip(world.expected(), before, strict=True))


def test_a_sequence_that_failed_or_was_preempted_teaches_nothing_and_is_not_counted() -> None:
    world = World(3)
    world.sequences[1].status = Status.WAITING
    before = world.expected()
    world.verify(world.sequences, failed=(2,))
    counted = [world.statistics.summary(slot, None, "faser").verified for slot in range(3)]
    assert counted == [LENGTH, 0, 0]
    after = world.expected()
    assert before[0] - after[0] > 2 * (before[1] - after[1]) > 0  # what holds for all has moved a little
    assert after[1] == after[2]
