"""Drafts that the grammar of an answer dictates: the text that it leaves no choice about.

Such text is most of a JSON object with long keys. It is divided into tokens as the tokenizer does it; the model
may choose another division, so that these drafts are verified like all others. The idea is in SGLang's
jump-forward decoding and in llguidance's fast-forward tokens, which skip the model there and so may change the
answer.
"""

from collections.abc import Callable, Sequence

from faser.engine.contract.plan import Draft, DraftPlan, SequenceStart
from faser.engine.execution.drafting.drafter import Continuation, Proposals
from faser.engine.structure.sequence_matchers import SequenceMatchers

METHOD = "grammar"
_SURE = 0.99  # the confidence of each token


class GrammarDrafter:
    """See Drafter. Remembers nothing of a slot: the matchers belong to the sampler.

    cap: most tokens of a draft.
    """

    drafts_overlapped = True

    def __init__(self, matchers: SequenceMatchers, *, cap: int) -> None:
        self._matchers = matchers
        self._cap = cap

    def start(self, start: SequenceStart) -> None:
        pass

    def propose(self, plan: DraftPlan, _until: Callable[[], bool] | None = None, /) -> Proposals:
        structured, drafts = self._matchers.slots, []
        for request in plan.requests:
            draft = Draft(slot=request.slot, method=METHOD)
            if request.slot in structured:
                limit = min(request.max_tokens, self._cap)
                token_ids = tuple(self._matchers.forced(request.slot, request.unverified, limit))
                if token_ids:
                    confidences = (_SURE,) * len(token_ids)
                    draft = Draft(slot=request.slot, method=METHOD, token_ids=token_ids, confidences=confidences)
            drafts.append(draft)
        return Proposals(drafts=tuple(drafts))

    def commit(self, continuations: Sequence[Continuation]) -> None:
        pass

    def release(self, slot: int) -> None:
        pass
