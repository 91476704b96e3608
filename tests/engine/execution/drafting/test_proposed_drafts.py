"""Every drafted row finds its own line among the proposed tokens. Oracle: a loop."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.contract.plan import DraftPlan, SequenceStart
from faser.engine.execution.drafting.drafter import Proposals, ProposedDrafts, drafts_of, proposal_lines
from faser.engine.execution.sampling.rejection import Block, Rejection
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import Verifier
from faser.types.sampling import SamplingParams
from tests.engine.execution.draft_lines import DraftLine, table_with
from tests.engine.execution.sampling.sampled import Drafted, layout, outcomes

UNLIKELY = 31.8  # chi-square of 8 degrees of freedom: one of 10,000 is larger

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


def test_a_draft_that_the_model_did_not_make_has_all_mass_on_its_tokens() -> None:
    probs = torch.rand(5, 10, dtype=torch.float64)
    drafts = ProposedDrafts()
    drafts.hold(proposals(probs=probs))
    found = drafts.probs(layout([Drafted(1, 1, (8,)), Drafted(7, 1, (2, 9)), Drafted(4, 1, (5,))]))
    assert found is not None
    assert found[[0, 3]].tolist() == probs[[3, 0]].tolist()
    assert found[[1, 2]].tolist() == torch.nn.functional.one_hot(torch.tensor([2, 9]), 10).tolist()


@pytest.mark.parametrize("make", [Rejection, Block])
def test_drafts_from_text_beside_drawn_ones_leave_the_distribution(make: Callable[[Sampler], Verifier]) -> None:
    """Two thousand sequences of each kind in one step; what a step leaves undecided the target draws afterwards.

    Oracle: the product of the target's probabilities of two tokens in a row, by chi-square.
    """
    num, vocab, rng = 4000, 3, np.random.default_rng(4)
    target = torch.tensor([[[0.5, 0.3, 0.2]] * 3, [[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]]])
    of_draft = np.array([[[0.2, 0.5, 0.3]] * 3, [[0.3, 0.3, 0.4], [0.5, 0.4, 0.1], [0.3, 0.3, 0.4]]])
    text, wide = (0, 2), target.double().numpy()
    sampler = Sampler(num, vocab, ())
    rows, lines, logits, probs = [], [], [], []
    for slot in range(num):
        start = SequenceStart(slot=slot, sampling=SamplingParams(), seed=slot, prompt_len=1, token_ids=(0,))
        sampler.start(start)
        drafted = text
        if slot % 2:
            first = int(rng.choice(vocab, p=of_draft[0, 0]))
            drafted = first, int(rng.choice(vocab, p=of_draft[1, first]))
            probs += [of_draft[0, 0], of_draft[1, first]]
            lines.append(DraftLine(slot=slot, method="draft_model", token_ids=drafted))
        rows.append(Drafted(slot, 1, drafted))
        logits += [target[0, 0], target[1, drafted[0]], torch.ones(vocab)]
    drafts = ProposedDrafts()
    drafts.hold(Proposals(table=table_with(lines, 4), probs=torch.from_numpy(np.array(probs))))
    step = layout(rows)
    found = outcomes(make(sampler).verify(torch.stack(logits).log(), step, drafts.probs(step)))
    for kind in (0, 1):
        counts = np.zeros((vocab, vocab))
        for each in found[kind::2]:
            first, *more = each.token_ids
            second = more[0] if more else rng.choice(vocab, p=wide[1, first] / wide[1, first].sum())
            counts[first, second] += 1
        wanted = wide[0, 0][:, None] * wide[1] * num / 2
        assert ((counts - wanted) ** 2 / wanted).sum() < UNLIKELY
    assert max(len(each.token_ids) for each in found) == 3
