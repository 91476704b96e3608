"""Drafts of a second, smaller model with weights and a KV cache of its own.

The cache has the target's blocks: one block table, one set of block numbers, two tensors. Owns the course from
a wish to a draft; draft_kv keeps the books of the cache, passes runs the loop. Speculative decoding with a
small model: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
"""

from collections.abc import Callable, Sequence

from faser.engine.plan import Draft, DraftPlan, DraftWish, SequenceStart
from faser.engine.spec.draft_choice import DraftChoice
from faser.engine.spec.draft_kv import DraftKv
from faser.engine.spec.drafter import Continuation, Proposals
from faser.engine.spec.passes import DraftLoop

METHOD = "draft_model"
_USUAL_ROWS = 2  # after a whole draft was accepted: its last token, which was no row, and the target's own


class DraftModel:
    """See Drafter. max_positions: the draft model computes no position beyond; longer sequences draft nothing.

    A sequence's first draft computes its whole prompt, as far as no block of it was computed before, and the
    first one after a pause what came in the meantime: all before any token is drafted.
    """

    def __init__(self, loop: DraftLoop, kv: DraftKv, choice: DraftChoice, *, max_positions: int) -> None:
        self._loop = loop
        self._kv = kv
        self._choice = choice
        self._max_positions = max_positions

    @property
    def drafts_ahead(self) -> bool:
        return not self._choice.draws

    def start(self, start: SequenceStart) -> None:
        self._kv.start(start.slot, start.token_ids)
        self._choice.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        assert self.drafts_ahead or not any(wish.behind for wish in plan.wishes), "drawn drafts cannot go ahead"
        limits = [min(wish.max_tokens, self._room(wish)) for wish in plan.wishes]
        openings = [
            self._kv.open(wish.slot, limit, wish.behind)
            for wish, limit in zip(plan.wishes, limits, strict=True)
            if limit > 0
        ]
        found = self._loop.draft(openings, plan.stop, until, names_likely=plan.names_likely)
        behind = {wish.slot: wish.behind for wish in plan.wishes}
        drafts = {slot: Draft(slot=slot, method=METHOD) for slot in behind}
        for opening, course in zip(openings, found.courses, strict=True):
            self._kv.fill(opening.slot, behind[opening.slot] + course.token_ids[: course.num_fed])
            drafts[opening.slot] = Draft(
                slot=opening.slot,
                method=METHOD,
                token_ids=course.token_ids,
                confidences=course.confidences,
            )
        return Proposals(
            drafts=tuple(drafts.values()),
            passes=found.passes,
            catchup_tokens=sum(max(0, len(each.token_ids) - _USUAL_ROWS) for each in openings),
            probs=found.probs,
            top_ids=found.top_ids,
        )

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for each in continuations:
            self._kv.extend(each.slot, each.token_ids)

    def release(self, slot: int) -> None:
        self._kv.release(slot)

    def _room(self, wish: DraftWish) -> int:
        """Tokens that can be drafted: the last of them is no row, so it may lie just beyond the last position."""
        return self._max_positions - self._kv.num_known(wish.slot) - len(wish.behind) + 1
