"""Selecting the drafter of each sequence. Oracle: drafters of known quality, and a target whose text is known.

Planted bugs that these tests have caught: a draft that continues tokens which did not come counts as wrong; being
right at the border counts for nothing; the rest of a draft is forgotten at the border, is judged from its first
token on, or is judged where it has been replaced.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.selected_drafter import SelectedDrafter
from faser.engine.contract.plan import Draft, DraftPlan, DraftRequest, SequenceStart, StopRule
from faser.engine.control.speculation.drafter_selection import DrafterSelection, expected_tokens
from faser.engine.execution.drafters.drafter import Continuation, Drafter, Proposals
from faser.engine.execution.text_lookup.lookup import CombinedLookup
from faser.engine.execution.text_lookup.python.ngram import NgramDrafter
from faser.engine.execution.text_lookup.python.suffix import SuffixDrafter
from faser.engine.execution.text_lookup.text_and_model import TextAndModel
from faser.types import SamplingParams

CAP, MODEL_CAP = 8, 5
STOP = StopRule(row_price=0.1, pass_prices=(0.5, 1.0, 1.5, 2.0), intercept=0.0, slope=1.0)


def start_of(slot: int, token_ids: tuple[int, ...] = ()) -> SequenceStart:
    return SequenceStart(
        slot=slot, sampling=SamplingParams(), seed=0, prompt_len=len(token_ids), token_ids=token_ids
    )


def plan_for(
    slots: Sequence[int],
    max_tokens: int = CAP,
    stop: StopRule | None = None,
    unverified: Sequence[tuple[int, ...]] | None = None,
) -> DraftPlan:
    """unverified: of each of slots."""
    of_each = [()] * len(slots) if unverified is None else unverified
    requests = tuple(
        DraftRequest(slot=slot, max_tokens=max_tokens, new_blocks=(), unverified=tokens)
        for slot, tokens in zip(slots, of_each, strict=True)
    )
    return DraftPlan(step=0, released=(), requests=requests, stop=stop)


@dataclass
class KnownDrafter:
    """Knows the coming text of each slot and drafts each token of it correctly with the slot's quality.

    A quality of None: nothing to propose. Wrong tokens are negative. sampled: as if drawn from a distribution.
    num_right: every token of a draft from this one on is wrong.
    """

    method: str
    quality: dict[int, float | None]
    confidence: float = 1.0
    sampled: bool = False
    drafts_overlapped: bool = True
    num_right: int = CAP
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
        first = self.to_come[request.slot] + len(request.unverified)
        token_ids = tuple(
            next_token(first + offset) if offset < self.num_right and self.rng.random() < quality else -1
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
    text: Sequence[Drafter],
    model: Drafter | None = None,
    *,
    model_cap: int = MODEL_CAP,
    cost: float = 0.5,
) -> SelectedDrafter:
    """text: drafters of text methods, in order. cost: of the model's passes, where plans have no prices."""
    selection = DrafterSelection(model_cap=None if model is None else model_cap, model_cost_tokens=cost)
    return SelectedDrafter(TextAndModel(CombinedLookup(text), model), selection)


class World:
    """Runs steps over slots 0 … as an engine would, and returns which method drafted."""

    def __init__(self, drafter: SelectedDrafter, num_slots: int = 1) -> None:
        self.drafter = drafter
        self.known = [0] * num_slots
        self.chunks: list[tuple[int, ...]] = [()] * num_slots
        for slot in range(num_slots):
            drafter.start(start_of(slot))

    def step(self, *, kept: int = CAP) -> list[str]:
        """Methods by slot, "none" for an empty draft. kept: the most drafted tokens that are verified."""
        drafts = self.drafter.propose(plan_for(range(len(self.known)))).drafts
        came = [self._judge(draft.slot, draft.token_ids[:kept]) for draft in drafts]
        self.drafter.commit(came)
        return [draft.method if draft.token_ids else "none" for draft in drafts]

    def overlapped_step(self, *, kept: int = CAP) -> list[str]:
        """The same while the chunks are verified. kept: length of the longest chunk."""
        slots = range(len(self.known))
        drafts = self.drafter.propose(plan_for(slots, unverified=self.chunks)).drafts
        came = [self._judge(slot, self.chunks[slot]) for slot in slots]
        for draft, each in zip(drafts, came, strict=True):
            whole = each.num_accepted == len(self.chunks[draft.slot])
            passed = whole and draft.token_ids[:1] == each.token_ids[-1:]
            self.chunks[draft.slot] = draft.token_ids[1 : 1 + kept] if passed else ()
        self.drafter.commit(came)
        return [draft.method if draft.token_ids else "none" for draft in drafts]

    def _judge(self, slot: int, drafted: tuple[int, ...]) -> Continuation:
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == next_token(self.known[slot] + accepted):
            accepted += 1
        first = self.known[slot]
        self.known[slot] += accepted + 1
        token_ids = tuple(next_token(position) for position in range(first, self.known[slot]))
        return Continuation(slot=slot, token_ids=token_ids, num_accepted=accepted)


def a_world(
    text: float | None, model: float | None, *, cost: float = 0.5
) -> tuple[World, KnownDrafter, KnownDrafter]:
    suffix = KnownDrafter("suffix", {0: text})
    model_drafter = KnownDrafter("draft_model", {0: model})
    return World(selected([suffix], model_drafter, cost=cost)), suffix, model_drafter


def share(world: World, method: str, num_steps: int) -> float:
    return sum(world.step() == [method] for _ in range(num_steps)) / num_steps


@pytest.mark.parametrize(
    "text, model, better",
    [(0.9, 0.3, "suffix"), (0.2, 0.8, "draft_model"), (0.7, 0.7, "suffix"), (None, 0.6, "draft_model")],
)
def test_the_better_drafter_drafts_after_twenty_steps(text: float | None, model: float, better: str) -> None:
    world, _, _ = a_world(text, model)
    share(world, better, 20)

    assert share(world, better, 80) > 0.85


@pytest.mark.parametrize("first, then", [(0.95, 0.05), (0.05, 0.95)])
def test_when_text_changes_its_quality_the_choice_follows(first: float, then: float) -> None:
    """A text drafter is judged even while the model drafts."""
    world, suffix, _ = a_world(first, 0.6)
    share(world, "suffix", 60)
    suffix.quality[0] = then
    share(world, "suffix", 20)

    assert (share(world, "suffix", 40) > 0.9) == (then > first)
    assert (share(world, "draft_model", 40) > 0.9) == (then < first)


def test_sequences_of_one_batch_choose_for_themselves() -> None:
    suffix = KnownDrafter("suffix", {0: 0.95, 1: 0.05})
    model = KnownDrafter("draft_model", {0: 0.6, 1: 0.6})
    world = World(selected([suffix], model), num_slots=2)
    for _ in range(30):
        world.step()

    steps = [tuple(world.step()) for _ in range(50)]

    assert steps.count(("suffix", "draft_model")) > 45


def test_drafts_of_different_confidence_are_estimated_apart() -> None:
    """Confident drafts are right and others are not; each new sequence gets the better drafter at once."""
    sure = KnownDrafter("suffix", {0: 0.95}, confidence=0.9)
    drafter = selected([sure], KnownDrafter("draft_model", {0: 0.6}))
    world = World(drafter)
    for step in range(100):
        sure.confidence, sure.quality[0] = (0.9, 0.95) if step % 2 else (0.2, 0.05)
        world.step()
    drafter.release(0)
    world = World(drafter)

    sure.confidence = 0.2
    assert world.step() == ["draft_model"]
    drafter.release(0)
    world = World(drafter)
    sure.confidence = 0.9
    assert world.step() == ["suffix"]


def test_a_model_that_was_wrong_is_tried_again() -> None:
    world, _, model = a_world(None, 0.0, cost=1.0)
    assert share(world, "none", 40) > 0.5
    assert world.step() == ["none"]
    model.quality[0] = 0.9
    share(world, "draft_model", 40)

    assert share(world, "draft_model", 20) == 1.0


def test_a_draft_cut_before_verification_does_not_count_as_refused() -> None:
    """Only one token a step is verified and always right: the model stays better than a text of quality 0.8."""
    world, _, _ = a_world(0.8, 1.0)
    for _ in range(30):
        world.step(kept=1)

    methods = [world.step(kept=1) for _ in range(40)]

    assert methods.count(["draft_model"]) > 35


@pytest.mark.parametrize(
    "text, model, better",
    [(0.9, 0.3, "suffix"), (0.3, 0.9, "draft_model"), (0.7, 0.7, "suffix"), (None, 0.6, "draft_model")],
)
@pytest.mark.parametrize("kept", [0, 2, CAP])
def test_the_better_drafter_drafts_overlapped_steps_after_thirty_steps(
    text: float | None, model: float, better: str, kept: int
) -> None:
    """Whatever the length of the chunks under verification; without chunks only the border token tells."""
    world, _, _ = a_world(text, model)
    for _ in range(30):
        world.overlapped_step(kept=kept)

    methods = [world.overlapped_step(kept=kept) for _ in range(80)]

    assert methods.count([better]) > 68


@pytest.mark.parametrize("overlapped", [True, False])
def test_a_draft_that_continues_tokens_which_did_not_come_is_not_judged(overlapped: bool) -> None:
    """Other tokens always come; the draft is compared with them only where it continues known tokens."""
    world, _, model = a_world(None, 1.0, cost=1.0)
    unverified = [(-1,)] if overlapped else None
    for _ in range(60):
        world.drafter.propose(plan_for([0], unverified=unverified))
        world.drafter.commit([Continuation(slot=0, token_ids=(-2,))])

    assert (len(model.plans) == 60) == overlapped


def test_the_next_draft_replaces_what_a_draft_says_after_its_chunk() -> None:
    """Chunks of one token: a draft's second token is verified, its third is drafted anew before it is judged.

    So text that is right for two tokens has always been right. The shorter drafts of the model are right as well.
    """
    world, suffix, _ = a_world(1.0, 1.0, cost=0.0)
    suffix.num_right = 2
    for _ in range(40):
        world.overlapped_step(kept=1)

    assert {world.overlapped_step(kept=1)[0] for _ in range(20)} == {"suffix"}


def test_drafting_overlaps_steps_if_all_drafters_can() -> None:
    for text, model in [(True, True), (True, False), (False, True)]:
        drafter = selected(
            [KnownDrafter("suffix", {}, drafts_overlapped=text)],
            KnownDrafter("draft_model", {}, drafts_overlapped=model),
        )
        assert drafter.drafts_overlapped == (text and model)


def test_the_model_gets_the_condition_that_ends_its_passes() -> None:
    model = KnownDrafter("draft_model", {0: 0.9})
    drafter = selected([], model)
    drafter.start(start_of(0))

    def until() -> bool:
        return True

    drafter.propose(plan_for([0]), until)

    assert model.untils == [until]


def test_the_price_of_the_model_may_change_at_any_time() -> None:
    world, _, _ = a_world(0.5, 0.95)
    share(world, "draft_model", 30)
    assert share(world, "draft_model", 20) == 1.0
    world.drafter.selection.model_cost_tokens = MODEL_CAP
    assert share(world, "suffix", 20) == 1.0


@pytest.mark.parametrize(("pass_price", "chosen"), [(0.01, "draft_model"), (0.9, "suffix")])
def test_the_prices_of_the_plan_decide_between_text_and_model(pass_price: float, chosen: str) -> None:
    """Two tokens of text against two of the model's, which are likelier and cost passes."""
    suffix = KnownDrafter("suffix", {0: 0.5})
    model = KnownDrafter("draft_model", {0: 1.0})
    drafter = selected([suffix], model, model_cap=2, cost=0.0)
    drafter.start(start_of(0))
    stop = StopRule(row_price=0.1, pass_prices=(pass_price,), intercept=0.0, slope=1.0)

    proposals = drafter.propose(plan_for([0], max_tokens=2, stop=stop))

    assert [draft.method for draft in proposals.drafts] == [chosen]


def test_the_model_drafts_only_for_the_requests_left_to_it() -> None:
    suffix = KnownDrafter("suffix", {0: 1.0, 1: None, 2: 1.0, 3: None})
    model = KnownDrafter("draft_model", dict.fromkeys(range(4), 1.0))
    drafter = selected([suffix], model, cost=1.5)
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


def test_all_drafters_follow_every_sequence() -> None:
    text, model = KnownDrafter("suffix", {0: 1.0}), KnownDrafter("draft_model", {0: 1.0})
    drafter = selected([text], model)
    drafter.start(start_of(4, (1, 2)))
    drafter.commit([Continuation(slot=4, token_ids=(5,))])
    assert text.to_come == model.to_come == {4: 3}

    drafter.release(4)
    assert text.to_come == model.to_come == {}


def test_the_first_of_equal_text_drafters_drafts() -> None:
    drafter = selected([KnownDrafter("suffix", {0: 1.0}), KnownDrafter("ngram", {0: 1.0})])
    assert World(drafter).step() == ["suffix"]


def test_the_second_text_drafter_drafts_where_the_first_has_nothing() -> None:
    drafter = selected([KnownDrafter("suffix", {0: None}), KnownDrafter("ngram", {0: 1.0})])
    assert World(drafter).step() == ["ngram"]


def test_without_any_draft_the_first_method_has_an_empty_one() -> None:
    drafter = selected([KnownDrafter("suffix", {0: None})])
    drafter.start(start_of(0))
    assert drafter.propose(plan_for([0])).drafts == (Draft(slot=0, method="suffix"),)


def test_a_model_alone_always_drafts_while_it_is_worth_it() -> None:
    model = KnownDrafter("draft_model", {0: 0.9})
    assert World(selected([], model)).step() == ["draft_model"]


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


@pytest.mark.parametrize("text, sampled", [(1.0, True), (None, False)])
def test_there_are_no_probabilities_where_every_draft_is_a_point_mass(text: float | None, sampled: bool) -> None:
    model = KnownDrafter("draft_model", {0: 1.0}, sampled=sampled)
    drafter = selected([KnownDrafter("suffix", {0: text})], model, model_cap=2, cost=1.0)
    drafter.start(start_of(0))

    proposals = drafter.propose(plan_for([0]))

    assert [draft.method for draft in proposals.drafts] == ["suffix" if text else "draft_model"]
    assert proposals.probs is None


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.999999, 1 - 1e-10, 1.0])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_expected_tokens_are_the_sum_of_survivals(rate: float, num_tokens: int) -> None:
    survivals = [rate**count for count in range(1, num_tokens + 1)]
    assert expected_tokens(rate, num_tokens) == pytest.approx(sum(survivals))


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
