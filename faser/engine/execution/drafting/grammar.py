"""Drafts that the grammar of an answer dictates: the text that it leaves no choice about.

Such text is most of a JSON object with long keys. It is divided into tokens as the tokenizer does it; the model
may choose another division, so that these drafts are verified like all others. The idea is in SGLang's
jump-forward decoding and in llguidance's fast-forward tokens, which skip the model there and so may change the
answer.
"""

from collections.abc import Callable, Sequence

from faser.engine.contract.plan import Draft, DraftPlan, SequenceStart
from faser.engine.execution.drafting.drafter import Continuation, Proposals, one_each
from faser.engine.structure.sequence_matchers import SequenceMatchers

METHOD = "grammar"
_SURE = 0.99  # the confidence of each token


class GrammarDrafter:
    """See Drafter. Remembers nothing of a slot: the matchers belong to the sampler.

    cap: most tokens of a draft. alone: there is a draft for every request, perhaps an empty one. Next to others
    there are none at all where no request has one, which is the usual case.
    """

    drafts_overlapped = True

    def __init__(self, matchers: SequenceMatchers, *, cap: int, alone: bool) -> None:
        self._matchers = matchers
        self._cap = cap
        self._alone = alone

    def start(self, start: SequenceStart) -> None:
        pass

    def propose(self, plan: DraftPlan, _until: Callable[[], bool] | None = None, /) -> Proposals:
        structured, found = self._matchers.slots, {}
        for request in plan.requests:
            if request.slot in structured:
                limit = min(request.max_tokens, self._cap)
                token_ids = tuple(self._matchers.forced(request.slot, request.unverified, limit))
                confidences = (_SURE,) * len(token_ids)
                if token_ids:
                    found[request.slot] = Draft(
                        slot=request.slot, method=METHOD, token_ids=token_ids, confidences=confidences
                    )
        if not found and not self._alone:
            return Proposals(drafts=())
        return Proposals(drafts=one_each(plan, METHOD, found))

    def commit(self, continuations: Sequence[Continuation]) -> None:
        pass

    def release(self, slot: int) -> None:
        pass
