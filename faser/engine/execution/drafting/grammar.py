"""Drafts that the grammar of an answer dictates: the text that it leaves no choice about.

Such text is most of a JSON object with long keys. It is divided into tokens as the tokenizer does it; the model
may choose another division, so that these drafts are verified like all others. The idea is in SGLang's
jump-forward decoding and in llguidance's fast-forward tokens, which skip the model there and so may change the
answer.
"""

from collections.abc import Callable, Sequence

import numpy as np

from faser.engine.contract.drafts import NO_DRAFTS, empty_table
from faser.engine.contract.plan import DraftPlan, SequenceStart
from faser.engine.execution.drafting.drafter import Proposals
from faser.engine.structure.sequence_matchers import SequenceMatchers

METHOD = "grammar"
_SURE = 0.99  # the confidence of each token
_NONE = np.zeros(0, dtype=np.int64)
_NOTHING = Proposals(table=NO_DRAFTS)


class GrammarDrafter:
    """Drafter of tokens that a grammar dictates. It keeps nothing of a slot: the matchers belong to the sampler.

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
        structured = self._matchers.slots
        if not structured and not self._alone:
            return _NOTHING
        table = empty_table([each.slot for each in plan.requests], METHOD, plan.width)
        for at, request in enumerate(plan.requests):
            if request.slot in structured:
                limit = min(request.max_tokens, self._cap)
                token_ids = self._matchers.forced(request.slot, request.unverified, limit)
                table.lengths[at] = count = len(token_ids)
                table.token_ids[at, :count], table.confidences[at, :count] = token_ids, _SURE
        return Proposals(table=table if self._alone or table.lengths.any() else table.take(_NONE))

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        pass

    def release(self, slot: int) -> None:
        pass
