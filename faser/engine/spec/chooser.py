"""Chooser: which drafter drafts for which sequence. Text where it does as well as the model, else the model.

Owns what it learned of its drafters: how often a token that they drafted was the target's own. A text drafter is
judged on every step, whether or not its draft was sent, because a guess can be held against the tokens that came
anyway; the model, which costs passes, only on what it was asked for. Old evidence fades, so that nobody is
condemned for good. Source of the aim: arXiv 2601.11580, which finds more to win in the drafter than in the length.

A draft made behind tokens that are being verified is a claim about what comes after them: its first token meets
the target's own in that step, the others meet what comes in the next one, and if the tokens behind turn out
wrong, nothing is learned of it.

A choice depends on committed tokens alone, so it leaves the law of the output as it is; and where drafts are point
masses, as those from text always are, it changes no token either.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from faser.engine.plan import Draft, DraftPlan, DraftWish, SequenceStart
from faser.engine.spec.drafter import NO_TOP, Continuation, Drafter, Proposals
from faser.engine.spec.evidence import Claim, Evidence

TEXT_PRIOR = 0.5  # acceptance of a drafted token before anything is known
MODEL_PRIOR = 0.7


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
        self._claims: dict[int, list[Claim]] = {}  # by slot: what the tokens to come may prove right or wrong

    @property
    def drafts_ahead(self) -> bool:
        return all(drafter.drafts_ahead for drafter in self._all())

    def start(self, start: SequenceStart) -> None:
        for drafter in self._all():
            drafter.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        self._evidence.fade()
        columns = [drafter.propose(plan).drafts for drafter in self._text]
        guesses = [tuple(column[line] for column in columns) for line in range(len(plan.wishes))]
        price = _pass_price(plan)
        sources = [self._source(wish, drafts, price) for wish, drafts in zip(plan.wishes, guesses, strict=True)]
        asked = self._ask(plan, sources, until)
        answers = iter(asked.drafts)
        drafts = []
        for wish, guessed, source in zip(plan.wishes, guesses, sources, strict=True):
            claims = self._still_open(wish) + self._text_claims(wish, guessed)
            draft = next(answers) if source == self._model_source else guessed[source]
            if source == self._model_source:
                claims.append(self._model_claim(wish, draft, drawn=asked.probs is not None))
            self._claims[wish.slot] = claims
            drafts.append(draft)
        from_model = [source == self._model_source for source in sources]
        return replace(
            asked,
            drafts=tuple(drafts),
            probs=_probs_of_all(drafts, from_model, asked.probs),
            top_ids=_top_ids_of_all(drafts, from_model, asked.top_ids),
        )

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for each in continuations:
            if each.slot in self._claims:
                self._learn(each)
        for drafter in self._all():
            drafter.commit(continuations)

    def release(self, slot: int) -> None:
        self._claims.pop(slot, None)
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

    def _ask(self, plan: DraftPlan, sources: list[int], until: Callable[[], bool] | None) -> Proposals:
        """The model's drafts for the wishes that are left to it; it is not called for none."""
        wishes = tuple(
            replace(wish, max_tokens=min(wish.max_tokens, self._model_cap))
            for wish, source in zip(plan.wishes, sources, strict=True)
            if source == self._model_source
        )
        if self._model is None or not wishes:
            return Proposals(drafts=())
        return self._model.propose(replace(plan, wishes=wishes), until)

    def _still_open(self, wish: DraftWish) -> list[Claim]:
        """Claims about the tokens behind the new draft. What an old draft said beyond is replaced by it."""
        if not wish.behind:
            return []
        claims = self._claims.get(wish.slot, ())
        return [claim.cut(len(wish.behind)) for claim in claims if not claim.behind]

    def _text_claims(self, wish: DraftWish, guesses: tuple[Draft, ...]) -> list[Claim]:
        return [
            Claim(keys=self._text_keys(source, draft), behind=wish.behind, token_ids=draft.token_ids)
            for source, draft in enumerate(guesses)
            if draft.token_ids
        ]

    def _model_claim(self, wish: DraftWish, draft: Draft, *, drawn: bool) -> Claim:
        keys = self._model_keys(wish.slot)
        return Claim(keys=keys, behind=wish.behind, token_ids=draft.token_ids, drawn=drawn)

    def _learn(self, came: Continuation) -> None:
        """Hold every claim of a slot against what came; keep those that may still come true."""
        unsettled = []
        for claim in self._claims[came.slot]:
            accepted, judged, rest = claim.meet(came)
            self._evidence.add(claim.keys, accepted, judged)
            if rest is not None:
                unsettled.append(rest)
        self._claims[came.slot] = unsettled

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


def _top_ids_of_all(drafts: list[Draft], from_model: list[bool], top_ids: Tensor | None) -> Tensor | None:
    """[T, M] for all drafts, from the model's lines alone: text names no other tokens."""
    named = [model for draft, model in zip(drafts, from_model, strict=True) for _ in draft.token_ids]
    if top_ids is None or all(named):
        return top_ids
    whole = top_ids.new_full((len(named), top_ids.shape[1]), NO_TOP)
    whole[torch.tensor(named, device=top_ids.device)] = top_ids
    return whole
