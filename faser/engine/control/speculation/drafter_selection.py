"""DrafterSelection: which drafter drafts for which sequence, in an engine of method `auto`.

The text look-up costs next to nothing, so it answers first, with a draft of every method for every request. A
sequence then gets the draft with the most expected tokens: one from text, or the draft model's, whose passes cost:

    DraftPlan (from_text) ──▶ Drafts: a draft per request and method ──▶ a method, or the model, for each request
    DraftPlan (requests left to the model, if any) ──▶ Drafts ──▶ one draft for every request

Owns the estimates of how often each drafter is right. A text draft is judged in every step, verified or not, since
it can be compared with the tokens that came anyway; the model's only where it was asked for. Old tokens fade, so a
drafter that was wrong once gets another chance. Motivation: arXiv 2601.11580, which finds more to win in the
choice of the drafter than in the length of the draft.

A draft that continues tokens under verification claims what follows them: its first token meets the target's own
token of that step, the others meet the tokens of the next one. Where those tokens turn out wrong, nothing is
learnt.

The choice depends on committed tokens alone, so it leaves the distribution of the output as it is; and where
drafts are point masses, as drafts from text always are, it changes no token either.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from faser.config.speculation import AUTO, SpeculationConfig
from faser.engine.contract.plan import Draft, DraftPlan, DraftRequest, Drafts, StepResult
from faser.engine.control.speculation.acceptance.drafter_estimates import AcceptanceEstimates, OpenDraft

TEXT_PRIOR = 0.5  # acceptance of a drafted token before anything is known
MODEL_PRIOR = 0.7
MODEL_COST_TOKENS = 0.5  # what a sequence's passes cost, in expected tokens, where the plan has no prices
_MODEL = "model"  # the draft model among the keys of the estimates; the others are the methods of text drafts

_OpenDrafts = tuple[OpenDraft | None, ...]  # by text method; None where the method has no draft


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """The text look-up's answer to a plan. chosen: by request, the number of a text method or of the model."""

    plan: DraftPlan
    looked_up: Drafts
    by_request: list[tuple[Draft, ...]]
    claims: list[_OpenDrafts]
    chosen: list[int]


class DrafterSelection:
    """Chooses among the text methods, in the order in which drafts come, and a draft model.

    model_cap: most tokens that the model drafts; None: there is no draft model.
    """

    def __init__(self, *, model_cap: int | None, model_cost_tokens: float = MODEL_COST_TOKENS) -> None:
        self.model_cost_tokens = model_cost_tokens
        self._model_cap = model_cap
        self._estimates = AcceptanceEstimates()
        self._methods: set[str] = set()  # of text drafts, as far as they have been seen
        self._open: dict[int, list[OpenDraft]] = {}  # by slot: drafts that the tokens to come may settle
        self._plan: DraftPlan | None = None  # the plan whose text drafts are being looked up
        self._round: _Round | None = None  # the round that waits for the model's drafts

    def first_round(self, plan: DraftPlan) -> DraftPlan:
        """The plan that goes out first: the same requests, for the text look-up."""
        self.release(plan.released)
        self._plan = plan
        return replace(plan, from_text=True)

    def drafted(self, drafts: Drafts) -> Drafts | DraftPlan:
        """Take the answer to the plan that went out last: one draft for every request, or the plan for the model.

        While a step runs (the plan has a share) the model's plan follows always, without requests if all drafts
        are from text: the step's lanes are divided already.
        """
        if self._round is not None:
            done, self._round = self._round, None
            return self._complete(done, drafts)
        assert self._plan is not None, "drafts come exactly when they were asked for"
        plan, self._plan = self._plan, None
        if self._model_cap is None and plan.share is None and not any(each.token_ids for each in drafts.drafts):
            return self._without_drafts(plan, drafts)
        found = self._select(plan, drafts)
        requests = self._left_to_model(found)
        if not requests and plan.share is None:
            return self._complete(found, None)
        self._round = found
        return replace(plan, requests=requests, released=())

    def learn(self, result: StepResult) -> None:
        """Settle open drafts with the tokens of a step, in the order of its sequences."""
        if not self._open:
            return
        for each in result.sequences:
            if each.token_ids and each.error is None and each.slot in self._open:
                self._settle(each.slot, each.token_ids)

    def release(self, slots: Sequence[int]) -> None:
        """The sequences in these slots have left the data plane; what the drafters showed on others stays."""
        for slot in slots:
            self._open.pop(slot, None)
            for method in (*self._methods, _MODEL):
                self._estimates.drop((slot, method))

    def _without_drafts(self, plan: DraftPlan, looked_up: Drafts) -> Drafts:
        """The short way of most steps on text that never repeats: the empty drafts of the first method."""
        self._estimates.fade()
        if self._open:
            for request in plan.requests:
                self._open.pop(request.slot, None)
        return replace(looked_up, drafts=looked_up.drafts[: len(plan.requests)])

    def _select(self, plan: DraftPlan, looked_up: Drafts) -> _Round:
        self._estimates.fade()
        count = len(plan.requests)
        columns = [looked_up.drafts[first : first + count] for first in range(0, len(looked_up.drafts), count)]
        self._methods.update(column[0].method for column in columns)
        by_request: list[tuple[Draft, ...]] = list(zip(*columns, strict=True)) if columns else [()] * count
        nothing = (None,) * len(columns)
        price = _pass_price(plan)
        claims = [
            _text_claims(request, drafts, nothing)
            for request, drafts in zip(plan.requests, by_request, strict=True)
        ]
        return _Round(
            plan=plan,
            looked_up=looked_up,
            by_request=by_request,
            claims=claims,
            chosen=[
                self._best(request, each, price, has_text=each is not nothing)
                for request, each in zip(plan.requests, claims, strict=True)
            ],
        )

    def _best(
        self, request: DraftRequest, claims: _OpenDrafts, pass_price: float | None, *, has_text: bool
    ) -> int:
        """Whose draft is expected to have the most tokens accepted, less the model's cost."""
        if self._model_cap is None and not has_text:
            return 0
        values = [0.0 if claim is None else self._text_value(claim) for claim in claims]
        if self._model_cap is not None:
            rate = self._estimates.rate(_model_keys(request.slot), MODEL_PRIOR)
            longest = min(request.max_tokens, self._model_cap)
            expected = expected_tokens(rate, longest)
            cost = self.model_cost_tokens if pass_price is None else pass_price * min(expected + 1, longest)
            values.append(expected - cost)
        return values.index(max(values))

    def _text_value(self, claim: OpenDraft) -> float:
        return expected_tokens(self._estimates.rate(claim.keys, TEXT_PRIOR), len(claim.token_ids))

    def _left_to_model(self, found: _Round) -> tuple[DraftRequest, ...]:
        cap = self._model_cap
        if cap is None:
            return ()
        return tuple(
            replace(request, max_tokens=min(request.max_tokens, cap), new_blocks=())
            for request, drafts, chosen in zip(found.plan.requests, found.by_request, found.chosen, strict=True)
            if chosen == len(drafts)
        )

    def _complete(self, done: _Round, from_model: Drafts | None) -> Drafts:
        """The chosen drafts in the order of the requests; times and passes are those of both rounds."""
        answers = iter(() if from_model is None else from_model.drafts)
        drafts = []
        for request, text, claims, chosen in zip(
            done.plan.requests, done.by_request, done.claims, done.chosen, strict=True
        ):
            draft = text[chosen] if chosen < len(text) else next(answers)
            if chosen == len(text):
                assert from_model is not None
                claims = (*claims, _model_claim(request, draft, drawn=from_model.drawn))
            self._remember(request, claims)
            drafts.append(draft)
        merged = replace(done.looked_up, drafts=tuple(drafts))
        if from_model is None:
            return merged
        return replace(
            merged,
            run_s=merged.run_s + from_model.run_s,
            passes=from_model.passes,
            catchup_tokens=from_model.catchup_tokens,
        )

    def _remember(self, request: DraftRequest, claims: _OpenDrafts) -> None:
        """Keep the new drafts open, and of an older draft what it says about the unverified tokens.

        The new draft replaces what the older one says after these.
        """
        old = self._open.pop(request.slot, None)
        opened = [claim for claim in claims if claim is not None]
        if old is not None and request.unverified:
            opened[:0] = [claim.cut(len(request.unverified)) for claim in old if not claim.unverified]
        if opened:
            self._open[request.slot] = opened

    def _settle(self, slot: int, token_ids: tuple[int, ...]) -> None:
        unsettled = []
        for claim in self._open.pop(slot):
            accepted, judged, rest = claim.meet(token_ids)
            self._estimates.add(claim.keys, accepted, judged)
            if rest is not None:
                unsettled.append(rest)
        if unsettled:
            self._open[slot] = unsettled


def make_selection(config: SpeculationConfig) -> DrafterSelection | None:
    """None for an engine that has one drafter."""
    if config.method != AUTO:
        return None
    return DrafterSelection(model_cap=None if config.model is None else config.model_cap)


def expected_tokens(rate: float, num_tokens: int) -> float:
    """Expected accepted tokens of a draft of num_tokens, each accepted at this rate if those before it were."""
    if rate > 1 - 1e-9:
        return float(num_tokens)
    return rate * (1.0 - rate**num_tokens) / (1.0 - rate)


def _pass_price(plan: DraftPlan) -> float | None:
    """What a pass costs each sequence, in expected tokens, if all drafted with the model."""
    if plan.stop is None or not plan.requests:
        return None
    return plan.stop.pass_prices[len(plan.requests) - 1] / len(plan.requests)


def _text_claims(request: DraftRequest, drafts: tuple[Draft, ...], nothing: _OpenDrafts) -> _OpenDrafts:
    """nothing: the value for a request for which no method has a draft; every such request shares it."""
    for draft in drafts:
        if draft.token_ids:
            break
    else:
        return nothing
    return tuple(
        OpenDraft(keys=_text_keys(draft), unverified=request.unverified, token_ids=draft.token_ids)
        if draft.token_ids
        else None
        for draft in drafts
    )


def _text_keys(draft: Draft) -> tuple[Hashable, ...]:
    """From general to special: the method, its drafts of this confidence and length, the method in this slot."""
    method = draft.method
    kind = (method, round(10 * draft.confidences[0]), len(draft.token_ids).bit_length())
    return (method, kind, (draft.slot, method))


def _model_claim(request: DraftRequest, draft: Draft, *, drawn: bool) -> OpenDraft:
    return OpenDraft(
        keys=_model_keys(request.slot), unverified=request.unverified, token_ids=draft.token_ids, drawn=drawn
    )


def _model_keys(slot: int) -> tuple[Hashable, ...]:
    return (_MODEL, (slot, _MODEL))
