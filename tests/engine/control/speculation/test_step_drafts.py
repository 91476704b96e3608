"""The drafts of a step, from the answers of drafters to the outcome. Oracles: every draft on its own; a loop over
the tokens of each sequence.

Planted bugs that these tests have caught: the draft with the likeliest first token is chosen; a draft that the
model replaces teaches nothing; the model's drafts in the wrong order; no plan for the model while a step runs,
where all drafts are from text; blocks and releases are sent twice; the time of the look-up is lost; the first
token that is cut is not decided; the first token of a chunk is not among the accepted; a drawn draft is decided
beyond what was verified; tokens below the price of a row count; the price is left out where no token exceeds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.contract.drafts import NO_DRAFTS, Drafts, DraftTable, joined, table_of
from faser.engine.contract.plan import DraftPlan, DraftRequest, StopRule
from faser.engine.control.speculation.step_drafts import StepDrafts
from tests.engine.control.speculation.building import (
    answer,
    candidates,
    constant,
    ints,
    named_drafts,
    one_draft,
    step_drafts,
)
from tests.engine.control.speculation.python_acceptance import outcomes
from tests.native_acceptance import native_acceptance

CAP, MODEL_CAP = 8, 5
NUM_SLOTS = 8
STOP = StopRule(row_price=0.1, pass_prices=(0.5, 1.0, 1.5, 2.0), intercept=0.0, slope=1.0)
CONFIDENCES = st.lists(st.floats(0.05, 0.95), max_size=CAP)


def asked(
    slots: Sequence[int],
    *,
    released: tuple[int, ...] = (),
    new_blocks: tuple[int, ...] = (),
    stop: StopRule | None = None,
    share: float = 0.0,
) -> StepDrafts:
    """Drafts from text have been asked for: CAP tokens of each slot."""
    count = len(slots)
    requests = tuple(DraftRequest(slot=slot, max_tokens=CAP, new_blocks=new_blocks) for slot in slots)
    return StepDrafts(
        sequences=[],
        lengths=np.full(count, CAP),
        candidates=candidates(constant(0.5, count, CAP), slots=ints(*slots)),
        stop=stop,
        share=share,
        plan=DraftPlan(
            step=0, width=CAP, requests=requests, released=released, share=share or None, from_text=True
        ),
    )


def draft(slot: int, method: str, confidences: Sequence[float] = ()) -> DraftTable:
    return one_draft(slot, method, confidences, width=CAP)


def as_lists(drafts: DraftTable) -> list[list[object]]:
    return [column.tolist() for column in drafts]


# From the answers to one draft for each sequence.


@given(st.lists(st.tuples(CONFIDENCES, CONFIDENCES), min_size=1, max_size=NUM_SLOTS), st.floats(0.0, 0.9))
def test_of_each_sequence_the_draft_that_is_worth_most_beyond_its_rows_is_chosen(
    offered: list[tuple[list[float], list[float]]], row_price: float
) -> None:
    """Oracle: every draft on its own. Requests come in falling order of slots; the first of equals is taken."""
    acceptance = native_acceptance(NUM_SLOTS, CAP)
    slots = range(len(offered) - 1, -1, -1)
    suffix = [draft(slot, "suffix", offered[slot][0]) for slot in slots]
    ngram = [draft(slot, "ngram", [9 * each for each in offered[slot][1]]) for slot in slots]

    def value(each: DraftTable) -> tuple[float, float]:
        survival = acceptance.drafted_survival(each)[0].tolist()
        worth = sum(max(0.0, chance - row_price) for chance in survival[1:])
        return round(worth, 9), 0.0 if worth else sum(survival)

    step = asked(slots)
    step.take_text(answer(*suffix, *ngram), acceptance, notes=False, row_price=row_price)

    assert step.table.slots.tolist() == [*slots]
    for at, (first, second) in enumerate(zip(suffix, ngram, strict=True)):
        if value(first) == pytest.approx(value(second), abs=1e-9):
            continue
        best = max(first, second, key=value)
        assert as_lists(step.table.take(ints(at))) == as_lists(best)
        assert step.survival[at].tolist() == pytest.approx(acceptance.drafted_survival(best)[0].tolist())


def test_a_long_draft_that_will_be_cut_does_not_displace_a_likely_token() -> None:
    long, likely = draft(0, "suffix", [0.8] * CAP), draft(0, "ngram", [8.0])
    acceptance = native_acceptance(1, CAP)
    assert acceptance.drafted_survival(long).sum() > acceptance.drafted_survival(likely).sum()
    for row_price, method in ((0.0, "suffix"), (0.62, "ngram"), (0.95, "suffix")):
        step = asked([0])
        step.take_text(answer(long, likely), acceptance, notes=False, row_price=row_price)
        assert named_drafts(step.table) == [(0, method)], row_price


def test_the_first_of_equal_text_drafters_drafts() -> None:
    step = asked([0])
    drafts = [table_of([0], "suffix", [[token]], [[0.5]], width=CAP) for token in (3, 4)]
    step.take_text(answer(*drafts), native_acceptance(1, CAP), notes=False)
    assert step.table.tokens(0) == (3,)


def test_without_any_draft_the_first_method_has_empty_ones_and_nothing_is_left_to_learn() -> None:
    step = asked([3, 1])
    nothing = [draft(slot, method) for method in ("suffix", "ngram") for slot in (3, 1)]

    step.take_text(answer(*nothing), native_acceptance(4, CAP), notes=False)

    assert not step.has_drafts
    assert named_drafts(step.table) == [(3, "suffix"), (1, "suffix")]
    assert step.survival.tolist() == [[1.0] + [0.0] * CAP] * 2
    assert not step.table.lengths.any()
    step.leave_to_model(ints(0, 5))
    assert not len(step.not_taken().slots)


@pytest.mark.parametrize(
    ("by_model", "others"),
    [
        ((0, 0, 0), {(1, "ngram")}),
        ((0, 4, 0), {(1, "ngram"), (1, "suffix")}),
        ((4, 4, 4), {(1, "ngram"), (1, "suffix"), (2, "ngram")}),
    ],
)
def test_drafts_that_are_not_taken_are_those_of_the_other_method_and_those_that_the_model_replaces(
    by_model: tuple[int, ...], others: set[tuple[int, str]]
) -> None:
    """Slot 0 has no draft, slot 1 has two, slot 2 has one."""
    step = asked([0, 1, 2])
    suffix = draft(0, "suffix"), draft(1, "suffix", [0.9]), draft(2, "suffix")
    ngram = draft(0, "ngram"), draft(1, "ngram", [1.0]), draft(2, "ngram", [5.0, 5.0])
    step.take_text(answer(*suffix, *ngram), native_acceptance(3, CAP), notes=False)
    step.leave_to_model(ints(*by_model))

    found = named_drafts(step.not_taken())

    assert set(found) == others
    assert len(found) == len(others)


def test_the_plan_for_the_model_has_the_requests_that_are_left_to_it() -> None:
    """Blocks and releases went out with the first plan."""
    step = asked([3, 2, 1, 0], released=(7,), new_blocks=(4,), stop=STOP)
    text = [draft(slot, "suffix", [0.9]) for slot in (3, 2, 1, 0)]
    step.take_text(answer(*text, run_s=0.25), native_acceptance(4, CAP), notes=False)

    plan = step.leave_to_model(ints(2, 0, MODEL_CAP, 0))

    assert plan == DraftPlan(
        step=0,
        width=CAP,
        requests=(
            DraftRequest(slot=3, max_tokens=2, new_blocks=()),
            DraftRequest(slot=1, max_tokens=MODEL_CAP, new_blocks=()),
        ),
        stop=STOP,
    )
    modelled = draft(3, "draft_model", [1.0]), draft(1, "draft_model")
    step.take(answer(*modelled, run_s=0.5, passes=2, catchup_tokens=9))
    assert as_lists(step.table) == as_lists(joined([modelled[0], text[1], modelled[1], text[3]]))
    assert (step.drafts.run_s, step.drafts.passes, step.drafts.catchup_tokens) == (0.75, 2, 9)
    assert as_lists(step.from_text) == as_lists(joined(text))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_while_a_step_runs_the_models_plan_follows_even_without_requests(share: float) -> None:
    step = asked([1, 0], share=share)
    text = draft(1, "suffix", [0.9]), draft(0, "suffix")
    step.take_text(answer(*text), native_acceptance(2, CAP), notes=False)

    plan = step.leave_to_model(ints(0, 0))

    if not share:
        assert plan is None
    else:
        assert plan == DraftPlan(step=0, width=CAP, requests=(), share=share)
        step.take(Drafts(step=0, table=NO_DRAFTS, run_s=0.0))  # a table without columns, as a drafter makes it
    assert as_lists(step.table) == as_lists(joined(text))


def test_where_there_is_one_drafter_its_answer_is_the_drafts() -> None:
    step = StepDrafts(sequences=[], lengths=ints(3), candidates=candidates(constant(0.5, 1, CAP)))
    made = answer(draft(5, "draft_model", [1.0, 2.0]), run_s=0.5, passes=3)
    step.take(made)
    assert step.drafts is made
    assert step.has_drafts
    assert not len(step.not_taken().slots)


@pytest.mark.parametrize(("passes", "has_drafts"), [(0, False), (1, True)])
def test_passes_whose_tokens_were_all_dropped_are_drafts_as_well(passes: int, has_drafts: bool) -> None:
    step = StepDrafts(sequences=[], lengths=ints(3), candidates=candidates(constant(0.5, 1, CAP)))
    step.take(answer(draft(0, "draft_model"), passes=passes))
    assert step.has_drafts == has_drafts
    assert step.verified() == []


@pytest.mark.parametrize("num_decided", [0, 1])
def test_what_is_verified_are_the_kept_tokens_that_are_not_decided_yet(num_decided: int) -> None:
    drafts = joined([draft(2, "suffix", [0.5] * 4), draft(0, "suffix", [0.5] * 2), draft(1, "suffix", [0.5])])
    step = step_drafts(drafts, [2, 1, 0], num_decided=num_decided)
    assert step.verified() == [(0, tuple(range(num_decided, num_decided + 2))), (1, (num_decided,))]


# From the step's tokens to outcomes.

SHORT = 4


@dataclass
class Verified:
    """One draft, how many of its tokens the step verifies, and the target's own next tokens.

    A step samples the verified tokens that agree with the target, and one more. num_decided: the step before
    accepted the first token.
    """

    token_ids: tuple[int, ...]
    kept: int
    target: tuple[int, ...]
    num_decided: int = 0

    @property
    def sampled(self) -> tuple[int, ...]:
        rows = self.token_ids[self.num_decided : self.num_decided + self.kept]
        accepted = 0
        while accepted < len(rows) and rows[accepted] == self.target[accepted]:
            accepted += 1
        return self.target[: accepted + 1]

    def outcome(self) -> tuple[int, int]:
        """(decided, accepted) tokens of the whole draft, one after the other."""
        decided = accepted = self.num_decided
        for token_id, sampled in zip(self.token_ids[self.num_decided :], self.sampled, strict=False):
            decided += 1
            if token_id != sampled:
                break
            accepted += 1
        return decided, accepted


@st.composite
def verified(pick: st.DrawFn, num_decided: int) -> Verified:
    """Of a vocabulary of two, so that drafts are often right."""
    tokens = st.integers(0, 1)
    token_ids = tuple(pick(st.lists(tokens, min_size=2 * num_decided, max_size=SHORT)))
    return Verified(
        token_ids=token_ids,
        kept=pick(st.integers(0, len(token_ids) - num_decided)),
        target=tuple(pick(st.lists(tokens, min_size=SHORT + 1, max_size=SHORT + 1))),
        num_decided=num_decided,
    )


def short_drafts(token_ids: Sequence[tuple[int, ...]]) -> DraftTable:
    """Drafts of these tokens in slots 0, 1, …"""
    sure = [(1.0,) * len(each) for each in token_ids]
    return table_of(range(len(token_ids)), "draft_model", token_ids, sure, width=SHORT)


@given(data=st.data(), num_decided=st.integers(0, 1), count=st.integers(1, 5))
def test_a_token_is_decided_exactly_where_one_was_sampled_after_tokens_that_were_right(
    data: st.DataObject, num_decided: int, count: int
) -> None:
    """Drafts that the policy or the step cuts, or of which no token is verified, and chunks, included."""
    each = [data.draw(verified(num_decided)) for _ in range(count)]
    drafts = short_drafts([one.token_ids for one in each])
    num_cut = ints(*(data.draw(st.integers(0, len(one.token_ids) - num_decided - one.kept)) for one in each))
    kept = ints(*(one.kept for one in each)) + num_cut
    found = outcomes(
        drafts,
        kept - num_cut,
        ints(*(len(one.sampled) - 1 for one in each)),
        ints(*(one.sampled[-1] for one in each)),
        num_decided=num_decided,
    )
    assert [*zip(found.decided.tolist(), found.accepted.tolist(), strict=True)] == [one.outcome() for one in each]
    assert as_lists(found.drafts) == as_lists(drafts)


@given(
    st.lists(
        st.tuples(st.integers(0, SHORT), st.integers(0, SHORT), st.integers(0, SHORT)), min_size=1, max_size=5
    )
)
def test_of_drawn_drafts_only_what_was_verified_is_decided(drafts: list[tuple[int, int, int]]) -> None:
    """A drawn token may be refused though the same token is then sampled, so tokens are not compared."""
    each = [(length, min(kept, length), min(right, kept, length)) for length, kept, right in drafts]
    step = step_drafts(
        short_drafts([(7,) * length for length, _, _ in each]), [kept for _, kept, _ in each], is_drawn=True
    )
    count = len(each)
    right = ints(*(right for _, _, right in each))
    found = outcomes(step.table, step.kept, right, np.full(count, 7), is_drawn=True)
    assert found.accepted.tolist() == [right for _, _, right in each]
    assert found.decided.tolist() == [right + (right < kept) for _, kept, right in each]
