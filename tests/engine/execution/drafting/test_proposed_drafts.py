"""Every drafted row finds its own line among the proposed tokens. Oracle: a loop."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.contract.plan import DraftPlan
from faser.engine.execution.drafting.drafter import Proposals, ProposedDrafts, drafts_of, proposal_lines
from tests.engine.execution.draft_lines import DraftLine, table_with
from tests.engine.execution.sampling.sampled import Drafted, layout

drafts_strategy = st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=4)


@given(drafts_strategy, st.data())
def test_lines_are_those_of_a_loop(drafts: list[list[int]], data: st.DataObject) -> None:
    num_decided = data.draw(st.integers(0, 1))
    order = data.draw(st.permutations(range(len(drafts))))
    proposed = [DraftLine(slot=slot, method="draft_model", token_ids=tuple(drafts[slot])) for slot in order]
    kept = [data.draw(st.integers(0, max(0, len(draft) - num_decided))) for draft in drafts]
    pairs = enumerate(zip(drafts, kept, strict=True))
    rows = [Drafted(slot, 1, tuple(draft[num_decided:][:left])) for slot, (draft, left) in pairs]
    first = {slot: sum(len(drafts[other]) for other in order[: order.index(slot)]) for slot in order}
    expected = [first[slot] + num_decided + i for slot, left in enumerate(kept) for i in range(left)]
    assert proposal_lines(layout(rows), table_with(proposed, 4), num_decided=num_decided).tolist() == expected


def proposals(**given: Any) -> Proposals:
    """Three tokens for slot 4, then two for slot 1."""
    drafts = (
        DraftLine(slot=4, method="draft_model", token_ids=(5, 6, 7)),
        DraftLine(slot=1, method="draft_model", token_ids=(8, 9)),
    )
    return Proposals(table=table_with(drafts, 4), **given)


@pytest.mark.parametrize("num_decided, lines", [(0, [3, 0, 1]), (1, [4, 1, 2])])
def test_probabilities_are_those_of_the_drafted_rows_in_the_order_of_the_step(
    num_decided: int, lines: list[int]
) -> None:
    probs = torch.rand(5, 3, dtype=torch.float64)
    drafts = ProposedDrafts()
    drafts.hold(proposals(probs=probs), num_decided=num_decided)
    found = drafts.probs(layout([Drafted(1, 1, (8,)), Drafted(7, 1, ()), Drafted(4, 1, (5, 6))]))
    assert found is not None
    assert found.tolist() == probs[lines].tolist()


def test_point_masses_and_what_was_dropped_have_no_probabilities() -> None:
    drafts = ProposedDrafts()
    assert drafts.probs(layout([])) is None
    drafts.hold(proposals())
    assert drafts.probs(layout([Drafted(1, 1, (8,))])) is None
    drafts.hold(proposals(probs=torch.zeros(5, 1)))
    drafts.drop()
    assert drafts.probs(layout([Drafted(1, 1, (8,))])) is None


def test_drafts_report_their_time_and_passes() -> None:
    proposed = proposals(passes=2, catchup_tokens=3)
    found = drafts_of(DraftPlan(step=7, width=4, requests=()), proposed, 10.0, 10.5)
    assert (found.step, found.passes, found.catchup_tokens) == (7, 2, 3)
    assert found.table is proposed.table
    assert (found.began_s, found.run_s) == (10.0, 0.5)
