"""Drafts of a head: a small model that reads the target's hidden states (execution/heads).

The target's steps leave the states of committed tokens in states.py; the head reads those that it has not read yet
when its next draft is asked for, and draws its keys and values in a cache of its own (head_cache.py). What states
there never were of, as after a prefix that the target's cache had, or no longer are, the head drafts without.
"""

from array import array
from collections.abc import Callable, Sequence

from faser.config.drafters import MOST_STATES_READ
from faser.engine.contract.plan import Draft, DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafters.drafter import Continuation, Proposals
from faser.engine.execution.drafters.head_cache import HeadCache
from faser.engine.execution.drafters.head_passes import HeadInput, HeadPassLoop
from faser.engine.execution.drafters.passes import DraftInput
from faser.engine.execution.drafters.states import HiddenStates


class _Line:
    """One slot. token_ids: all known ones. next_state: the first position whose state the head has not read.

    num_new: tokens that the last step brought.
    """

    __slots__ = ("next_state", "num_new", "token_ids")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = array("i", token_ids)
        self.next_state = 0
        self.num_new = 1


class HeadDrafter:
    """See Drafter. method: its name in config/drafters.py. max_tokens: of the longest draft; None: of any length.

    A slot that no block is left for gives back its own and begins anew; if that is too little it has no draft.
    """

    drafts_overlapped = False  # it needs the states of the tokens that it continues

    def __init__(
        self,
        method: str,
        loop: HeadPassLoop,
        states: HiddenStates,
        cache: HeadCache,
        *,
        max_tokens: int | None = None,
    ) -> None:
        self._method = method
        self._max_tokens = max_tokens
        self._loop = loop
        self._states = states
        self._cache = cache
        self._lines: dict[int, _Line] = {}

    def start(self, start: SequenceStart) -> None:
        self._lines[start.slot] = _Line(start.token_ids)
        self._states.start(start.slot)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        found = {each.slot: each_input for each in plan.requests if (each_input := self._input(each)) is not None}
        inputs = [*found.values()]
        batch = self._loop.draft(inputs, plan.stop, until)
        drafts = {
            slot: Draft(slot=slot, method=self._method, token_ids=token_ids, confidences=confidences)
            for slot, token_ids, confidences in zip(found, batch.token_ids, batch.confidences, strict=True)
        }
        catchup_tokens = 0
        for each in inputs:
            slot, count = each.rows.slot, len(each.rows.token_ids)
            line = self._lines[slot]
            catchup_tokens += max(0, count - line.num_new)
            self._cache.set_rows(slot, each.rows.start + count)
            line.next_state = len(line.token_ids) - 1
            self._states.forget(slot, line.next_state - 1)  # keeps the last one, to draft from it again
        return Proposals(
            drafts=tuple(
                [drafts.get(each.slot) or Draft(slot=each.slot, method=self._method) for each in plan.requests]
            ),
            passes=batch.passes,
            catchup_tokens=catchup_tokens,
            probs=batch.probs,
        )

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for each in continuations:
            line = self._lines[each.slot]
            line.token_ids.extend(each.token_ids)
            line.num_new = len(each.token_ids)

    def release(self, slot: int) -> None:
        self._lines.pop(slot, None)
        self._states.release(slot)
        self._cache.begin_anew(slot)

    def _input(self, request: DraftRequest) -> HeadInput | None:
        """Committed tokens that the head has not read, at least the last one; None: it cannot draft.

        The state of position p goes with the token at p + 1.
        """
        assert not request.unverified, f"slot {request.slot}: {self._method} continues no unverified tokens"
        slot, line = request.slot, self._lines[request.slot]
        num_known = len(line.token_ids)
        last = num_known - 2  # the state that predicted the last known token
        first = min(max(line.next_state, num_known - 1 - MOST_STATES_READ), last)
        pieces = self._states.pieces(slot, first)
        if not pieces or pieces[-1].end != last + 1:
            return None
        place = self._cache.num_rows(slot)
        if first < line.next_state:  # the last row once more: nothing has come since
            place -= 1
        count = sum([piece.count for piece in pieces])
        max_tokens = min(request.max_tokens, self._max_tokens or request.max_tokens)
        more = count + max_tokens - 1  # the last draft token is no row
        if not self._cache.reserve(slot, place + more):
            self._cache.begin_anew(slot)
            place = 0
            if not self._cache.reserve(slot, more):
                return None
        token_ids = array("i")
        for piece in pieces:
            token_ids.extend(line.token_ids[piece.position + 1 : piece.end + 1])
        rows = DraftInput(slot=slot, start=place, token_ids=token_ids, max_tokens=max_tokens)
        return HeadInput(rows=rows, position=num_known - count, pieces=pieces)
