"""HeadRunner: runs a head over rows. Owns the head's KV cache and the hidden states of its last pass.

A pass over rows of committed tokens takes the target's states; a pass over draft tokens takes, in their place, the
head's own hidden states of the rows that drafted them (arXiv 2503.01840, section 3.1).

The drafting loop of a head: a first pass over committed tokens, with the target's states, then one per token.

Remembers nothing from one proposal to the next. Positions and places differ: a token has a position in its
sequence, which its random numbers depend on, and its row has a place in the head's cache.

    position      p ................. n - 1 | n         n + 1     ...
    states        p - 1 ............. n - 2 | -         -                the target's, which predicted the token
    rows          |  HeadInput: committed   | x_1       x_2       ...
    hidden        |  of the pass            | of p - 1's row, in place of states, and so on

HeadCache: which blocks of a head's own KV cache each slot holds, and how many rows the head has computed there.

Counts and block numbers only. A row's place is its number among the rows that the head has computed for the slot,
not its position in the sequence: so the cache knows nothing of prefixes that others have computed, and a gap in
the states leaves no hole. Rotary embeddings turn by distance, so only distances across a gap are wrong.

    position   | cached prefix | 40  41  42 ...... 58 | gap | 64 ... 70 |
    row        |               |  0   1   2 ...... 18 |     | 19 ... 25 | draft rows: overwritten by the next draft

Drafts of a head: a small model that reads the target's hidden states (execution/heads).

The target's steps leave the states of committed tokens in states.py; the head reads those that it has not read yet
when its next draft is asked for, and draws its keys and values in a cache of its own (head_cache.py). What states
there never were of, as after a prefix that the target's cache had, or no longer are, the head drafts without.

HeadVersions: the head that an engine began with, and refreshed versions of it that came while it ran.

    sequence     starts ............................... ends
    its head     the newest one then; it keeps that one        whatever is adopted meanwhile
    with a salt  the first one, always

Keys and values that a head has drawn are its own, so a sequence never changes its head. A refreshed head has
learned from the texts of clients who share a cache; how well it drafts says something about these texts. So it
never drafts for a sequence with a salt, whose client shares nothing with others.

A version ends with its last sequence, unless it is the first or the newest one.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.config.drafters import MOST_STATES_READ
from faser.engine.contract.plan import Draft, DraftPlan, DraftRequest, SequenceStart, StopRule
from faser.engine.execution.drafting.drafter import Continuation, Drafter, Proposals
from faser.engine.execution.drafting.eagle3 import Head
from faser.engine.execution.drafting.head_states import HiddenStates, StatePiece
from faser.engine.execution.drafting.loop import DraftBatch, DraftInput, DraftProgress, chunks, cut, rows_of
from faser.engine.execution.drafting.samplers import DraftRows, DraftSampler, PredictingSampler
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.head_drafting import DraftedTokens, DraftRules, HeadRows, StopNumbers
from faser.kernels.interface.sampling.sampling_kernels import SamplingKernels
from faser.kernels.interface.shapes import KvCache, KvShape, RowLayout


class HeadRunner:
    """To be called in inference mode. vocab_size: the target's: token ids of inputs are below it.

    kv: size of the head's cache, which the runner allocates. states: the target's buffer, [max_rows, K * H].
    shares_cache_of: a runner of another version of the head; None: the cache is this one's own.
    """

    def __init__(
        self,
        head: Head,
        backend: Backend,
        kv: KvShape,
        *,
        states: Tensor,
        vocab_size: int,
        shares_cache_of: "HeadRunner | None" = None,
    ) -> None:
        self.head = head
        self.vocab_size = vocab_size
        self._backend = backend
        self._block_size = kv.block_size
        self._cache: KvCache = backend.allocate_kv(kv) if shares_cache_of is None else shares_cache_of._cache
        self._hidden: Tensor | None = None  # [R, Hh]
        drafting, stack = backend.head_drafting, head.drafting_stack
        takes = drafting is not None and stack is not None and drafting.takes(stack)
        self._drafting = drafting if takes else None
        self._dummy_states = states.zero_()  # for passes that are only timed

    @property
    def sampling_kernels(self) -> SamplingKernels | None:
        return self._backend.sampling_kernels

    def read(self, batch: RowBatch, states: Tensor) -> Tensor:
        """A pass over committed tokens. states: [R, K * H] of the positions before them.

        Returns hidden [R, Hh], valid until the next pass.
        """
        return self._run(batch.token_ids, batch.layout, self.head.features(states))

    def draft(self, token_ids: Tensor, layout: RowLayout, hidden: Tensor) -> Tensor:
        """A pass over draft tokens, [R] int64 on the CPU.

        hidden: [R, Hh] of the rows that drafted them; may be what `draft` returned.
        """
        return self._run(token_ids, layout, hidden)

    def logits_of(self, hidden: Tensor) -> Tensor:
        """[N, Vd] float32 of the head's vocabulary; valid until the next call. hidden: [N, Hh]."""
        return self.head.logits(hidden)

    @property
    def drafts_in_one_call(self) -> bool:
        return self._drafting is not None

    def draft_all(self, batch: RowBatch, states: Tensor, rules: DraftRules) -> DraftedTokens:
        """All tokens of the drafts that follow committed tokens, as `read`, `logits_of` and `draft` give them.

        batch, states: as for `read`; every sequence is there with its last token.
        """
        stack = self.head.drafting_stack
        assert self._drafting is not None, "see drafts_in_one_call"
        assert stack is not None
        rows = HeadRows(token_ids=batch.token_ids, states=states, layout=batch.layout)
        return self._drafting.draft(stack, self._cache, rows, rules, self.head.draft_room(batch.num_rows))

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> None:
        """A pass as `read` runs it, to be timed."""
        self._hidden = self.read(batch, self._dummy_states[: batch.num_rows])

    @torch.inference_mode()
    def fill_cache(self, layout: RowLayout) -> None:
        """Store some keys and values where a pass over these rows would store its own."""
        num_rows = len(layout.positions)
        token_ids = torch.arange(num_rows, device=self._backend.device) % self.vocab_size
        features = self.head.features(self._dummy_states[:num_rows])
        self.head.run(token_ids, features, self._cache, self._backend.plan(layout, self._block_size))

    @torch.inference_mode()
    def logits(self, rows: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Of rows of the last `forward`."""
        assert self._hidden is not None, "logits before forward"
        numbers = torch.from_numpy(np.asarray(rows, dtype=np.int64)).to(self._hidden.device)
        return self.logits_of(self._hidden.index_select(0, numbers))

    def _run(self, token_ids: Tensor, layout: RowLayout, features: Tensor) -> Tensor:
        plan = self._backend.plan(layout, self._block_size)
        return self.head.run(token_ids.to(self._backend.device), features, self._cache, plan)


@dataclass(slots=True, kw_only=True)
class HeadInput:
    """Where one sequence's draft begins. rows: start is the place of the first one in the head's cache.

    position: of the first row's token. pieces: the states of the positions before those of the rows.
    """

    rows: DraftInput
    position: int
    pieces: list[StatePiece]


class HeadPassLoop:
    """table: of the head's cache. max_rows: most rows of a pass. sampler: of the head's vocabulary.

    predicts: how it chooses, where the runner can draft in one call with it; None: a pass after another.
    """

    def __init__(
        self,
        runner: HeadRunner,
        table: BlockTable,
        states: HiddenStates,
        sampler: DraftSampler,
        *,
        max_rows: int,
        predicts: PredictingSampler | None = None,
    ) -> None:
        self._predicts = predicts if runner.drafts_in_one_call else None
        self._runner = runner
        self._table = table
        self._states = states
        self._sampler = sampler
        self._max_rows = max_rows

    @torch.inference_mode()
    def draft(
        self,
        inputs: Sequence[HeadInput],
        stop: StopRule | None,
        until: Callable[[], bool] | None = None,
        *,
        wants_top_ids: bool = False,
    ) -> DraftBatch:
        """As DraftLoop.draft."""
        if not inputs:
            return DraftBatch()
        num_rows = sum([len(each.rows.token_ids) for each in inputs])
        if self._predicts is not None and until is None and not wants_top_ids and num_rows <= self._max_rows:
            return self._in_one_call(self._predicts, inputs, stop)
        progress = DraftProgress([each.rows for each in inputs], wants_top_ids)
        shifts = np.array([each.position - each.rows.start for each in inputs])  # from places to positions
        progress.draft_starts += shifts
        hidden, passes = self._read(inputs)
        active = np.arange(len(inputs))
        drafting = _Drafting.of(self._table, progress.slots, progress.draft_starts - shifts)
        rows = DraftRows(
            slots=progress.slots,
            positions=progress.draft_starts,
            draft_starts=progress.draft_starts,
            wants_top_ids=wants_top_ids,
        )
        while True:
            tokens = self._sampler.choose(self._runner.logits_of(hidden), rows)
            staying = progress.take(active, tokens, stop)
            if not len(staying) or (until is not None and until()):
                return progress.batch(passes)
            if len(staying) < len(active):
                kept = torch.from_numpy(np.searchsorted(active, staying))
                hidden, drafting = hidden.index_select(0, kept.to(hidden.device)), drafting.among(kept)
            active = staying
            token_ids, rows = progress.feed(active)
            hidden = self._runner.draft(torch.from_numpy(token_ids), drafting.next_layout(), hidden)
            passes += 1

    def _in_one_call(
        self, predicts: PredictingSampler, inputs: Sequence[HeadInput], stop: StopRule | None
    ) -> DraftBatch:
        slots = np.array([each.rows.slot for each in inputs])
        draft_starts = np.array([each.position + len(each.rows.token_ids) for each in inputs])
        max_tokens = np.array([each.rows.max_tokens for each in inputs])
        ahead = predicts.ahead(slots, draft_starts, int(max_tokens.max()))
        found = self._runner.draft_all(
            rows_of([each.rows for each in inputs], self._table),
            self._states_of(inputs),
            DraftRules(
                max_tokens=max_tokens,
                window=predicts.window,
                stop=None
                if stop is None
                else StopNumbers(
                    row_price=stop.row_price,
                    pass_prices=stop.pass_prices,
                    intercept=stop.intercept,
                    slope=stop.slope,
                ),
                metadata=None if ahead is None else ahead.metadata,
                uniforms=None if ahead is None else ahead.uniforms,
            ),
        )
        counts = found.counts.tolist()
        return DraftBatch(
            token_ids=cut(found.token_ids, counts),
            confidences=cut(found.margins, counts),
            num_fed=tuple(found.num_fed.tolist()),
            passes=found.passes,
        )

    def _states_of(self, inputs: Sequence[HeadInput]) -> Tensor:
        return self._states.gather([piece for each in inputs for piece in each.pieces])

    def _read(self, inputs: Sequence[HeadInput]) -> tuple[Tensor, int]:
        """Hidden states of the last row of every input, [S, Hh], and how many passes that took."""
        states = self._states_of(inputs)
        ends, first, passes = [], 0, 0
        for pieces in chunks([each.rows for each in inputs], self._max_rows):
            batch = rows_of(pieces, self._table)
            hidden = self._runner.read(batch, states[first : first + batch.num_rows])
            first += batch.num_rows
            passes += 1
            last_rows = batch.last_rows[[piece.ends for piece in pieces]]
            ends.append(hidden.index_select(0, torch.from_numpy(last_rows).to(hidden.device)))
        return ends[0] if len(ends) == 1 else torch.cat(ends), passes


@dataclass(slots=True, kw_only=True)
class _Drafting:
    """S sequences with one row each in every pass: what is the same in all passes is looked up once.

    block_table: [S, B], query_start: [S + 1], as in RowLayout. places: [S] int32, of the rows of the next pass.
    """

    block_table: Tensor
    query_start: Tensor
    places: Tensor

    @classmethod
    def of(cls, table: BlockTable, slots: NDArray[np.int64], places: NDArray[np.int64]) -> "_Drafting":
        """places: [S] of the first draft tokens. The slots hold the blocks of the whole drafts."""
        held = [table.blocks(slot) for slot in slots.tolist()]
        width = max(map(len, held))
        return cls(
            block_table=torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in held], dtype=torch.int32),
            query_start=torch.arange(len(slots) + 1, dtype=torch.int32),
            places=torch.from_numpy(places.astype(np.int32)),
        )

    def among(self, kept: Tensor) -> "_Drafting":
        """Those at these positions, [N] int64."""
        return _Drafting(
            block_table=self.block_table[kept],
            query_start=self.query_start[: len(kept) + 1],
            places=self.places[kept],
        )

    def next_layout(self) -> RowLayout:
        """Of the rows of the next pass."""
        places = self.places
        self.places = places + 1
        return RowLayout(
            query_start=self.query_start,
            seq_len=self.places,
            positions=places,
            block_table=self.block_table,
        )


class HeadCache:
    """table: the head's own, with as many slots as the engine's. num_blocks: of its cache."""

    def __init__(self, table: BlockTable, *, num_slots: int, num_blocks: int, block_size: int) -> None:
        self.table = table
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_rows = [0] * num_slots

    def num_rows(self, slot: int) -> int:
        """Rows that the head has computed since the slot began anew."""
        return self._num_rows[slot]

    def set_rows(self, slot: int, num_rows: int) -> None:
        """The first num_rows places of the slot are rows of committed tokens."""
        self._num_rows[slot] = num_rows

    def reserve(self, slot: int, num_places: int) -> bool:
        """Let the slot hold blocks for this many places; False and unchanged where too few are free."""
        wanted = -(-num_places // self._block_size) - len(self.table.blocks(slot))
        if wanted <= 0:
            return True
        if wanted > len(self._free):
            return False
        self.table.append(slot, tuple([self._free.pop() for _ in range(wanted)]))
        return True

    def begin_anew(self, slot: int) -> None:
        """Give all blocks of the slot back: nothing of it is computed."""
        self._free.extend(reversed(self.table.blocks(slot)))
        self.table.clear(slot)
        self._num_rows[slot] = 0

    def check_invariants(self) -> None:
        """Raises AssertionError unless every block is free or held by one slot that has room. Slow: for tests."""
        held = [block for slot in range(len(self._num_rows)) for block in self.table.blocks(slot)]
        assert sorted([*held, *self._free]) == list(range(self._num_blocks))
        for slot, num_rows in enumerate(self._num_rows):
            assert num_rows <= len(self.table.blocks(slot)) * self._block_size


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
        batch = self._loop.draft(inputs, plan.stop, until, wants_top_ids=plan.wants_top_ids)
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
            top_ids=batch.top_ids,
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


MOST_REFRESHED = 2

_Each = TypeVar("_Each", DraftRequest, Continuation)


class HeadVersions:
    """A Drafter. make: the drafter of the head in a directory, over the states and the cache of the first one."""

    drafts_overlapped = False

    def __init__(self, first: Drafter, make: Callable[[Path], Drafter]) -> None:
        self._first = self._newest = first
        self._make = make
        self._by_slot: dict[int, Drafter] = {}

    @property
    def num_refreshed(self) -> int:
        """Refreshed versions that are in memory."""
        return len({*self._by_slot.values(), self._newest} - {self._first})

    def adopt(self, directory: Path) -> bool:
        """Let the head in directory draft for sequences that start from now on, unless they have a salt.

        False and unchanged while MOST_REFRESHED versions are in memory. Raises ModelError for a head that does not
        fit.
        """
        if self.num_refreshed >= MOST_REFRESHED:
            return False
        self._newest = self._make(directory)
        return True

    def start(self, start: SequenceStart) -> None:
        drafter = self._by_slot[start.slot] = self._newest if start.salt is None else self._first
        drafter.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        parts = self._divided(plan.requests)
        if len(parts) == 1:
            return next(iter(parts)).propose(plan, until)
        found = [drafter.propose(replace(plan, requests=tuple(own)), until) for drafter, own in parts.items()]
        return _joined([each.slot for each in plan.requests], found)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for drafter, own in self._divided(continuations).items():
            drafter.commit(own)

    def release(self, slot: int) -> None:
        self._by_slot.pop(slot).release(slot)

    def _divided(self, items: Iterable[_Each]) -> dict[Drafter, list[_Each]]:
        found: dict[Drafter, list[_Each]] = {}
        for each in items:
            found.setdefault(self._by_slot[each.slot], []).append(each)
        return found


def _joined(slots: Sequence[int], found: Sequence[Proposals]) -> Proposals:
    """The proposals of several versions as those of one drafter. slots: in the order of the plan."""
    drafts = {draft.slot: draft for each in found for draft in each.drafts}
    return Proposals(
        drafts=tuple([drafts[slot] for slot in slots]),
        passes=sum([each.passes for each in found]),
        catchup_tokens=sum([each.catchup_tokens for each in found]),
        probs=_lines(slots, [(each, each.probs) for each in found]),
        top_ids=_lines(slots, [(each, each.top_ids) for each in found]),
    )


def _lines(slots: Sequence[int], found: Sequence[tuple[Proposals, Tensor | None]]) -> Tensor | None:
    """Lines of draft tokens, [T, …] of each proposal, in the order of the plan; None where none has any."""
    by_slot: dict[int, Tensor] = {}
    for proposals, lines in found:
        if lines is not None:
            lengths = [len(draft.token_ids) for draft in proposals.drafts]
            by_slot |= zip([draft.slot for draft in proposals.drafts], torch.split(lines, lengths), strict=True)
    return torch.cat([by_slot[slot] for slot in slots if slot in by_slot]) if by_slot else None
