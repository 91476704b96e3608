"""Drafts of a second, smaller model with weights and a KV cache of its own.

The cache has the target's blocks: one block table, one set of block numbers, two tensors. Turns requests into
drafts: draft_kv_cache.py knows what the cache holds, passes.py runs the loop. Speculative decoding with a small
model: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
"""

from collections.abc import Callable, Sequence

from faser.engine.contract.plan import Draft, DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafters.draft_kv_cache import DraftKvCache
from faser.engine.execution.drafters.draft_samplers import DraftSampler
from faser.engine.execution.drafters.drafter import Continuation, Proposals
from faser.engine.execution.drafters.passes import DraftLoop

METHOD = "draft_model"
_USUAL_ROWS = 2  # after a whole draft is accepted: its last token, which was no row, and the bonus token


class DraftModel:
    """See Drafter. max_positions: the context length of the draft model; longer sequences draft nothing.

    The first draft of a sequence computes all of its prompt that no block in the cache holds, and the first one
    after a pause all tokens since the last one, before any token is drafted.
    """

    def __init__(self, loop: DraftLoop, kv: DraftKvCache, sampler: DraftSampler, *, max_positions: int) -> None:
        self._loop = loop
        self._kv = kv
        self._sampler = sampler
        self._max_positions = max_positions

    @property
    def drafts_overlapped(self) -> bool:
        return not self._sampler.draws

    def start(self, start: SequenceStart) -> None:
        self._kv.start(start.slot, start.token_ids)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        assert self.drafts_overlapped or not any(request.unverified for request in plan.requests), (
            "drafts that are drawn cannot continue unverified tokens"
        )
        rooms = [(request, self._room(request)) for request in plan.requests]
        drafting = [(request, room) for request, room in rooms if room > 0]
        inputs = [
            self._kv.missing(request.slot, min(request.max_tokens, room), request.unverified)
            for request, room in drafting
        ]
        batch = self._loop.draft(inputs, plan.stop, until)
        drafts = {}
        for (request, _), token_ids, confidences, num_fed in zip(
            drafting, batch.token_ids, batch.confidences, batch.num_fed, strict=True
        ):
            slot = request.slot
            self._kv.fill(slot, request.unverified + token_ids[:num_fed])
            drafts[slot] = Draft(slot=slot, method=METHOD, token_ids=token_ids, confidences=confidences)
        return Proposals(
            drafts=tuple(
                [drafts.get(each.slot) or Draft(slot=each.slot, method=METHOD) for each in plan.requests]
            ),
            passes=batch.passes,
            catchup_tokens=sum([max(0, len(each.token_ids) - _USUAL_ROWS) for each in inputs]),
            probs=batch.probs,
        )

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for each in continuations:
            self._kv.extend(each.slot, each.token_ids)

    def release(self, slot: int) -> None:
        self._kv.release(slot)

    def _room(self, request: DraftRequest) -> int:
        """How many tokens can be drafted. The last of them is no row, so its position may be max_positions."""
        return self._max_positions - self._kv.num_known(request.slot) - len(request.unverified) + 1
