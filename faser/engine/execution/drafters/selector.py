"""DrafterSelector: which drafter drafts for which sequence. Text where it does as well as the model, else the model.

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

from faser.engine.contract.plan import Draft, DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafters.acceptance_estimates import AcceptanceEstimates, OpenDraft
from faser.engine.execution.drafters.drafter import NO_TOP, Continuation, Drafter, Proposals
from faser.engine.execution.text_lookup.lookup import TextLookup

TEXT_PRIOR = 0.5  # acceptance of a drafted token before anything is known
MODEL_PRIOR = 0.7
NOBODY = Proposals(drafts=())  # of a model that is not asked


class DrafterSelector:
    """A Drafter of drafters. text: its methods in order of preference, for ties. model: None if there is none.

    model_cap: most tokens the model drafts. model_cost_tokens: what its passes for one sequence cost, in expected
    tokens, where the plan has no prices. Raises ValueError without any drafter.
    """

    def __init__(
        self,
        text: TextLookup,
        model: Drafter | None = None,
        *,
        model_cap: int,
        model_cost_tokens: float = 0.5,
    ) -> None:
        if not text.num_methods and model is None:
            raise ValueError("there is neither a text drafter nor a model to choose from")
        self.model_cost_tokens = model_cost_tokens
        self._text = text
        self._model = model
        self._model_source = text.num_methods  # sources are numbered: the text's methods, then the model
        self._model_cap = model_cap
        self._evidence = AcceptanceEstimates()
        self._no_claims = (None,) * self._model_source  # where no method has anything to propose
        self._claims: dict[int, list[OpenDraft]] = {}  # by slot: what the tokens to come may prove right or wrong

    @property
    def drafts_overlapped(self) -> bool:
        return self._text.drafts_overlapped and (self._model is None or self._model.drafts_overlapped)

    def start(self, start: SequenceStart) -> None:
        for each in self._all():
            each.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        self._evidence.fade()
        columns = self._text.look_up(plan)
        guesses = list(zip(*columns, strict=True)) if columns else [()] * len(plan.requests)
        price = _pass_price(plan)
        claims = [
            self._text_claims(request, drafts) for request, drafts in zip(plan.requests, guesses, strict=True)
        ]
        sources = [self._source(request, each, price) for request, each in zip(plan.requests, claims, strict=True)]
        asked = self._ask(plan, sources, until)
        answers = iter(asked.drafts)
        drafts = []
        for request, guessed, source, claimed in zip(plan.requests, guesses, sources, claims, strict=True):
            draft = next(answers) if source == self._model_source else guessed[source]
            if source == self._model_source:
                claimed = (*claimed, self._model_claim(request, draft, drawn=asked.probs is not None))
            self._remember(request, claimed)
            drafts.append(draft)
        if asked is NOBODY:
            return Proposals(drafts=tuple(drafts))
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

    def _all(self) -> tuple[TextLookup | Drafter, ...]:
        return (self._text,) if self._model is None else (self._text, self._model)

    def _source(
        self, request: DraftRequest, claims: tuple[OpenDraft | None, ...], pass_price: float | None
    ) -> int:
        """Whose draft is expected to have the most tokens accepted, the model's cost taken off."""
        if self._model is None and claims is self._no_claims:
            return 0
        values = [0.0 if claim is None else self._text_value(claim) for claim in claims]
        if self._model is not None:
            rate = self._evidence.rate(self._model_keys(request.slot), MODEL_PRIOR)
            longest = min(request.max_tokens, self._model_cap)
            expected = expected_tokens(rate, longest)
            cost = self.model_cost_tokens if pass_price is None else pass_price * min(expected + 1, longest)
            values.append(expected - cost)
        return values.index(max(values))

    def _text_value(self, claim: OpenDraft) -> float:
        return expected_tokens(self._evidence.rate(claim.keys, TEXT_PRIOR), len(claim.token_ids))

    def _ask(self, plan: DraftPlan, sources: list[int], until: Callable[[], bool] | None) -> Proposals:
        """The model's drafts for the requests that are left to it; it is not called for none."""
        if self._model is None:
            return NOBODY
        requests = tuple(
            replace(request, max_tokens=min(request.max_tokens, self._model_cap))
            for request, source in zip(plan.requests, sources, strict=True)
            if source == self._model_source
        )
        if not requests:
            return NOBODY
        return self._model.propose(replace(plan, requests=requests), until)

    def _remember(self, request: DraftRequest, claimed: tuple[OpenDraft | None, ...]) -> None:
        """What the tokens to come will be held against; of an older draft, what it said of the tokens behind.

        What the old draft said beyond is replaced by the new one.
        """
        old = self._claims.pop(request.slot, None)
        claims = [] if claimed is self._no_claims else [claim for claim in claimed if claim is not None]
        if old is not None and request.unverified:
            claims[:0] = [claim.cut(len(request.unverified)) for claim in old if not claim.unverified]
        if claims:
            self._claims[request.slot] = claims

    def _text_claims(self, request: DraftRequest, guesses: tuple[Draft, ...]) -> tuple[OpenDraft | None, ...]:
        """By method; None where it has nothing to propose."""
        for draft in guesses:
            if draft.token_ids:
                break
        else:
            return self._no_claims
        return tuple(
            OpenDraft(
                keys=self._text_keys(source, draft), unverified=request.unverified, token_ids=draft.token_ids
            )
            if draft.token_ids
            else None
            for source, draft in enumerate(guesses)
        )

    def _model_claim(self, request: DraftRequest, draft: Draft, *, drawn: bool) -> OpenDraft:
        keys = self._model_keys(request.slot)
        return OpenDraft(keys=keys, unverified=request.unverified, token_ids=draft.token_ids, drawn=drawn)

    def _learn(self, came: Continuation) -> None:
        """Hold every claim of a slot against what came; keep those that may still come true."""
        unsettled = []
        for claim in self._claims.pop(came.slot):
            accepted, judged, rest = claim.meet(came)
            self._evidence.add(claim.keys, accepted, judged)
            if rest is not None:
                unsettled.append(rest)
        if unsettled:
            self._claims[came.slot] = unsettled

    def _text_keys(self, source: int, draft: Draft) -> tuple[Hashable, ...]:
        """Ever closer: the method, its drafts of this confidence and length, the method on this text."""
        kind = (round(10 * draft.confidences[0]), len(draft.token_ids).bit_length())
        return (source, (source, *kind), (draft.slot, source))

    def _model_keys(self, slot: int) -> tuple[Hashable, ...]:
        return (self._model_source, (slot, self._model_source))


def _pass_price(plan: DraftPlan) -> float | None:
    """What a pass costs each sequence, in expected tokens, if all drafted with the model."""
    if plan.stop is None or not plan.requests:
        return None
    return plan.stop.pass_prices[len(plan.requests) - 1] / len(plan.requests)


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
