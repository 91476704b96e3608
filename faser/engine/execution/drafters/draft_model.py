"""Drafts of a second, smaller model with weights and a KV cache of its own.

The cache has the target's blocks: one block table, one set of block numbers, two tensors. Owns the course from
a request to a draft; draft_kv keeps the books of the cache, passes runs the loop. Speculative decoding with a
small model: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
"""

from collections.abc import Callable, Sequence

from faser.engine.contract.plan import Draft, DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafters.draft_kv_cache import DraftKv
from faser.engine.execution.drafters.draft_samplers import DraftSampler
from faser.engine.execution.drafters.drafter import Continuation, Proposals
from faser.engine.execution.drafters.passes import DraftLoop, DraftOutput

METHOD = "draft_model"
_USUAL_ROWS = 2  # after a whole draft was accepted: its last token, which was no row, and the target's own


class DraftModel:
    """See Drafter. max_positions: the draft model computes no position beyond; longer sequences draft nothing.

    A sequence's first draft computes its whole prompt, as far as no block of it was computed before, and the
    first one after a pause what came in the meantime: all before any token is drafted.
    """

    def __init__(self, loop: DraftLoop, kv: DraftKv, choice: DraftSampler, *, max_positions: int) -> None:
        self._loop = loop
        self._kv = kv
        self._choice = choice
        self._max_positions = max_positions

    @property
    def drafts_overlapped(self) -> bool:
        return not self._choice.draws

    def start(self, start: SequenceStart) -> None:
        self._kv.start(start.slot, start.token_ids)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        assert self.drafts_overlapped or not any(request.unverified for request in plan.requests), (
            "drawn drafts cannot go ahead"
        )
        openings = []
        for request in plan.requests:
            room = self._room(request)
            if room > 0:
                openings.append(self._kv.open(request.slot, min(request.max_tokens, room), request.unverified))
        found = self._loop.draft(openings, plan.stop, until, wants_top_ids=plan.wants_top_ids)
        courses = {each.slot: course for each, course in zip(openings, found.courses, strict=True)}
        return Proposals(
            drafts=tuple([self._drafted(request, courses.get(request.slot)) for request in plan.requests]),
            passes=found.passes,
            catchup_tokens=sum([max(0, len(each.token_ids) - _USUAL_ROWS) for each in openings]),
            probs=found.probs,
            top_ids=found.top_ids,
        )

    def _drafted(self, request: DraftRequest, course: DraftOutput | None) -> Draft:
        """course: None: the model has no positions left."""
        if course is None:
            return Draft(slot=request.slot, method=METHOD)
        self._kv.fill(request.slot, request.unverified + course.token_ids[: course.num_fed])
        return Draft(slot=request.slot, method=METHOD, token_ids=course.token_ids, confidences=course.confidences)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for each in continuations:
            self._kv.extend(each.slot, each.token_ids)

    def release(self, slot: int) -> None:
        self._kv.release(slot)

    def _room(self, request: DraftRequest) -> int:
        """Tokens that can be drafted: the last of them is no row, so it may lie just beyond the last position."""
        return self._max_positions - self._kv.num_known(request.slot) - len(request.unverified) + 1
