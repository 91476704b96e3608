"""Text and model in one engine: which of them answers a plan, and the probabilities that drafts from text get."""

import pytest
import torch

from faser.engine.contract.plan import DraftPlan, DraftRequest
from faser.engine.execution.drafting.drafter import Proposals, ProposedDrafts
from faser.engine.execution.drafting.text import TextAndModel
from tests.engine.execution.draft_lines import DraftLine, committed, lines_of, table_with
from tests.engine.execution.known_drafter import KnownDrafter, start_of
from tests.engine.execution.sampling.sampled import Drafted, layout

PROBS = torch.tensor([[0.25, 0.5, 0.25, 0.0], [0.0, 0.0, 0.5, 0.5]], dtype=torch.float64)


def both() -> tuple[TextAndModel, KnownDrafter]:
    quality: dict[int, float | None] = dict.fromkeys(range(3), 1.0)
    model = KnownDrafter("draft_model", quality)
    drafter = TextAndModel([KnownDrafter("suffix", quality), KnownDrafter("ngram", quality)], model)
    for slot in range(3):
        drafter.start(start_of(slot))
    return drafter, model


def plan(slots: tuple[int, ...], *, from_text: bool) -> DraftPlan:
    requests = tuple(DraftRequest(slot=slot, max_tokens=2, new_blocks=()) for slot in slots)
    return DraftPlan(step=1, width=16, requests=requests, from_text=from_text)


def test_a_plan_from_text_is_answered_by_one_method_after_the_other() -> None:
    drafter, model = both()
    drafts = lines_of(drafter.propose(plan((2, 0), from_text=True)).table)
    assert [(each.method, each.slot) for each in drafts] == [
        ("suffix", 2),
        ("suffix", 0),
        ("ngram", 2),
        ("ngram", 0),
    ]
    assert not model.plans


def test_any_other_plan_is_the_models() -> None:
    drafter, _ = both()
    assert [each.method for each in lines_of(drafter.propose(plan((1,), from_text=False)).table)] == [
        "draft_model"
    ]


def test_a_plan_without_requests_does_not_reach_the_model() -> None:
    """KnownDrafter refuses it."""
    drafter, _ = both()
    assert lines_of(drafter.propose(plan((), from_text=False)).table) == []


def test_each_drafter_gets_every_call() -> None:
    parts = [KnownDrafter(method, {}) for method in ("suffix", "ngram", "draft_model")]
    drafter = TextAndModel(parts[:2], parts[2])
    drafter.start(start_of(0))
    before = [each.to_come[0] for each in parts]
    drafter.commit(*committed({0: (5, 6)}))
    assert [each.to_come[0] for each in parts] == [num_known + 2 for num_known in before]
    drafter.release(0)
    assert not any(each.to_come for each in parts)


def held(*, probs: torch.Tensor | None, num_decided: int = 0) -> ProposedDrafts:
    """Two tokens for slot 4, by the model."""
    drafts = ProposedDrafts()
    table = table_with([DraftLine(slot=4, method="draft_model", token_ids=(1, 2))], 4)
    drafts.hold(Proposals(table=table, probs=probs), num_decided=num_decided)
    return drafts


def test_verified_drafts_from_text_get_rows_with_all_mass_on_their_tokens() -> None:
    step = [Drafted(7, 1, (3, 0)), Drafted(4, 1, (1,)), Drafted(5, 1)]
    found = held(probs=PROBS).probs(layout(step))
    assert found is not None
    assert found.tolist() == [[0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0], PROBS[0].tolist()]


def test_a_token_known_by_now_is_skipped_in_drafts_of_the_model_alone() -> None:
    found = held(probs=PROBS, num_decided=1).probs(layout([Drafted(7, 1, (3,)), Drafted(4, 1, (2,))]))
    assert found is not None
    assert found.tolist() == [[0.0, 0.0, 0.0, 1.0], PROBS[1].tolist()]


@pytest.mark.parametrize("draft", [(), (3,)])
def test_without_probabilities_nothing_is_added(draft: tuple[int, ...]) -> None:
    assert held(probs=None).probs(layout([Drafted(7, 1, draft)])) is None


def test_drafting_overlaps_steps_if_all_drafters_can() -> None:
    for text, model in [(True, True), (True, False), (False, True)]:
        drafter = TextAndModel(
            [KnownDrafter("suffix", {}, drafts_overlapped=text)],
            KnownDrafter("draft_model", {}, drafts_overlapped=model),
        )
        assert drafter.drafts_overlapped == (text and model)
