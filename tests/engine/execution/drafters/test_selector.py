"""Choosing the drafter per sequence. Oracle: drafters of known quality, and a target whose text is known.

Planted bugs that these tests have caught: a draft behind tokens that did not come counts as wrong; being right at
the border counts for nothing; the rest of a draft is forgotten at the border, is judged from its first token on,
or is judged where it has been replaced.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from faser.engine.contract.plan import Draft, DraftPlan, DraftRequest, SequenceStart, StopRule
from faser.engine.execution.drafters.acceptance_estimates import (
    KEPT_PER_STEP,
    MOST_TOKENS,
    PRIOR_TOKENS,
    AcceptanceEstimates,
    OpenDraft,
)
from faser.engine.execution.drafters.drafter import Continuation, Drafter, Proposals
from faser.engine.execution.drafters.selector import DrafterSelector, expected_tokens
from faser.engine.execution.text_lookup.lookup import CombinedLookup
from faser.engine.execution.text_lookup.python.ngram import NgramDrafter
from faser.engine.execution.text_lookup.python.suffix import SuffixDrafter
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
    each_behind = [()] * len(slots) if unverified is None else unverified
    requests = tuple(
        DraftRequest(slot=slot, max_tokens=max_tokens, new_blocks=(), unverified=tokens)
        for slot, tokens in zip(slots, each_behind, strict=True)
    )
    return DraftPlan(step=0, released=(), requests=requests, stop=stop)


@dataclass
class KnownDrafter:
    """Knows the text to come of each slot and says each token of it rightly with the slot's quality.

    A quality of None: nothing to propose. Wrong tokens are negative. sampled: as if drawn from a distribution.
    num_right: from there on every token of a draft is wrong.
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
        """Telling rows: token t has probability 1 / (t + 2), and so has nothing else but token 0 the rest."""
        probs = torch.zeros(len(token_ids), 100, dtype=torch.float64)
        for row, token_id in enumerate(token_ids):
            probs[row, token_id] += 1 / (token_id + 2)
            probs[row, 0] += 1 - 1 / (token_id + 2)
        return probs


def next_token(position: int) -> int:
    """The text of every sequence: no token says what the next one is."""
    return position * 37 % 89 + 1


class World:
    """Runs steps of a chooser over slots 0 … as an engine would, and notes who drafted."""

    def __init__(self, chooser: DrafterSelector, num_slots: int = 1) -> None:
        self.chooser = chooser
        self.known = [0] * num_slots
        self.chunks: list[tuple[int, ...]] = [()] * num_slots
        for slot in range(num_slots):
            chooser.start(start_of(slot))

    def step(self, *, kept: int = CAP) -> list[str]:
        """kept: no more drafted tokens than this are verified. Methods by slot; none where nothing was drafted."""
        drafts = self.chooser.propose(plan_for(range(len(self.known)))).drafts
        came = [self._judge(draft.slot, draft.token_ids[:kept]) for draft in drafts]
        self.chooser.commit(came)
        return [draft.method if draft.token_ids else "none" for draft in drafts]

    def step_ahead(self, *, kept: int = CAP) -> list[str]:
        """The same while the chunks are verified; no chunk is longer than kept."""
        slots = range(len(self.known))
        drafts = self.chooser.propose(plan_for(slots, unverified=self.chunks)).drafts
        came = [self._judge(slot, self.chunks[slot]) for slot in slots]
        for draft, each in zip(drafts, came, strict=True):
            whole = each.num_accepted == len(self.chunks[draft.slot])
            passed = whole and draft.token_ids[:1] == each.token_ids[-1:]
            self.chunks[draft.slot] = draft.token_ids[1 : 1 + kept] if passed else ()
        self.chooser.commit(came)
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
    chooser = DrafterSelector(CombinedLookup([suffix]), model_drafter, model_cap=MODEL_CAP, model_cost_tokens=cost)
    return World(chooser), suffix, model_drafter


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
    world = World(DrafterSelector(CombinedLookup([suffix]), model, model_cap=MODEL_CAP), num_slots=2)
    for _ in range(30):
        world.step()

    steps = [tuple(world.step()) for _ in range(50)]

    assert steps.count(("suffix", "draft_model")) > 45


def test_drafts_of_another_confidence_are_another_matter() -> None:
    """Sure guesses come true and unsure ones do not; each new sequence gets the right drafter at once."""
    sure = KnownDrafter("suffix", {0: 0.95}, confidence=0.9)
    chooser = DrafterSelector(CombinedLookup([sure]), KnownDrafter("draft_model", {0: 0.6}), model_cap=MODEL_CAP)
    world = World(chooser)
    for step in range(100):
        sure.confidence, sure.quality[0] = (0.9, 0.95) if step % 2 else (0.2, 0.05)
        world.step()
    chooser.release(0)
    world = World(chooser)

    sure.confidence = 0.2
    assert world.step() == ["draft_model"]
    chooser.release(0)
    world = World(chooser)
    sure.confidence = 0.9
    assert world.step() == ["suffix"]


def test_an_unlucky_model_gets_another_chance() -> None:
    world, _, model = a_world(None, 0.0, cost=1.0)
    assert share(world, "none", 40) > 0.5
    assert world.step() == ["none"]
    model.quality[0] = 0.9
    share(world, "draft_model", 40)

    assert share(world, "draft_model", 20) == 1.0


def test_a_draft_cut_before_verification_was_not_refused() -> None:
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
def test_the_better_drafter_drafts_ahead_after_thirty_steps(
    text: float | None, model: float, better: str, kept: int
) -> None:
    """However long the chunks are that are verified meanwhile; with none, only the border says who is right."""
    world, _, _ = a_world(text, model)
    for _ in range(30):
        world.step_ahead(kept=kept)

    methods = [world.step_ahead(kept=kept) for _ in range(80)]

    assert methods.count([better]) > 68


@pytest.mark.parametrize("ahead", [True, False])
def test_a_draft_behind_tokens_that_did_not_come_is_neither_right_nor_wrong(ahead: bool) -> None:
    """Other tokens always come; but the draft's first is held against them only where nothing lies between."""
    world, _, model = a_world(None, 1.0, cost=1.0)
    behind = [(-1,)] if ahead else None
    for _ in range(60):
        world.chooser.propose(plan_for([0], unverified=behind))
        world.chooser.commit([Continuation(slot=0, token_ids=(-2,))])

    assert (len(model.plans) == 60) == ahead


def test_what_a_draft_says_beyond_the_chunk_made_of_it_is_replaced_by_the_next_draft() -> None:
    """Chunks of one token: the second of a draft is verified, the third is drafted anew before it could be judged.

    So text, right for two tokens, has been right always. The shorter drafts of the model are right, too.
    """
    world, suffix, _ = a_world(1.0, 1.0, cost=0.0)
    suffix.num_right = 2
    for _ in range(40):
        world.step_ahead(kept=1)

    assert {world.step_ahead(kept=1)[0] for _ in range(20)} == {"suffix"}


def test_whether_it_drafts_ahead_is_up_to_all_its_drafters() -> None:
    for text, model in [(True, True), (True, False), (False, True)]:
        chooser = DrafterSelector(
            CombinedLookup([KnownDrafter("suffix", {}, drafts_overlapped=text)]),
            KnownDrafter("draft_model", {}, drafts_overlapped=model),
            model_cap=MODEL_CAP,
        )
        assert chooser.drafts_overlapped == (text and model)


def test_the_model_is_told_when_nobody_waits() -> None:
    model = KnownDrafter("draft_model", {0: 0.9})
    chooser = DrafterSelector(CombinedLookup([]), model, model_cap=MODEL_CAP)
    chooser.start(start_of(0))

    def until() -> bool:
        return True

    chooser.propose(plan_for([0]), until)

    assert model.untils == [until]


few_tokens = st.lists(st.integers(0, 1), max_size=4).map(tuple)


@given(few_tokens, few_tokens, st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), max_size=6))
def test_a_claim_is_settled_alike_however_the_tokens_come(
    unverified: tuple[int, ...], token_ids: tuple[int, ...], pieces: list[list[int]]
) -> None:
    """Oracle: all that came, at once. Leading right tokens are accepted; the first wrong one is judged, too."""
    claim: OpenDraft | None = OpenDraft(keys=("key",), unverified=unverified, token_ids=token_ids)
    counts = [0, 0]
    came: list[int] = []
    for piece in pieces:
        came += piece
        if claim is not None:
            accepted, judged, claim = claim.meet(Continuation(slot=0, token_ids=tuple(piece)))
            counts = [counts[0] + accepted, counts[1] + judged]

    after = came[len(unverified) :] if tuple(came[: len(unverified)]) == unverified else []
    right = next(
        (i for i, (said, came) in enumerate(zip(token_ids, after, strict=False)) if said != came),
        min(len(token_ids), len(after)),
    )
    assert counts == [right, right + (right < min(len(token_ids), len(after)))]


def test_a_drawn_token_that_was_not_verified_was_not_judged() -> None:
    """By chance it was the target's own token; its acceptance would be another chance."""
    claim = OpenDraft(keys=(), unverified=(), token_ids=(1, 2, 3), drawn=True)
    assert claim.meet(Continuation(slot=0, token_ids=(1, 2), num_accepted=1)) == (1, 1, None)
    assert claim.meet(Continuation(slot=0, token_ids=(1, 5), num_accepted=1)) == (1, 2, None)


def test_the_price_of_the_model_may_change_at_any_time() -> None:
    world, _, _ = a_world(0.5, 0.95)
    share(world, "draft_model", 30)
    assert share(world, "draft_model", 20) == 1.0
    world.chooser.model_cost_tokens = MODEL_CAP
    assert share(world, "suffix", 20) == 1.0


@pytest.mark.parametrize(("pass_price", "chosen"), [(0.01, "draft_model"), (0.9, "suffix")])
def test_the_prices_of_the_plan_decide_between_text_and_model(pass_price: float, chosen: str) -> None:
    """Two tokens of text against two of the model's, which are likelier and cost passes."""
    suffix = KnownDrafter("suffix", {0: 0.5})
    model = KnownDrafter("draft_model", {0: 1.0})
    chooser = DrafterSelector(CombinedLookup([suffix]), model, model_cap=2, model_cost_tokens=0.0)
    chooser.start(start_of(0))
    stop = StopRule(row_price=0.1, pass_prices=(pass_price,), intercept=0.0, slope=1.0)

    proposals = chooser.propose(plan_for([0], max_tokens=2, stop=stop))

    assert [draft.method for draft in proposals.drafts] == [chosen]


def test_the_model_is_asked_for_what_is_left_and_no_more() -> None:
    suffix = KnownDrafter("suffix", {0: 1.0, 1: None, 2: 1.0, 3: None})
    model = KnownDrafter("draft_model", dict.fromkeys(range(4), 1.0))
    chooser = DrafterSelector(CombinedLookup([suffix]), model, model_cap=MODEL_CAP, model_cost_tokens=1.5)
    for slot in range(4):
        chooser.start(start_of(slot))

    proposals = chooser.propose(plan_for([3, 2, 1, 0], stop=STOP))

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

    chooser.propose(plan_for([0, 2]))
    assert len(model.plans) == 1


def test_everybody_learns_of_every_sequence() -> None:
    text, model = KnownDrafter("suffix", {0: 1.0}), KnownDrafter("draft_model", {0: 1.0})
    chooser = DrafterSelector(CombinedLookup([text]), model, model_cap=MODEL_CAP)
    chooser.start(start_of(4, (1, 2)))
    chooser.commit([Continuation(slot=4, token_ids=(5,))])
    assert text.to_come == model.to_come == {4: 3}

    chooser.release(4)
    assert text.to_come == model.to_come == {}


def test_of_equal_text_drafters_the_first_one_drafts() -> None:
    chooser = DrafterSelector(
        CombinedLookup([KnownDrafter("suffix", {0: 1.0}), KnownDrafter("ngram", {0: 1.0})]), model_cap=MODEL_CAP
    )
    assert World(chooser).step() == ["suffix"]


def test_where_the_first_text_drafter_knows_nothing_the_second_drafts() -> None:
    chooser = DrafterSelector(
        CombinedLookup([KnownDrafter("suffix", {0: None}), KnownDrafter("ngram", {0: 1.0})]), model_cap=MODEL_CAP
    )
    assert World(chooser).step() == ["ngram"]


def test_where_nobody_knows_anything_there_is_an_empty_draft() -> None:
    chooser = DrafterSelector(CombinedLookup([KnownDrafter("suffix", {0: None})]), model_cap=MODEL_CAP)
    chooser.start(start_of(0))
    assert chooser.propose(plan_for([0])).drafts == (Draft(slot=0, method="suffix"),)


def test_a_model_alone_always_drafts_while_it_is_worth_it() -> None:
    model = KnownDrafter("draft_model", {0: 0.9})
    assert World(DrafterSelector(CombinedLookup([]), model, model_cap=MODEL_CAP)).step() == ["draft_model"]


def test_a_chooser_without_drafters_is_refused() -> None:
    with pytest.raises(ValueError, match="neither a text drafter nor a model"):
        DrafterSelector(CombinedLookup([]), model_cap=MODEL_CAP)


def test_beside_sampled_drafts_a_token_from_text_is_certain() -> None:
    """The rows of the model stay what they were and where they belong."""
    suffix = KnownDrafter("suffix", {0: None, 1: 1.0, 2: None})
    model = KnownDrafter("draft_model", dict.fromkeys(range(3), 1.0), sampled=True)
    chooser = DrafterSelector(CombinedLookup([suffix]), model, model_cap=2, model_cost_tokens=0.5)
    for slot in range(3):
        chooser.start(start_of(slot, (1,) * slot))

    proposals = chooser.propose(plan_for([0, 1, 2], max_tokens=2))

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
    chooser = DrafterSelector(
        CombinedLookup([KnownDrafter("suffix", {0: text})]), model, model_cap=2, model_cost_tokens=1.0
    )
    chooser.start(start_of(0))

    proposals = chooser.propose(plan_for([0]))

    assert [draft.method for draft in proposals.drafts] == ["suffix" if text else "draft_model"]
    assert proposals.probs is None


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 16), st.integers(0, 3), st.integers(0, 20)), max_size=20
    )
)
def test_a_rate_is_the_share_of_accepted_tokens_weighted_by_age(events: list[tuple[str, int, int, int]]) -> None:
    """Oracle: counts that are all made lighter at every step. b has a as its prior."""
    evidence = AcceptanceEstimates()
    counts = {"a": [0.0, 0.0], "b": [0.0, 0.0]}
    for key, accepted, refused, wait in events:
        evidence.add((key,), accepted, accepted + refused)
        total = counts[key][1] + accepted + refused
        shrink = min(1.0, MOST_TOKENS / total) if total else 1.0
        counts[key] = [(counts[key][0] + accepted) * shrink, total * shrink]
        for _ in range(wait):
            evidence.fade()
            counts = {each: [KEPT_PER_STEP * value for value in pair] for each, pair in counts.items()}

    def rate(key: str, prior: float) -> float:
        accepted, judged = counts[key]
        return (accepted + PRIOR_TOKENS * prior) / (judged + PRIOR_TOKENS)

    assert evidence.rate(("a", "b"), 0.6) == pytest.approx(rate("b", rate("a", 0.6)))


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.999999, 1 - 1e-10, 1.0])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_expected_tokens_are_the_sum_of_survivals(rate: float, num_tokens: int) -> None:
    survivals = [rate**count for count in range(1, num_tokens + 1)]
    assert expected_tokens(rate, num_tokens) == pytest.approx(sum(survivals))


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=6), st.booleans()), max_size=25))
def test_over_real_text_drafters_each_draft_is_one_of_theirs(steps: list[tuple[int, list[int], bool]]) -> None:
    """Random starts, commits and releases; the same drafters alone, told the same, propose the same."""
    alone: list[Drafter] = [SuffixDrafter(cap=CAP), NgramDrafter(min_n=2, max_n=4, cap=CAP)]
    chooser = DrafterSelector(
        CombinedLookup([SuffixDrafter(cap=CAP), NgramDrafter(min_n=2, max_n=4, cap=CAP)]), model_cap=MODEL_CAP
    )
    everybody: list[Drafter] = [chooser, *alone]
    running: set[int] = set()
    for slot, token_ids, ends in steps:
        for drafter in everybody:
            if slot not in running:
                drafter.start(start_of(slot, tuple(token_ids)))
            elif ends:
                drafter.release(slot)
            else:
                drafter.commit([Continuation(slot=slot, token_ids=tuple(token_ids))])
        running = running - {slot} if slot in running and ends else running | {slot}
        plan = plan_for(sorted(running))
        offered = zip(*(drafter.propose(plan).drafts for drafter in alone), strict=True)
        for draft, drafts in zip(chooser.propose(plan).drafts, offered, strict=True):
            assert draft in drafts
            assert draft.token_ids or not any(each.token_ids for each in drafts)
