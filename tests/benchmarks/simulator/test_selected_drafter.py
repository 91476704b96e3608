"""The control plane's choice between drafters, driven without an engine. Oracle: drafters of known quality, and a
target whose text is known.

Planted bugs that these tests have caught: the draft with the likeliest first token is chosen; the drafts of two
methods are mixed up; a method that is not chosen, or a draft that the model replaces, teaches nothing; the model's
drafts in the wrong order.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulator.selected_drafter import SelectedDrafter
from faser.engine.contract.plan import DraftPlan, DraftRequest, StopRule
from faser.engine.execution.drafting.drafter import Drafter
from faser.engine.execution.drafting.text import TextAndModel
from tests.engine.execution.draft_lines import committed, lines_of
from tests.engine.execution.drafting.oracle.ngram import NgramDrafter
from tests.engine.execution.drafting.oracle.suffix import SuffixDrafter
from tests.engine.execution.known_drafter import KnownDrafter, next_token, start_of

CAP, MODEL_CAP = 8, 5
NUM_SLOTS = 8
STOP = StopRule(row_price=0.1, pass_prices=(0.5, 1.0, 1.5, 2.0), intercept=0.0, slope=1.0)


def plan_for(slots: Sequence[int], max_tokens: int = CAP, *, stop: StopRule | None = None) -> DraftPlan:
    requests = tuple(DraftRequest(slot=slot, max_tokens=max_tokens, new_blocks=()) for slot in slots)
    return DraftPlan(step=0, width=CAP, requests=requests, stop=stop)


def selected(
    text: Sequence[Drafter], model: Drafter | None = None, *, model_cap: int = MODEL_CAP
) -> SelectedDrafter:
    """text: drafters of text methods, in order."""
    drafter = TextAndModel(text, model)
    return SelectedDrafter(drafter, num_slots=NUM_SLOTS, cap=CAP, model_cap=0 if model is None else model_cap)


class Sequences:
    """Runs steps over slots 0 … as an engine would, and returns which method drafted."""

    def __init__(self, drafter: SelectedDrafter, num_slots: int = 1) -> None:
        self.drafter = drafter
        self.known = [0] * num_slots
        for slot in range(num_slots):
            drafter.start(start_of(slot))

    def step(self, *, kept: int = CAP) -> tuple[str, ...]:
        """Methods by slot, "none" for an empty draft. kept: the most drafted tokens that are verified."""
        drafts = lines_of(self.drafter.propose(plan_for(range(len(self.known)))).table)
        self.drafter.commit(
            *committed({draft.slot: self._verify(draft.slot, draft.token_ids[:kept]) for draft in drafts})
        )
        return tuple(draft.method if draft.token_ids else "none" for draft in drafts)

    def _verify(self, slot: int, drafted: tuple[int, ...]) -> tuple[int, ...]:
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == next_token(self.known[slot] + accepted):
            accepted += 1
        first = self.known[slot]
        self.known[slot] += accepted + 1
        return tuple(next_token(position) for position in range(first, self.known[slot]))


def one_sequence(text: float | None, model: float | None) -> tuple[Sequences, KnownDrafter, KnownDrafter]:
    suffix = KnownDrafter("suffix", {0: text})
    model_drafter = KnownDrafter("draft_model", {0: model})
    return Sequences(selected([suffix], model_drafter)), suffix, model_drafter


def share(sequences: Sequences, methods: tuple[str, ...], num_steps: int, *, kept: int = CAP) -> float:
    """Of these steps, those in which these methods drafted."""
    return sum(sequences.step(kept=kept) == methods for _ in range(num_steps)) / num_steps


def test_the_better_text_method_drafts_by_slot() -> None:
    suffix, ngram = KnownDrafter("suffix", {0: 0.9, 1: 0.1}), KnownDrafter("ngram", {0: 0.1, 1: 0.9})
    sequences = Sequences(selected([suffix, ngram]), num_slots=2)
    share(sequences, ("suffix", "ngram"), 20)
    assert share(sequences, ("suffix", "ngram"), 50) > 0.9


@pytest.mark.parametrize("kept", [1, CAP])
def test_a_method_that_is_not_chosen_is_learned_from_what_was_sampled(kept: int) -> None:
    """The chosen method is as good as ever; the other one has become better."""
    suffix, ngram = KnownDrafter("suffix", {0: 0.5}), KnownDrafter("ngram", {0: 0.05})
    sequences = Sequences(selected([suffix, ngram]))
    assert share(sequences, ("suffix",), 60, kept=kept) > 0.9
    ngram.quality[0] = 1.0
    share(sequences, ("ngram",), 40, kept=kept)
    assert share(sequences, ("ngram",), 20, kept=kept) > 0.9


def test_the_second_text_drafter_drafts_where_the_first_has_nothing() -> None:
    drafter = selected([KnownDrafter("suffix", {0: None}), KnownDrafter("ngram", {0: 1.0})])
    assert Sequences(drafter).step() == ("ngram",)


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=6), st.booleans()), max_size=25))
def test_over_real_text_drafters_each_draft_is_one_of_theirs(steps: list[tuple[int, list[int], bool]]) -> None:
    """Random starts, commits and releases; oracle: the same drafters on their own, after the same calls."""
    alone: list[Drafter] = [SuffixDrafter(cap=CAP), NgramDrafter(min_n=2, max_n=4, cap=CAP)]
    combined = selected([SuffixDrafter(cap=CAP), NgramDrafter(min_n=2, max_n=4, cap=CAP)])
    drafters: list[Drafter] = [combined, *alone]
    running: set[int] = set()
    for slot, token_ids, ends in steps:
        for drafter in drafters:
            if slot not in running:
                drafter.start(start_of(slot, tuple(token_ids)))
            elif ends:
                drafter.release(slot)
            else:
                drafter.commit(*committed({slot: tuple(token_ids)}))
        running = running - {slot} if slot in running and ends else running | {slot}
        if not running:
            continue
        plan = plan_for(sorted(running))
        offered = zip(*(lines_of(each.propose(plan).table) for each in alone), strict=True)
        for draft, drafts in zip(lines_of(combined.propose(plan).table), offered, strict=True):
            assert draft in drafts
            assert draft.token_ids or not any(each.token_ids for each in drafts)


@pytest.mark.parametrize(
    ("text", "model", "better"),
    [(0.9, 0.3, "suffix"), (0.2, 0.8, "draft_model"), (0.8, 0.8, "suffix"), (None, 0.6, "draft_model")],
)
@pytest.mark.parametrize("kept", [2, CAP])
def test_the_better_drafter_drafts_after_twenty_steps(
    text: float | None, model: float, better: str, kept: int
) -> None:
    """As good, text has the longer draft. A draft cut before verification does not count as refused."""
    sequences, _, _ = one_sequence(text, model)
    share(sequences, (better,), 20, kept=kept)
    assert share(sequences, (better,), 80, kept=kept) > 0.85


@pytest.mark.parametrize(("first", "then"), [(0.95, 0.05), (0.05, 0.95)])
def test_when_text_changes_its_quality_the_choice_follows(first: float, then: float) -> None:
    """A text drafter is learned of even while the model drafts."""
    sequences, suffix, _ = one_sequence(first, 0.7)
    share(sequences, ("suffix",), 60)
    suffix.quality[0] = then
    share(sequences, ("suffix",), 30)
    assert share(sequences, ("suffix" if then > first else "draft_model",), 40) > 0.9


def test_sequences_of_one_batch_choose_for_themselves() -> None:
    suffix = KnownDrafter("suffix", {0: 0.95, 1: 0.05})
    model = KnownDrafter("draft_model", {0: 0.6, 1: 0.6})
    sequences = Sequences(selected([suffix], model), num_slots=2)
    share(sequences, ("suffix", "draft_model"), 30)
    assert share(sequences, ("suffix", "draft_model"), 50) > 0.9


def test_the_model_drafts_only_for_the_requests_left_to_it_and_order_is_kept() -> None:
    suffix = KnownDrafter("suffix", {0: 1.0, 1: None, 2: 1.0, 3: None})
    model = KnownDrafter("draft_model", dict.fromkeys(range(4), 1.0))
    drafter = selected([suffix], model)
    for slot in range(4):
        drafter.start(start_of(slot))

    proposals = drafter.propose(plan_for([3, 2, 1, 0], stop=STOP))

    (asked,) = model.plans
    assert [(request.slot, request.max_tokens) for request in asked.requests] == [(3, MODEL_CAP), (1, MODEL_CAP)]
    assert asked.stop == STOP
    assert [(each.slot, each.method) for each in lines_of(proposals.table)] == [
        (3, "draft_model"),
        (2, "suffix"),
        (1, "draft_model"),
        (0, "suffix"),
    ]
    assert (proposals.passes, proposals.catchup_tokens, proposals.probs) == (3, 7, None)

    drafter.propose(plan_for([0, 2]))
    assert len(model.plans) == 1


def test_the_model_gets_the_condition_that_ends_its_passes() -> None:
    model = KnownDrafter("draft_model", {0: 0.9})
    drafter = selected([KnownDrafter("suffix", {0: None})], model)
    drafter.start(start_of(0))

    def until() -> bool:
        return True

    drafter.propose(plan_for([0]), until)

    assert model.untils == [until]


def test_all_drafters_follow_every_sequence() -> None:
    text, model = KnownDrafter("suffix", {0: 1.0}), KnownDrafter("draft_model", {0: 1.0})
    drafter = selected([text], model)
    drafter.start(start_of(4, (1, 2)))
    drafter.commit(*committed({4: (5,)}))
    assert text.to_come == model.to_come == {4: 3}

    drafter.release(4)
    assert text.to_come == model.to_come == {}


def test_among_sampled_drafts_a_token_from_text_is_certain() -> None:
    """The model's rows keep their values and their places."""
    suffix = KnownDrafter("suffix", {0: None, 1: 1.0, 2: None})
    model = KnownDrafter("draft_model", dict.fromkeys(range(3), 1.0), sampled=True)
    drafter = selected([suffix], model, model_cap=2)
    for slot in range(3):
        drafter.start(start_of(slot, (1,) * slot))

    proposals = drafter.propose(plan_for([0, 1, 2], max_tokens=2))

    assert [draft.method for draft in lines_of(proposals.table)] == ["draft_model", "suffix", "draft_model"]
    assert proposals.probs is not None
    assert proposals.probs.dtype == torch.float64
    expected = torch.zeros(6, 100, dtype=torch.float64)
    tokens = [token for draft in lines_of(proposals.table) for token in draft.token_ids]
    for row, token in enumerate(tokens):
        expected[row, token] = 1.0 if row in (2, 3) else 1 / (token + 2)
        if row not in (2, 3):
            expected[row, 0] = 1 - 1 / (token + 2)
    torch.testing.assert_close(proposals.probs, expected)


@pytest.mark.parametrize(("text", "sampled"), [(1.0, True), (None, False)])
def test_there_are_no_probabilities_where_every_draft_is_a_point_mass(text: float | None, sampled: bool) -> None:
    model = KnownDrafter("draft_model", {0: 1.0}, sampled=sampled)
    drafter = selected([KnownDrafter("suffix", {0: text})], model, model_cap=2)
    drafter.start(start_of(0))

    proposals = drafter.propose(plan_for([0]))

    assert [draft.method for draft in lines_of(proposals.table)] == ["suffix" if text else "draft_model"]
    assert proposals.probs is None
