"""When outcomes reach the estimates, and what of a step's drafts is counted. Oracles: twins that were given less.

Planted bugs that these tests have caught: a sequence that was preempted teaches by a draft that was not taken;
outcomes do not wait for the end of a cached decision; tokens that the step itself cut count as verified; the KV of
a draft from text is taken to be in the draft model's cache; a draft made during a step is compared with the tokens
that it continues.
"""

import numpy as np
import pytest

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.drafts import Drafts, DraftTable, joined, table_of
from faser.engine.contract.plan import StepPlan, StepRows
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.sequence import Status
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.speculation.policies import Off
from faser.engine.control.speculation.step_drafts import StepDrafts
from faser.engine.control.step_cost import CostModel
from faser.types.arrays import Floats
from tests.engine.control.speculation.building import (
    candidates,
    constant,
    full,
    ints,
    outcomes,
    sequence_in,
    step_drafts,
)
from tests.fakes import SequenceOutcome, step_result
from tests.native_acceptance import make_native, native_acceptance

CAP, NUM_SLOTS = 4, 80
DRAFTED, OTHER = (1, 1), 7  # a draft, and the token that is sampled in its place
TIMES = {
    Role.STEP: CostTable(rows=(1, 2), seconds=(0.01, 0.01)),
    Role.PASS: CostTable(rows=(1, 2), seconds=(0.002, 0.002)),
    Role.TEXT: CostTable(rows=(1, 2), seconds=(0.0, 0.0)),
}


class Batch:
    """Sequences that have each drafted two tokens, all of them wrong, and the control that hears of it."""

    def __init__(self, count: int, *, method: str = "draft_model") -> None:
        self.method = method
        self.costs = CostModel(StepTimes(tables=TIMES))
        self.control = SpeculationControl(
            SpeculationConfig(method="auto", model="a draft model", num_speculative_tokens=CAP),
            self.costs,
            make_native=make_native,
            num_slots=NUM_SLOTS,
            clock=SimulatedClock(),
            policy=Off(),
        )
        self.sequences = [sequence_in(slot) for slot in range(count)]
        for each in self.sequences:
            each.status = Status.RUNNING
            self.control.start(each)

    def drafts(self, *slots: int, length: int = len(DRAFTED)) -> DraftTable:
        """Of these slots, or of all."""
        given = slots or range(len(self.sequences))
        return table_of(
            given, self.method, [DRAFTED[:length]] * len(given), [(0.5,) * length] * len(given), width=CAP
        )

    def keep(self, drafts: StepDrafts) -> None:
        self.control.keep(drafts, lambda _, asked: asked)

    def verify(self, drafts: StepDrafts | None = None, *, failed: tuple[int, ...] = (), num_cut: int = 0) -> None:
        """A step verifies these drafts; None: the usual ones, whole."""
        if drafts is None:
            drafts = step_drafts(self.drafts(), full(len(self.sequences), len(DRAFTED)))
        rows = StepRows()
        verified = {drafts.table.slots.item(at): token_ids for at, token_ids in drafts.verified()}
        for slot in range(len(self.sequences)):
            draft = verified.get(slot, ())
            rows.add(slot, 4, (1, *draft), samples=True, num_drafts=len(draft))
        plan = StepPlan(step=1, released=(), started=(), rows=rows)
        results = [
            SequenceOutcome(token_ids=() if slot in failed else (OTHER,), num_cut=num_cut)
            for slot in range(len(self.sequences))
        ]
        result = step_result(1, *results, run_s=0.01)
        prediction = self.control.launch(plan)
        self.control.learn(
            plan, result, self.sequences, result.by_sequence(), prediction=prediction, drafts=drafts
        )

    def not_taken(self) -> StepDrafts:
        """The model's drafts, which are empty, were taken in place of those."""
        count = len(self.sequences)
        drafts = step_drafts(self.drafts(length=0), full(count, 0))
        drafts.from_text, drafts.taken, drafts.by_model = self.drafts(), np.arange(count), np.arange(count)
        return drafts

    def expected(self) -> Floats:
        """[S] chance of the first token of each sequence's next draft."""
        return self.control._acceptance.drafted_survival(self.drafts(length=1))[:, 1]

    def missing_kv(self) -> list[int]:
        state = self.control._state
        missing: list[int] = state.missing_kv(state.batch(self.sequences)).tolist()
        return missing

    def verified(self, slot: int) -> int:
        return self.control.summary(self.sequences[slot]).verified


def test_without_a_cached_decision_outcomes_teach_at_once() -> None:
    batch = Batch(4)
    before = batch.expected()
    batch.verify()
    assert (batch.expected() < before).all()


def test_while_a_cached_decision_serves_outcomes_wait_for_its_end() -> None:
    batch = Batch(32, method="suffix")
    state = batch.control._state
    state.cache_decision(candidates(constant(0.5, 32, CAP)), full(32, len(DRAFTED)), None, 32)
    before = batch.expected()
    batch.verify()
    batch.verify(batch.not_taken())
    assert (batch.expected() == before).all()
    state.expire_decision()
    batch.verify()
    assert (batch.expected() < before).all()


def test_a_sequence_that_failed_or_was_preempted_teaches_nothing_and_is_not_counted() -> None:
    batch = Batch(3)
    batch.sequences[1].status = Status.WAITING
    before = batch.expected()
    batch.verify(failed=(2,))
    assert [batch.verified(slot) for slot in range(3)] == [len(DRAFTED), 0, 0]
    fall = before - batch.expected()
    assert fall[0] > 1.1 * fall[1] > 0  # the curve, which holds for all, has moved a little
    assert fall[1] == fall[2]


def test_a_draft_that_was_not_taken_teaches_by_the_sampled_tokens_and_is_not_counted() -> None:
    batch = Batch(3, method="suffix")
    batch.sequences[1].status = Status.WAITING
    before = batch.expected()
    batch.verify(batch.not_taken(), failed=(2,))
    fall = before - batch.expected()
    assert fall[0] > 1.1 * fall[1] > 0
    assert fall[1] == fall[2]
    summary = batch.control.summary(batch.sequences[0])
    assert (summary.steps, summary.drafts, summary.drafted) == (1, 0, 0)


@pytest.mark.parametrize(
    ("unverified", "sampled", "decided", "good"),
    [
        (0, (7, 8, 3), 3, 2),  # a draft made before its step: the third token is wrong
        (2, (1, 2, 7), 1, 1),  # made during it: all that it continues was accepted, and its first token was right
        (2, (1, 2, 5), 1, 0),
        (2, (1, 7), 0, 0),  # a token before it was refused
    ],
)
def test_a_draft_that_was_not_taken_is_compared_with_the_tokens_at_its_place(
    unverified: int, sampled: tuple[int, ...], decided: int, good: int
) -> None:
    """Oracle: the outcome itself, given to another Acceptance."""
    batch, expected = Batch(1), native_acceptance(NUM_SLOTS, CAP)
    drafts = table_of([0], "ngram", [(7, 8, 9)], [(5.0,) * 3], width=CAP)
    batch.control._learning._learn_not_taken(drafts, {0: sampled}, {0: unverified})
    batch.control._acceptance.learn_held()
    expected.learn(outcomes(drafts, [good], ints(decided)))
    found = batch.control._acceptance.drafted_survival(drafts)
    assert found.tolist() == expected.drafted_survival(drafts).tolist()


def test_tokens_that_the_step_gave_up_do_not_count_as_verified() -> None:
    batch, whole = Batch(2), Batch(2)
    batch.verify(num_cut=1)
    whole.verify()
    assert (batch.verified(0), whole.verified(0)) == (1, 2)
    assert batch.expected().tolist() == whole.expected().tolist()


def test_a_sequence_without_a_draft_is_counted_as_such() -> None:
    batch = Batch(2)
    batch.verify(step_drafts(batch.drafts(1), [2]))
    summaries = [batch.control.summary(each) for each in batch.sequences]
    assert [each.steps for each in summaries] == [1, 1]
    assert [each.drafts for each in summaries] == [0, 1]


@pytest.mark.parametrize("method, grows", [("draft_model", 1), ("suffix", 0)])
def test_the_draft_cache_holds_what_its_model_has_drafted(method: str, grows: int) -> None:
    batch = Batch(2, method=method)
    before = batch.missing_kv()
    batch.verify()
    assert [old - new for old, new in zip(before, batch.missing_kv(), strict=True)] == [grows, grows]


def made(drafts: DraftTable, *, passes: int, run_s: float, missing_kv: int = 0) -> StepDrafts:
    """Drafts that a model has made and that no policy has cut yet."""
    count = len(drafts.slots)
    return StepDrafts(
        sequences=[],
        lengths=drafts.lengths,
        candidates=candidates(constant(0.5, count, CAP), missing_kv=full(count, missing_kv)),
        drafts=Drafts(step=1, table=drafts, run_s=run_s, passes=passes),
    )


def test_missing_kv_is_refilled_for_the_sequences_that_a_model_drafted_for() -> None:
    batch = Batch(2)
    by_text = table_of([1], "suffix", [DRAFTED], [(0.5, 0.5)], width=CAP)
    before = batch.missing_kv()
    batch.keep(made(joined([batch.drafts(0), by_text]), passes=2, run_s=0.01, missing_kv=5))
    assert [old - new for old, new in zip(before, batch.missing_kv(), strict=True)] == [5, 0]


def test_passes_whose_tokens_were_all_dropped_are_part_of_the_time() -> None:
    """Drafts of one token took three passes of two milliseconds: exactly what the table says."""
    batch = Batch(2)
    batch.keep(made(batch.drafts(length=1), passes=3, run_s=0.006))
    assert batch.costs.factor(Role.PASS) == pytest.approx(1.0)
