"""Drafts of a second, smaller model with weights and a KV cache of its own.

The cache has the target's blocks (block_marks.py). Speculative decoding with a small model: Leviathan et al.,
arXiv 2211.17192; Chen et al., arXiv 2302.01318.
"""

from collections.abc import Callable, Sequence

from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafting.ahead import AheadLoop, DraftsAhead, FollowedStep, depth_of
from faser.engine.execution.drafting.block_marks import BlockMarks, MarkedLine
from faser.engine.execution.drafting.cold_state import differs_from_cold
from faser.engine.execution.drafting.drafter import Proposals, by_slot
from faser.engine.execution.drafting.loop import DraftBatch, DraftInput, DraftLoop, ModelPasses
from faser.engine.execution.drafting.samplers import DraftSampler
from faser.engine.execution.runner.batch import BlockTable

METHOD = "draft_model"
_USUAL_ROWS = 2  # after a whole draft is accepted: its last token, which was no row, and the bonus token


class DraftModel:
    """Drafter that runs a second, smaller model. passes: those of the loop.

    max_positions: the context length of the draft model; longer sequences draft nothing. ahead: launches drafts
    behind steps that the host has not read; None: that cannot be done.

    The first draft of a sequence computes all of its prompt that no block in the cache holds, and the first one
    after a pause all tokens since the last one, before any token is drafted.
    """

    def __init__(
        self,
        loop: DraftLoop,
        passes: ModelPasses,
        kv: "DraftKvCache",
        sampler: DraftSampler,
        *,
        max_positions: int,
        ahead: AheadLoop | None = None,
    ) -> None:
        self._loop = loop
        self._ahead = ahead
        self._launched: list[DraftsAhead] = []  # that have not been read, at most two
        self._passes = passes
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
        rooms = [min(request.max_tokens, self._room(request)) for request in plan.requests]
        drafting = [at for at, room in enumerate(rooms) if room > 0]
        asked = [plan.requests[at] for at in drafting]
        inputs = [
            self._kv.missing(request.slot, rooms[at], request.unverified)
            for at, request in zip(drafting, asked, strict=True)
        ]
        batch = self._loop.draft(inputs, plan.stop, until)
        for request, token_ids, num_fed in zip(asked, batch.token_ids, batch.num_fed.tolist(), strict=True):
            self._kv.fill(request.slot, (*request.unverified, *token_ids[:num_fed].tolist()))
        return Proposals(
            table=batch.table(plan, METHOD, drafting),
            passes=batch.passes,
            catchup_tokens=sum([max(0, len(each.token_ids) - _USUAL_ROWS) for each in inputs]),
            probs=batch.probs,
        )

    @property
    def follows(self) -> bool:
        """Return whether drafts may be launched behind a step that is in flight."""
        return self._ahead is not None

    def follow(self, plan: DraftPlan, step: FollowedStep) -> DraftsAhead | None:
        """Launch drafts behind a step in flight, which may itself verify such drafts.

        None: some sequence lacks more than two tokens or has no room, or graphs are missing; nothing was launched.
        """
        assert self._ahead is not None, "nothing is launched ahead"
        depth = depth_of(plan)  # every sequence has a row in every pass
        for slot, *_ in plan.requests:
            at = step.numbers[slot]
            most = int(step.most[at])
            if self._max_positions - int(step.known[at]) - most + 1 < depth:
                return None
            if not (any(slot in each.live for each in self._launched) or self._kv.can_follow(slot, most - 1)):
                return None
        found = self._ahead.launch(plan, step)
        if found is not None:
            self._launched.append(found)
            for slot in found.slots:
                self._kv.follow(slot)
        return found

    def read(self, drafts: DraftsAhead) -> tuple[DraftBatch, Proposals]:
        """Wait for drafts that were launched ahead. Before their step is committed."""
        assert self._launched.pop(0) is drafts, "read out of order"
        batch = drafts.read()
        for at, slot in enumerate(drafts.slots):
            if slot in drafts.live:
                self._kv.fill(slot, tuple(batch.token_ids[at, : batch.num_fed[at]].tolist()))
        table = batch.table(drafts.plan, METHOD, range(len(drafts.slots)))
        return batch, Proposals(table=table, passes=batch.passes)

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, tokens in by_slot(slots, counts, token_ids):
            self._kv.extend(slot, tokens)

    def release(self, slot: int) -> None:
        for each in self._launched:
            each.live.discard(slot)
        self._kv.release(slot)

    def rebuild(self, method: str, slot: int | None, /) -> bool:
        if method != METHOD or slot is None or not (token_ids := self._kv.computed(slot)):
            return False
        everything = DraftInput(slot=slot, start=0, token_ids=token_ids, max_tokens=1)
        memory, blocks = self._passes.runner.repeatable_memory(), self._kv.computed_blocks(slot)
        differs = differs_from_cold(memory, blocks, lambda: self._passes.read([everything]))
        if differs:
            self._kv.distrust(slot)
        return differs

    def _room(self, request: DraftRequest) -> int:
        """Return how many tokens can be drafted. The last one is no row, so its position may be max_positions."""
        return self._max_positions - self._kv.num_known(request.slot) - len(request.unverified) + 1


class DraftKvCache:
    """Contents of a draft model's cache: how many tokens of each slot, and, by marks, of each block. No tensors.

        position    0 ......... computed ......... num_known | unverified and draft tokens
        draft KV    |    valid     |      missing            | fed: valid as far as the sequence agrees with them

    There are fed tokens only where no known token is missing. table: the block table of target and draft model.
    """

    def __init__(self, table: BlockTable, *, num_blocks: int, block_size: int) -> None:
        self._table = table
        self._marks = BlockMarks(table, num_blocks=num_blocks, block_size=block_size)
        self._sequences: dict[int, _CachedSequence] = {}

    def start(self, slot: int, token_ids: Sequence[int]) -> None:
        self._sequences[slot] = _CachedSequence(token_ids)

    def release(self, slot: int) -> None:
        self._sequences.pop(slot, None)

    def num_held(self, slot: int) -> int:
        """Leading tokens of the sequence that need not be computed. Before its first draft: in adopted blocks."""
        sequence = self._sequences[slot]
        if not sequence.adopted:
            sequence.computed = self._marks.adopt(slot, sequence)
        return sequence.computed

    def num_known(self, slot: int) -> int:
        return len(self._sequences[slot].token_ids)

    def computed(self, slot: int) -> Sequence[int]:
        """The leading tokens of the sequence that the cache holds; none of a slot without a sequence."""
        sequence = self._sequences.get(slot)
        return () if sequence is None else sequence.token_ids[: sequence.computed]

    def computed_blocks(self, slot: int) -> list[int]:
        """The blocks of these tokens."""
        return self._table.blocks(slot)[: -(-self._sequences[slot].computed // self._marks.block_size)]

    def distrust(self, slot: int) -> None:
        """The slot's tokens have had to be computed again: so must what no sequence holds, and what was fed."""
        self._marks.keep(self._sequences)
        self._sequences[slot].fed = ()

    def missing(self, slot: int, max_tokens: int, unverified: tuple[int, ...] = ()) -> DraftInput:
        """The known and unverified tokens that the cache lacks, and in any case the last one of all.

        Their blocks lose their marks. Reads the block table, which must hold the blocks of all these tokens and of
        max_tokens more.
        """
        sequence = self._sequences[slot]
        if not sequence.adopted:
            sequence.computed = self._marks.adopt(slot, sequence)
            sequence.adopted = True
        num_known = len(sequence.token_ids)
        start = min(sequence.computed + _num_shared(sequence.fed, unverified), num_known + len(unverified) - 1)
        self._marks.clear(slot, sequence, start)
        missing: Sequence[int]
        if start >= num_known:
            missing = unverified[start - num_known :]
        else:
            missing = sequence.token_ids[start:]
            missing.extend(unverified)
        return DraftInput(slot=slot, start=start, token_ids=missing, max_tokens=max_tokens)

    def can_follow(self, slot: int, num_drafts: int) -> bool:
        """Return whether all but the last two tokens will be there once a step has verified its draft tokens.

        Those are the tokens that were fed last, if there are any.
        """
        sequence = self._sequences[slot]
        lacking = len(sequence.token_ids) - sequence.computed
        return sequence.adopted and lacking <= (num_drafts == 0) and len(sequence.fed) >= num_drafts - 1

    def follow(self, slot: int) -> None:
        """A draft is launched behind the known tokens and those that a step brings; `fill` follows."""
        sequence = self._sequences[slot]
        self._marks.clear(slot, sequence, len(sequence.token_ids))

    def fill(self, slot: int, fed: tuple[int, ...]) -> None:
        """The cache now holds all known tokens, and after them fed: unverified tokens and draft tokens."""
        sequence = self._sequences[slot]
        sequence.computed = len(sequence.token_ids)
        sequence.fed = fed
        self._marks.mark(slot, sequence, sequence.computed)

    def extend(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """The sequence continues with token_ids. Fed tokens that agree stay; later ones do if all agree."""
        sequence = self._sequences[slot]
        if sequence.fed:
            num_shared = _num_shared(sequence.fed, token_ids)
            sequence.computed += num_shared
            sequence.fed = sequence.fed[num_shared:] if num_shared == len(token_ids) else ()
        sequence.token_ids.extend(token_ids)
        self._marks.mark(slot, sequence, sequence.computed)

    def check_invariants(self) -> None:
        """Raises AssertionError where counts, marks and tokens disagree. Slow: for tests."""
        for slot, sequence in self._sequences.items():
            size = self._marks.block_size
            assert 0 <= sequence.computed <= len(sequence.token_ids)
            assert sequence.num_marked * size <= sequence.computed
            assert not sequence.fed or sequence.computed == len(sequence.token_ids)
            assert sequence.computed + len(sequence.fed) <= len(self._table.blocks(slot)) * size
            self._marks.check_invariants(slot, sequence)


class _CachedSequence(MarkedLine):
    """One slot. computed: known tokens in the cache. fed: the tokens after all known ones that it holds as well.

    adopted: blocks that were computed before this sequence started have been looked for.
    """

    __slots__ = ("adopted", "computed", "fed")

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__(token_ids)
        self.computed = 0
        self.fed: tuple[int, ...] = ()
        self.adopted = False


def _num_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Count the leading tokens that are equal."""
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count
    return next(i for i in range(count) if one[i] != other[i])
