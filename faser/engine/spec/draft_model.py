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
from faser.engine.spec.passes import Course, DraftLoop

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
        openings = []
        for wish in plan.wishes:
            room = self._room(wish)
            if room > 0:
                openings.append(self._kv.open(wish.slot, min(wish.max_tokens, room), wish.behind))
        found = self._loop.draft(openings, plan.stop, until, names_likely=plan.names_likely)
        courses = {each.slot: course for each, course in zip(openings, found.courses, strict=True)}
        return Proposals(
            drafts=tuple([self._drafted(wish, courses.get(wish.slot)) for wish in plan.wishes]),
            passes=found.passes,
            catchup_tokens=sum([max(0, len(each.token_ids) - _USUAL_ROWS) for each in openings]),
            probs=found.probs,
            top_ids=found.top_ids,
        )

    def _drafted(self, wish: DraftWish, course: Course | None) -> Draft:
        """course: None: the model has no positions left."""
        if course is None:
            return Draft(slot=wish.slot, method=METHOD)
        self._kv.fill(wish.slot, wish.behind + course.token_ids[: course.num_fed])
        return Draft(slot=wish.slot, method=METHOD, token_ids=course.token_ids, confidences=course.confidences)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for each in continuations:
            self._kv.extend(each.slot, each.token_ids)

    def release(self, slot: int) -> None:
        self._kv.release(slot)

    def _room(self, wish: DraftWish) -> int:
        """Tokens that can be drafted: the last of them is no row, so it may lie just beyond the last position."""
        return self._max_positions - self._kv.num_known(wish.slot) - len(wish.behind) + 1
