"""Text and model in one engine: which of them answers a plan, and the lines that drafts from text get."""

import pytest
import torch
from torch import Tensor

from faser.engine.contract.plan import PLACEHOLDER, Draft, DraftPlan, DraftRequest, SequenceRows
from faser.engine.execution.drafters.drafter import NO_TOP, Proposals
from faser.engine.execution.text_lookup.lookup import CombinedLookup
from faser.engine.execution.text_lookup.text_and_model import TextAndModel, with_text_drafts
from tests.engine.execution.known_drafter import KnownDrafter, start_of

PROBS = torch.tensor([[0.25, 0.5, 0.25, 0.0], [0.0, 0.0, 0.5, 0.5]], dtype=torch.float64)


def both() -> tuple[TextAndModel, KnownDrafter]:
    quality: dict[int, float | None] = dict.fromkeys(range(3), 1.0)
    model = KnownDrafter("draft_model", quality)
    text = CombinedLookup([KnownDrafter("suffix", quality), KnownDrafter("ngram", quality)])
    drafter = TextAndModel(text, model)
    for slot in range(3):
        drafter.start(start_of(slot))
    return drafter, model


def plan(slots: tuple[int, ...], *, from_text: bool) -> DraftPlan:
    requests = tuple(DraftRequest(slot=slot, max_tokens=2, new_blocks=()) for slot in slots)
    return DraftPlan(step=1, requests=requests, from_text=from_text)


def rows(slot: int, *token_ids: int, drafted: int) -> SequenceRows:
    return SequenceRows(slot=slot, start=0, token_ids=token_ids, new_blocks=(), samples=True, num_drafts=drafted)


def test_a_plan_from_text_is_answered_by_one_method_after_the_other() -> None:
    drafter, model = both()
    drafts = drafter.propose(plan((2, 0), from_text=True)).drafts
    assert [(each.method, each.slot) for each in drafts] == [
        ("suffix", 2),
        ("suffix", 0),
        ("ngram", 2),
        ("ngram", 0),
    ]
    assert not model.plans


def test_any_other_plan_is_the_models() -> None:
    drafter, _ = both()
    assert [each.method for each in drafter.propose(plan((1,), from_text=False)).drafts] == ["draft_model"]


def test_a_plan_without_requests_does_not_reach_the_model() -> None:
    """KnownDrafter refuses it."""
    drafter, _ = both()
    assert drafter.propose(plan((), from_text=False)).drafts == ()


def lines(top: int) -> Tensor:
    return torch.arange(2 * top).reshape(2, top)


def test_verified_drafts_from_text_get_rows_with_all_mass_on_their_tokens() -> None:
    model = Draft(slot=4, method="draft_model", token_ids=(1, 2))
    proposals = Proposals(drafts=(model,), probs=PROBS, top_ids=lines(3))
    step = [rows(7, 9, 3, 0, drafted=2), rows(4, 9, 1, drafted=1), rows(5, 1, drafted=0)]

    found = with_text_drafts(proposals, step, num_decided=0)

    assert [(each.slot, each.token_ids) for each in found.drafts] == [(4, (1, 2)), (7, (3, 0))]
    assert found.probs is not None
    assert found.top_ids is not None
    certain = torch.tensor([[0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(found.probs, torch.cat((PROBS, certain)))
    assert torch.equal(found.top_ids, torch.cat((lines(3), torch.full((2, 3), NO_TOP))))


def test_a_token_known_by_now_keeps_its_place_before_the_draft() -> None:
    proposals = Proposals(drafts=(Draft(slot=4, method="draft_model", token_ids=(1, 2)),), top_ids=lines(2))
    found = with_text_drafts(proposals, [rows(7, 9, 3, drafted=1)], num_decided=1)
    assert found.drafts[1].token_ids == (PLACEHOLDER, 3)
    assert found.top_ids is not None
    assert found.top_ids.tolist() == [[0, 1], [2, 3], [NO_TOP] * 2, [NO_TOP] * 2]


@pytest.mark.parametrize("drafted", [0, 1])
def test_without_lines_nothing_is_added(drafted: int) -> None:
    proposals = Proposals(drafts=())
    assert with_text_drafts(proposals, [rows(7, 9, 3, drafted=drafted)], num_decided=0) is proposals


def test_drafting_overlaps_steps_if_all_drafters_can() -> None:
    for text, model in [(True, True), (True, False), (False, True)]:
        drafter = TextAndModel(
            CombinedLookup([KnownDrafter("suffix", {}, drafts_overlapped=text)]),
            KnownDrafter("draft_model", {}, drafts_overlapped=model),
        )
        assert drafter.drafts_overlapped == (text and model)
