"""Selecting the drafter of each sequence. Oracle: drafters of known quality, and a target whose text is known.

Planted bugs that these tests have caught: the draft with the likeliest first token is chosen; the drafts of two
methods are mixed up; a method that is not chosen, or a draft that the model replaces, teaches nothing; the model's
drafts in the wrong order; no plan for the model while a step runs, where all drafts are from text; blocks and
releases are sent twice; the time of the look-up is lost.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.speculation.selected_drafter import SelectedDrafter
from faser.config.speculation import DRAFT_METHODS
from faser.engine.contract.drafts import Drafts
from faser.engine.contract.plan import Draft, DraftPlan, DraftRequest, SequenceStart, StopRule
from faser.engine.control.speculation.acceptance import Acceptance
from faser.engine.control.speculation.control import DrafterSelection
from faser.engine.execution.drafting.drafter import Continuation, Drafter, Proposals
from faser.engine.execution.drafting.text import TextAndModel
from faser.types import SamplingParams
from tests.engine.execution.drafting.oracle.ngram import NgramDrafter
from tests.engine.execution.drafting.oracle.suffix import SuffixDrafter

CAP, MODEL_CAP = 8, 5
NUM_SLOTS = 8
STOP = StopRule(row_price=0.1, pass_prices=(0.5, 1.0, 1.5, 2.0), intercept=0.0, slope=1.0)


def start_of(slot: int, token_ids: tuple[int, ...] = ()) -> SequenceStart:
    return SequenceStart(
        slot=slot, sampling=SamplingParams(), seed=0, prompt_len=len(token_ids), token_ids=token_ids
    )


def plan_for(
    slots: Sequence[int],
    max_tokens: int = CAP,
    *,
    released: tuple[int, ...] = (),
    new_blocks: tuple[int, ...] = (),
    stop: StopRule | None = None,
    share: float | None = None,
) -> DraftPlan:
    requests = tuple(DraftRequest(slot=slot, max_tokens=max_tokens, new_blocks=new_blocks) for slot in slots)
    return DraftPlan(step=0, released=released, requests=requests, stop=stop, share=share)


@dataclass
class KnownDrafter:
    """Knows the coming text of each slot and drafts each token of it correctly with the slot's quality.

    A quality of None: nothing to propose. Wrong tokens are negative. sampled: as if drawn from a distribution.
    """

    method: str
    quality: dict[int, float | None]
    confidence: float = 1.0
    sampled: bool = False
    drafts_overlapped: bool = True
    to_come: dict[int, int] = field(default_factory=dict)
    plans: list[DraftPlan] = field(default_factory=list)
    untils: list[Callable[[], bool] | None] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def start(self, start: SequenceStart) -> None:
        assert start.slot not in self.to_come
        self.to_come[start.slot] = len(start.token_ids)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        assert plan.requests
        self.plans.append(plan)
        self.untils.append(until)
        drafts = tuple(self._draft(request) for request in plan.requests)
        probs = self._probs([token for draft in drafts for token in draft.token_ids]) if self.sampled else None
        return Proposals(drafts=drafts, passes=3, catchup_tokens=7, probs=probs)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for each in continuations:
            self.to_come[each.slot] += len(each.token_ids)

    def release(self, slot: int) -> None:
        del self.to_come[slot]

    def _draft(self, request: DraftRequest) -> Draft:
        quality = self.quality[request.slot]
        if quality is None:
            return Draft(slot=request.slot, method=self.method)
        first = self.to_come[request.slot]
        token_ids = tuple(
            next_token(first + offset) if self.rng.random() < quality else -1
            for offset in range(request.max_tokens)
        )
        confidences = (self.confidence,) * request.max_tokens
        return Draft(slot=request.slot, method=self.method, token_ids=token_ids, confidences=confidences)

    @staticmethod
    def _probs(token_ids: list[int]) -> Tensor:
        """Distinct rows: token t has probability 1 / (t + 2), token 0 has the rest."""
        probs = torch.zeros(len(token_ids), 100, dtype=torch.float64)
        for row, token_id in enumerate(token_ids):
            probs[row, token_id] += 1 / (token_id + 2)
            probs[row, 0] += 1 - 1 / (token_id + 2)
        return probs


def next_token(position: int) -> int:
    """The text of every sequence: a token does not determine the next one."""
    return position * 37 % 89 + 1


def selected(
    text: Sequence[Drafter], model: Drafter | None = None, *, model_cap: int = MODEL_CAP
) -> SelectedDrafter:
    """text: drafters of text methods, in order."""
    drafter = TextAndModel(text, model)
    return SelectedDrafter(drafter, num_slots=NUM_SLOTS, cap=CAP, model_cap=0 if model is None else model_cap)


class World:
    """Runs steps over slots 0 … as an engine would, and returns which method drafted."""

    def __init__(self, drafter: SelectedDrafter, num_slots: int = 1) -> None:
        self.drafter = drafter
        self.known = [0] * num_slots
        for slot in range(num_slots):
            drafter.start(start_of(slot))

    def step(self, *, kept: int = CAP) -> tuple[str, ...]:
        """Methods by slot, "none" for an empty draft. kept: the most drafted tokens that are verified."""
        drafts = self.drafter.propose(plan_for(range(len(self.known)))).drafts
        self.drafter.commit([self._judge(draft.slot, draft.token_ids[:kept]) for draft in drafts])
        return tuple(draft.method if draft.token_ids else "none" for draft in drafts)

    def _judge(self, slot: int, drafted: tuple[int, ...]) -> Continuation:
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == next_token(self.known[slot] + accepted):
            accepted += 1
        first = self.known[slot]
        self.known[slot] += accepted + 1
        token_ids = tuple(next_token(position) for position in range(first, self.known[slot]))
        return Continuation(slot=slot, token_ids=token_ids, num_accepted=accepted)


def a_world(text: float | None, model: float | None) -> tuple[World, KnownDrafter, KnownDrafter]:
    suffix = KnownDrafter("suffix", {0: text})
    model_drafter = KnownDrafter("draft_model", {0: model})
    return World(selected([suffix], model_drafter)), suffix, model_drafter


def share(world: World, methods: tuple[str, ...], num_steps: int, *, kept: int = CAP) -> float:
    """Of these steps, those in which these methods drafted."""
    return sum(world.step(kept=kept) == methods for _ in range(num_steps)) / num_steps


def a_draft(slot: int, method: str, confidences: Sequence[float] = ()) -> Draft:
    return Draft(
        slot=slot, method=method, token_ids=tuple(range(len(confidences))), confidences=tuple(confidences)
    )


def the_drafts(*drafts: Draft, run_s: float = 0.0, passes: int = 0, catchup_tokens: int = 0) -> Drafts:
    return Drafts(step=0, drafts=drafts, run_s=run_s, passes=passes, catchup_tokens=catchup_tokens)


def lengths(*of_each: int) -> np.typing.NDArray[np.int64]:
    return np.array(of_each, dtype=np.int64)


CONFIDENCES = st.lists(st.floats(0.05, 0.95), max_size=CAP)


@given(st.lists(st.tuples(CONFIDENCES, CONFIDENCES), min_size=1, max_size=NUM_SLOTS))
def test_of_each_sequence_the_draft_with_the_most_expected_tokens_is_chosen(
    offered: list[tuple[list[float], list[float]]],
) -> None:
    """Oracle: every draft on its own. Requests come in falling order of slots; the first of equals is taken."""
    acceptance = Acceptance(NUM_SLOTS, CAP)
    selection = DrafterSelection(acceptance, has_model=False)
    slots = range(len(offered) - 1, -1, -1)
    suffix = [a_draft(slot, "suffix", offered[slot][0]) for slot in slots]
    ngram = [a_draft(slot, "ngram", [9 * each for each in offered[slot][1]]) for slot in slots]

    def value(draft: Draft) -> float:
        confidences = np.zeros((1, CAP))
        confidences[0, : len(draft.confidences)] = draft.confidences
        return float(
            acceptance.drafted_survival(
                lengths(draft.slot),
                lengths(DRAFT_METHODS.index(draft.method)),
                lengths(len(draft.token_ids)),
                confidences,
            ).sum()
        )

    selection.first_round(plan_for(slots))
    found = selection.choose_text(the_drafts(*suffix, *ngram))

    assert [each.slot for each in found.drafts] == [*slots]
    for draft, first, second in zip(found.drafts, suffix, ngram, strict=True):
        assert draft is first or draft is second
        assert value(draft) >= max(value(first), value(second)) - 1e-9
    assert found.lengths.tolist() == [len(draft.token_ids) for draft in found.drafts]
    assert found.survival.sum(axis=1).tolist() == pytest.approx([value(draft) for draft in found.drafts])


def test_the_better_text_method_drafts_by_slot() -> None:
    suffix, ngram = KnownDrafter("suffix", {0: 0.9, 1: 0.1}), KnownDrafter("ngram", {0: 0.1, 1: 0.9})
    world = World(selected([suffix, ngram]), num_slots=2)
    share(world, ("suffix", "ngram"), 20)
    assert share(world, ("suffix", "ngram"), 50) > 0.9


@pytest.mark.parametrize("kept", [1, CAP])
def test_a_method_that_is_not_chosen_is_learned_from_what_came(kept: int) -> None:
    """The chosen method is as good as ever; the other one has become better."""
    suffix, ngram = KnownDrafter("suffix", {0: 0.5}), KnownDrafter("ngram", {0: 0.05})
    world = World(selected([suffix, ngram]))
    assert share(world, ("suffix",), 60, kept=kept) > 0.9
    ngram.quality[0] = 1.0
    share(world, ("ngram",), 40, kept=kept)
    assert share(world, ("ngram",), 20, kept=kept) > 0.9


def test_the_first_of_equal_text_drafters_drafts() -> None:
    selection = DrafterSelection(Acceptance(1, CAP), has_model=False)
    selection.first_round(plan_for([0]))
    drafts = [a_draft(0, "suffix", [0.5]), a_draft(0, "suffix", [0.5])]
    assert selection.choose_text(the_drafts(*drafts)).drafts[0] is drafts[0]


def test_the_second_text_drafter_drafts_where_the_first_has_nothing() -> None:
    drafter = selected([KnownDrafter("suffix", {0: None}), KnownDrafter("ngram", {0: 1.0})])
    assert World(drafter).step() == ("ngram",)


def test_without_any_draft_the_first_method_has_empty_ones_and_nothing_is_left_to_learn() -> None:
    selection = DrafterSelection(Acceptance(4, CAP), has_model=True)
    selection.first_round(plan_for([3, 1]))
    nothing = [a_draft(slot, method) for method in ("suffix", "ngram") for slot in (3, 1)]

    found = selection.choose_text(the_drafts(*nothing))

    assert found.drafts == tuple(nothing[:2])
    assert found.survival.tolist() == [[1.0] + [0.0] * CAP] * 2
    assert found.not_taken(lengths(0, 5)) is None
    assert not found.lengths.any()


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
    selection = DrafterSelection(Acceptance(3, CAP), has_model=True)
    selection.first_round(plan_for([0, 1, 2]))
    suffix = a_draft(0, "suffix"), a_draft(1, "suffix", [0.9]), a_draft(2, "suffix")
    ngram = a_draft(0, "ngram"), a_draft(1, "ngram", [1.0]), a_draft(2, "ngram", [5.0, 5.0])

    found = selection.choose_text(the_drafts(*suffix, *ngram)).not_taken(lengths(*by_model))

    assert found is not None
    methods = [DRAFT_METHODS[method] for method in found.methods.tolist()]
    assert set(zip(found.slots.tolist(), methods, strict=True)) == others
    assert len(methods) == len(others)


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
                drafter.commit([Continuation(slot=slot, token_ids=tuple(token_ids))])
        running = running - {slot} if slot in running and ends else running | {slot}
        if not running:
            continue
        plan = plan_for(sorted(running))
        offered = zip(*(each.propose(plan).drafts for each in alone), strict=True)
        for draft, drafts in zip(combined.propose(plan).drafts, offered, strict=True):
            assert draft in drafts
            assert draft.token_ids or not any(each.token_ids for each in drafts)


def test_the_plan_for_the_model_has_the_requests_that_are_left_to_it() -> None:
    """Blocks and releases went out with the first plan."""
    selection = DrafterSelection(Acceptance(4, CAP), has_model=True)
    plan = plan_for([3, 2, 1, 0], released=(7,), new_blocks=(4,), stop=None)
    sent = selection.first_round(plan)
    assert (sent.from_text, sent.requests, sent.released) == (True, plan.requests, (7,))
    assert not selection.waits_for_model
    text = [a_draft(slot, "suffix", [0.9]) for slot in (3, 2, 1, 0)]
    found = selection.choose_text(the_drafts(*text, run_s=0.25))

    asked = selection.leave_to_model(found, lengths(2, 0, MODEL_CAP, 0), STOP)

    assert asked is not None
    assert selection.waits_for_model
    assert asked == DraftPlan(
        step=0,
        requests=(
            DraftRequest(slot=3, max_tokens=2, new_blocks=()),
            DraftRequest(slot=1, max_tokens=MODEL_CAP, new_blocks=()),
        ),
        stop=STOP,
    )
    modelled = a_draft(3, "draft_model", [1.0]), a_draft(1, "draft_model")
    complete = selection.complete(the_drafts(*modelled, run_s=0.5, passes=2, catchup_tokens=9))
    assert complete == the_drafts(
        modelled[0], text[1], modelled[1], text[3], run_s=0.75, passes=2, catchup_tokens=9
    )
    assert not selection.waits_for_model


@pytest.mark.parametrize("during", [None, 0.5])
def test_while_a_step_runs_the_models_plan_follows_even_without_requests(during: float | None) -> None:
    selection = DrafterSelection(Acceptance(2, CAP), has_model=True)
    selection.first_round(plan_for([1, 0], share=during))
    text = a_draft(1, "suffix", [0.9]), a_draft(0, "suffix")
    found = selection.choose_text(the_drafts(*text))

    asked = selection.leave_to_model(found, lengths(0, 0), None)

    if during is None:
        assert asked is None
        assert not selection.waits_for_model
    else:
        assert asked == DraftPlan(step=0, requests=(), share=during)
        assert selection.complete(the_drafts()).drafts == text


@pytest.mark.parametrize(
    ("text", "model", "better"),
    [(0.9, 0.3, "suffix"), (0.2, 0.8, "draft_model"), (0.8, 0.8, "suffix"), (None, 0.6, "draft_model")],
)
@pytest.mark.parametrize("kept", [2, CAP])
def test_the_better_drafter_drafts_after_twenty_steps(
    text: float | None, model: float, better: str, kept: int
) -> None:
    """As good, text has the longer draft. A draft cut before verification does not count as refused."""
    world, _, _ = a_world(text, model)
    share(world, (better,), 20, kept=kept)
    assert share(world, (better,), 80, kept=kept) > 0.85


@pytest.mark.parametrize(("first", "then"), [(0.95, 0.05), (0.05, 0.95)])
def test_when_text_changes_its_quality_the_choice_follows(first: float, then: float) -> None:
    """A text drafter is judged even while the model drafts."""
    world, suffix, _ = a_world(first, 0.7)
    share(world, ("suffix",), 60)
    suffix.quality[0] = then
    share(world, ("suffix",), 30)
    assert share(world, ("suffix" if then > first else "draft_model",), 40) > 0.9


def test_sequences_of_one_batch_choose_for_themselves() -> None:
    suffix = KnownDrafter("suffix", {0: 0.95, 1: 0.05})
    model = KnownDrafter("draft_model", {0: 0.6, 1: 0.6})
    world = World(selected([suffix], model), num_slots=2)
    share(world, ("suffix", "draft_model"), 30)
    assert share(world, ("suffix", "draft_model"), 50) > 0.9


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
    assert [(each.slot, each.method) for each in proposals.drafts] == [
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
    drafter.commit([Continuation(slot=4, token_ids=(5,))])
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

    assert [draft.method for draft in proposals.drafts] == ["draft_model", "suffix", "draft_model"]
    assert proposals.probs is not None
    assert proposals.probs.dtype == torch.float64
    expected = torch.zeros(6, 100, dtype=torch.float64)
    tokens = [token for draft in proposals.drafts for token in draft.token_ids]
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

    assert [draft.method for draft in proposals.drafts] == ["suffix" if text else "draft_model"]
    assert proposals.probs is None
