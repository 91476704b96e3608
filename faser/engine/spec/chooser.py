"""Chooser: which drafter drafts for which sequence. Text where it does as well as the model, else the model.

Owns what it learned of its drafters: how often a token that they drafted was the target's own. A text drafter is
judged on every step, whether or not its draft was sent, because a guess can be held against the tokens that came
anyway; the model, which costs passes, only on what it was asked for. Old evidence fades, so that nobody is
condemned for good. Source of the aim: arXiv 2601.11580, which finds more to win in the drafter than in the length.

A choice depends on committed tokens alone, so it leaves the law of the output as it is; and where drafts are point
masses, as those from text always are, it changes no token either.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from faser.engine.plan import Draft, DraftPlan, DraftWish, SequenceStart
from faser.engine.spec.drafter import Continuation, Drafter, Proposals

TEXT_PRIOR = 0.5  # acceptance of a drafted token before anything is known
MODEL_PRIOR = 0.7
PRIOR_TOKENS = 4.0  # a prior weighs as much as so many judged tokens
KEPT_PER_STEP = 0.96  # of the weight of old evidence: half is gone after 17 steps
MOST_TOKENS = 32.0  # that evidence weighs: a good draft adds many tokens a step, a bad one only the one refused


class Chooser:
    """A Drafter of drafters. text: in order of preference, for ties. model: None if there is none.

    model_cap: most tokens the model drafts. model_cost_tokens: what its passes for one sequence cost, in expected
    tokens, where the plan has no prices. Raises ValueError without any drafter.
    """

    def __init__(
        self,
        text: Sequence[Drafter],
        model: Drafter | None = None,
        *,
        model_cap: int,
        model_cost_tokens: float = 0.5,
    ) -> None:
        if not text and model is None:
            raise ValueError("there is neither a text drafter nor a model to choose from")
        self.model_cost_tokens = model_cost_tokens
        self._text = tuple(text)
        self._model = model
        self._model_source = len(self._text)  # sources are numbered: text drafters, then the model
        self._model_cap = model_cap
        self._evidence = Evidence()
        self._offers: dict[int, _Offer] = {}

    def start(self, start: SequenceStart) -> None:
        for drafter in self._all():
            drafter.start(start)

    def propose(self, plan: DraftPlan) -> Proposals:
        self._evidence.fade()
        columns = [drafter.propose(plan).drafts for drafter in self._text]
        guesses = [tuple(column[line] for column in columns) for line in range(len(plan.wishes))]
        price = _pass_price(plan)
        sources = [self._source(wish, drafts, price) for wish, drafts in zip(plan.wishes, guesses, strict=True)]
        asked = self._ask(plan, sources)
        answers = iter(asked.drafts)
        drafts = []
        for wish, guessed, source in zip(plan.wishes, guesses, sources, strict=True):
            draft = next(answers) if source == self._model_source else guessed[source]
            self._offers[wish.slot] = _Offer(guesses=guessed, source=source, draft=draft)
            drafts.append(draft)
        from_model = [source == self._model_source for source in sources]
        return replace(asked, drafts=tuple(drafts), probs=_probs_of_all(drafts, from_model, asked.probs))

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for each in continuations:
            if (offer := self._offers.pop(each.slot, None)) is not None:
                self._learn(offer, each)
        for drafter in self._all():
            drafter.commit(continuations)

    def release(self, slot: int) -> None:
        self._offers.pop(slot, None)
        for source in range(self._model_source + 1):
            self._evidence.drop((slot, source))
        for drafter in self._all():
            drafter.release(slot)

    def _all(self) -> tuple[Drafter, ...]:
        return self._text if self._model is None else (*self._text, self._model)

    def _source(self, wish: DraftWish, guesses: tuple[Draft, ...], pass_price: float | None) -> int:
        """Whose draft is expected to have the most tokens accepted, the model's cost taken off."""
        values = [self._text_value(source, draft) for source, draft in enumerate(guesses)]
        if self._model is not None:
            rate = self._evidence.rate(self._model_keys(wish.slot), MODEL_PRIOR)
            longest = min(wish.max_tokens, self._model_cap)
            expected = expected_tokens(rate, longest)
            cost = self.model_cost_tokens if pass_price is None else pass_price * min(expected + 1, longest)
            values.append(expected - cost)
        return values.index(max(values))

    def _text_value(self, source: int, draft: Draft) -> float:
        if not draft.token_ids:
            return 0.0
        rate = self._evidence.rate(self._text_keys(source, draft), TEXT_PRIOR)
        return expected_tokens(rate, len(draft.token_ids))

    def _ask(self, plan: DraftPlan, sources: list[int]) -> Proposals:
        """The model's drafts for the wishes that are left to it; it is not called for none."""
        wishes = tuple(
            replace(wish, max_tokens=min(wish.max_tokens, self._model_cap))
            for wish, source in zip(plan.wishes, sources, strict=True)
            if source == self._model_source
        )
        if self._model is None or not wishes:
            return Proposals(drafts=())
        return self._model.propose(replace(plan, wishes=wishes))

    def _learn(self, offer: "_Offer", came: Continuation) -> None:
        """From what was sent, the verdict; from the guesses of the others, how far they agree with what came."""
        for source, draft in enumerate(offer.guesses):
            accepted = came.num_accepted if source == offer.source else _agreement(draft, came.token_ids)
            self._evidence.add(self._text_keys(source, draft), accepted, _judged(draft, came.token_ids, accepted))
        if offer.source == self._model_source:
            judged = _judged(offer.draft, came.token_ids, came.num_accepted)
            self._evidence.add(self._model_keys(came.slot), came.num_accepted, judged)

    def _text_keys(self, source: int, draft: Draft) -> tuple[Hashable, ...]:
        """Ever closer: the drafter, its drafts of this confidence and length, the drafter on this text."""
        if not draft.token_ids:
            return ()
        kind = (round(10 * draft.confidences[0]), len(draft.token_ids).bit_length())
        return (source, (source, *kind), (draft.slot, source))

    def _model_keys(self, slot: int) -> tuple[Hashable, ...]:
        return (self._model_source, (slot, self._model_source))


def _pass_price(plan: DraftPlan) -> float | None:
    """What a pass costs each sequence, in expected tokens, if all drafted with the model."""
    if plan.stop is None or not plan.wishes:
        return None
    return plan.stop.pass_prices[len(plan.wishes) - 1] / len(plan.wishes)


def expected_tokens(rate: float, num_tokens: int) -> float:
    """Accepted tokens to expect of a draft, each accepted at this rate if those before it were."""
    if rate > 1 - 1e-9:
        return float(num_tokens)
    return rate * (1.0 - rate**num_tokens) / (1.0 - rate)


class Evidence:
    """Accepted and judged drafted tokens by key, the older the lighter, never more than MOST_TOKENS.

    A key unheard of has none.
    """

    def __init__(self) -> None:
        self._counts: dict[Hashable, _Counts] = {}
        self._now = 0

    def fade(self) -> None:
        """A step goes by."""
        self._now += 1

    def add(self, keys: tuple[Hashable, ...], accepted: int, judged: int) -> None:
        """The same tokens count for every key."""
        for key in keys:
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = _Counts(step=self._now)
            kept = KEPT_PER_STEP ** (self._now - counts.step)
            counts.accepted = counts.accepted * kept + accepted
            counts.judged = counts.judged * kept + judged
            counts.step = self._now
            if counts.judged > MOST_TOKENS:
                counts.accepted *= MOST_TOKENS / counts.judged
                counts.judged = MOST_TOKENS

    def rate(self, keys: tuple[Hashable, ...], prior: float) -> float:
        """Acceptance rate of the last key, for which the key before it is the prior, and so on."""
        for key in keys:
            counts = self._counts.get(key)
            if counts is not None:
                kept = KEPT_PER_STEP ** (self._now - counts.step)
                prior = (counts.accepted * kept + PRIOR_TOKENS * prior) / (counts.judged * kept + PRIOR_TOKENS)
        return prior

    def drop(self, key: Hashable) -> None:
        self._counts.pop(key, None)


@dataclass(slots=True)
class _Counts:
    """As of step."""

    step: int
    accepted: float = 0.0
    judged: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """guesses: of all text drafters. draft: what was sent, from source."""

    guesses: tuple[Draft, ...]
    source: int
    draft: Draft


def _agreement(draft: Draft, token_ids: tuple[int, ...]) -> int:
    """How many leading tokens the draft had right."""
    count = 0
    for drafted, came in zip(draft.token_ids, token_ids, strict=False):
        if drafted != came:
            break
        count += 1
    return count


def _judged(draft: Draft, token_ids: tuple[int, ...], accepted: int) -> int:
    """Tokens of a draft that had a verdict: the accepted ones, and the refused one unless the draft was cut there.

    Had the draft been right where the verdicts end, then it was not refused but never judged.
    """
    refused = (
        accepted < min(len(draft.token_ids), len(token_ids)) and draft.token_ids[accepted] != token_ids[accepted]
    )
    return accepted + refused


def _probs_of_all(drafts: list[Draft], from_model: list[bool], probs: Tensor | None) -> Tensor | None:
    """[T, V] for all drafts, from the model's rows alone: a token from text is certain. None: all are certain."""
    sampled = [model for draft, model in zip(drafts, from_model, strict=True) for _ in draft.token_ids]
    if probs is None or all(sampled):
        return probs
    is_sampled = torch.tensor(sampled, device=probs.device)
    token_ids = torch.tensor([token for draft in drafts for token in draft.token_ids], device=probs.device)
    whole = probs.new_zeros(len(sampled), probs.shape[1])
    whole[is_sampled] = probs
    whole[~is_sampled, token_ids[~is_sampled]] = 1.0
    return whole
