"""Drafts of a head: a small model that reads the target's hidden states (eagle3.py, mtp.py).

The target's steps leave the states of committed tokens in a ring (head_memory.py). The head reads those that it
has not read yet when its next draft is asked for, and draws its keys and values in a cache of its own. What states
there never were of, as after a prefix that the target's cache had, or no longer are, the head drafts without.

    position      p ................. n - 1 | n         n + 1     ...
    states        p - 1 ............. n - 2 | -         -                the target's, which predicted the token
    rows          |  committed tokens       | x_1       x_2       ...
    hidden        |  of the pass            | of the row that drafted the token, in place of states

Source: Li et al., arXiv 2503.01840, section 3.1.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.config.speculation import MOST_STATES_READ
from faser.engine.checkpoints.heads import HeadSpec
from faser.engine.contract.drafts import NO_TOKEN, Ints
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart, StopRule
from faser.engine.execution.drafting.block_loop import BlockLoop
from faser.engine.execution.drafting.cold_state import differs_from_cold
from faser.engine.execution.drafting.draft_vocabulary import DraftVocabulary
from faser.engine.execution.drafting.drafter import Proposals, by_slot
from faser.engine.execution.drafting.head_memory import HeadCache, HiddenStates, StatePiece
from faser.engine.execution.drafting.loop import DraftBatch, DraftInput, PassLoop, chunks, rows_of
from faser.engine.execution.drafting.samplers import DraftSampler, PointMassSampler
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.runner import repeatable_memory
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import (
    DraftedTokens,
    DraftRoom,
    DraftRules,
    HeadRows,
    HeadStack,
    StopNumbers,
)
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.sampling import SamplingKernels
from faser.kernels.interface.shapes import AttentionPlan, KvCache, RowLayout


class HeadDrafter:
    """See Drafter and Rebuilds.

    A slot that no block is left for gives back its own and begins anew; else it has no draft.

    method: what its drafts are called. trained: positions that the head was trained for. It may well draft beyond
    them; once a slot has had to be rebuilt there, all begin anew before they get there. vocabulary: the head's,
    which is told the tokens that the target generates.
    """

    drafts_overlapped = False  # it needs the states of the tokens that it continues

    def __init__(
        self,
        loop: "HeadLoop | BlockLoop",
        states: HiddenStates,
        cache: HeadCache,
        method: str,
        *,
        trained: int,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self._method = method
        self.vocabulary = vocabulary
        self._trained = trained
        self._most_places: float = math.inf
        self.loop = loop
        self._states = states
        self._cache = cache
        self._lines: dict[int, _Line] = {}

    def start(self, start: SequenceStart) -> None:
        self._lines[start.slot] = _Line(start.token_ids)
        self._states.start(start.slot)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        found = [self._input(each) for each in plan.requests]
        drafting = [at for at, each in enumerate(found) if each is not None]
        inputs = [each for each in found if each is not None]
        batch = self.loop.draft(inputs, plan.stop, until)
        catchup_tokens = 0
        for each in inputs:
            slot, count, line = each.slot, len(each.token_ids), self._lines[each.slot]
            catchup_tokens += max(0, count - line.num_new)
            self._cache.set_rows(slot, each.start + count)
            line.next_state = len(line.token_ids) - 1
            line.note_read(each.start, each.states)
            self._states.forget(slot, line.next_state - 1)  # keeps the last one, to draft from it again
        if self.vocabulary is not None and inputs:
            self.vocabulary.drafted([each.slot for each in inputs], batch.token_ids[:, 0].tolist())
        return Proposals(
            table=batch.table(plan, self._method, drafting),
            passes=batch.passes,
            catchup_tokens=catchup_tokens,
            probs=batch.probs,
        )

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, tokens in by_slot(slots, counts, token_ids):
            line = self._lines[slot]
            line.token_ids.extend(tokens)
            line.num_new = len(tokens)
        if self.vocabulary is not None:
            self.vocabulary.commit(slots, counts, token_ids)

    def release(self, slot: int) -> None:
        self._lines.pop(slot, None)
        self._states.release(slot)
        self._cache.begin_anew(slot)

    def rebuild(self, method: str, slot: int | None, /) -> bool:
        line = None if slot is None or method != self._method else self._lines.get(slot)
        if slot is None or line is None:
            return False
        num_rows = self._cache.num_rows(slot)
        if num_rows > self._trained:
            self._most_places = self._trained
            self._begin_anew(slot, line)
            return True
        pieces = line.pieces_read(num_rows)
        if not self._states.are_there(pieces):
            return False
        token_ids = [token_id for each in pieces for token_id in line.token_ids[each.position + 1 : each.end + 1]]
        everything = DraftInput(slot=slot, start=0, token_ids=token_ids, max_tokens=1, states=pieces)
        blocks = self._cache.computed_blocks(slot)
        return differs_from_cold(self.loop.memory, blocks, lambda: self.loop.read(everything))

    def _begin_anew(self, slot: int, line: "_Line") -> None:
        self._cache.begin_anew(slot)
        line.read = array("q")

    def _input(self, request: DraftRequest) -> DraftInput | None:
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
        more = count + self.loop.places(request.max_tokens)
        if place + more > self._most_places or not self._cache.reserve(slot, place + more):
            self._begin_anew(slot, line)
            place = 0
            if not self._cache.reserve(slot, more):
                return None
        token_ids = array("i")
        for piece in pieces:
            token_ids.extend(line.token_ids[piece.position + 1 : piece.end + 1])
        return DraftInput(
            slot=slot,
            start=place,
            token_ids=token_ids,
            max_tokens=request.max_tokens,
            shift=num_known - count - place,
            states=pieces,
        )


class _Line:
    """One slot. token_ids: all known ones. next_state: the first position whose state the head has not read.

    num_new: tokens that the last step committed. read: of each piece of states that the head has read, the place
    of its first row, and the piece's row, position and count.
    """

    __slots__ = ("next_state", "num_new", "read", "token_ids")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = array("i", token_ids)
        self.next_state = 0
        self.num_new = 1
        self.read = array("q")

    def note_read(self, place: int, pieces: Sequence[StatePiece]) -> None:
        """The head's rows from this place on are of these states."""
        for each in pieces:
            self.read.extend((place, each.row, each.position, each.count))
            place += each.count

    def pieces_read(self, num_rows: int) -> list[StatePiece]:
        """The states of the head's first num_rows rows, in order. A row that was computed twice counts once."""
        found: list[StatePiece] = []
        end = num_rows
        for place, row, position, count in np.array(self.read).reshape(-1, 4)[::-1].tolist():
            if place < end:
                found.append(StatePiece(row, position, min(count, end - place)))
                end = place
        return found[::-1]


class HeadLoop:
    """See DraftLoop. One native call where the runner has it, else one pass after another.

    table: of the head's cache. max_rows: most rows of a pass. sampler: of the head's vocabulary. predicts: how it
    chooses, where one call can do that; None: it cannot.
    """

    def __init__(
        self,
        runner: "HeadRunner",
        table: BlockTable,
        states: HiddenStates,
        sampler: DraftSampler,
        *,
        max_rows: int,
        predicts: PointMassSampler | None = None,
    ) -> None:
        self._runner = runner
        self._table = table
        self._states = states
        self._max_rows = max_rows
        self._predicts = predicts if runner.drafts_in_one_call else None
        self._passes = _HeadPasses(runner, table, states, max_rows)
        self._pass_by_pass = PassLoop(self._passes, sampler)

    @property
    def memory(self) -> Sequence[Tensor] | None:
        """See Runner.repeatable_memory."""
        return self._runner.repeatable_memory()

    def places(self, max_tokens: int) -> int:
        """Rows of the cache that a draft takes behind those of committed tokens: its last token is no row."""
        return max_tokens - 1

    @torch.inference_mode()
    def read(self, states: DraftInput) -> None:
        """Compute the rows of committed tokens, without a draft."""
        self._passes.first([states])

    @torch.inference_mode()
    def draft(
        self,
        inputs: Sequence[DraftInput],
        stop: StopRule | None,
        until: Callable[[], bool] | None = None,
    ) -> DraftBatch:
        num_rows = sum([len(each.token_ids) for each in inputs])
        if self._predicts is None or until is not None or not 0 < num_rows <= self._max_rows:
            return self._pass_by_pass.draft(inputs, stop, until)
        slots = np.array([each.slot for each in inputs])
        draft_starts = np.array([each.start + len(each.token_ids) + each.shift for each in inputs])
        max_tokens = np.array([each.max_tokens for each in inputs])
        ahead = self._predicts.ahead(slots, draft_starts, int(max_tokens.max()))
        found = self._runner.draft_all(
            rows_of(inputs, self._table),
            self._states.gather([piece for each in inputs for piece in each.states]),
            DraftRules(
                max_tokens=max_tokens,
                stop=None
                if stop is None
                else StopNumbers(
                    row_price=stop.row_price,
                    pass_prices=stop.pass_prices,
                    intercept=stop.intercept,
                    slope=stop.slope,
                ),
                metadata=None if ahead is None else ahead.metadata,
                noise=None if ahead is None else ahead.noise,
            ),
        )
        beyond = np.arange(found.token_ids.shape[1]) >= found.counts[:, None]
        return DraftBatch(
            lengths=found.counts,
            token_ids=np.where(beyond, NO_TOKEN, found.token_ids),
            margins=np.where(beyond, 0.0, found.margins),
            num_fed=found.num_fed,
            passes=found.passes,
        )


class _HeadPasses:
    """The Passes of a head. Remembers the hidden states that the last logits were of."""

    def __init__(self, runner: "HeadRunner", table: BlockTable, states: HiddenStates, max_rows: int) -> None:
        self._runner = runner
        self.table = table
        self._states = states
        self._max_rows = max_rows
        self._hidden = torch.empty(0)  # [S, Hh]

    def first(self, inputs: Sequence[DraftInput]) -> tuple[Tensor, int]:
        states = self._states.gather([piece for each in inputs for piece in each.states])
        ends, first = [], 0
        for pieces in chunks(inputs, self._max_rows):
            batch = rows_of(pieces, self.table)
            hidden = self._runner.read(batch, states[first : first + batch.num_rows])
            first += batch.num_rows
            last_rows = batch.last_rows[[piece.ends for piece in pieces]]
            ends.append(hidden.index_select(0, torch.from_numpy(last_rows).to(hidden.device)))
        self._hidden = ends[0] if len(ends) == 1 else torch.cat(ends)
        return self._runner.logits_of(self._hidden), len(ends)

    def further(self, batch: RowBatch, sources: Ints) -> Tensor:
        hidden = self._hidden
        if len(sources) < len(hidden):
            hidden = hidden.index_select(0, torch.from_numpy(sources).to(hidden.device))
        self._hidden = self._runner.draft(batch, hidden)
        return self._runner.logits_of(self._hidden)


class Head(Protocol):
    """A loaded head. It runs one step at a time, and allocates nothing during it.

    Tensors are on the backend's device, activations in the type of the target's. What a method returns is a part
    of a buffer, which the next call of the same method overwrites. R: at most max_rows, N: at most max_logit_rows.
    """

    @property
    def spec(self) -> HeadSpec: ...

    @property
    def draft_ids(self) -> Tensor | None:
        """[Vd] int64, distinct: the target's id of each row of the logits; None: the target's vocabulary."""
        ...

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """How many of the draft_ids it chooses from; None: always all."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights; those shared with the target are not counted."""
        ...

    @property
    def drafting_stack(self) -> HeadStack | None:
        """What HeadDrafting takes; None: it drafts no such heads."""
        ...

    def draft_room(self, rows: int) -> DraftRoom:
        """The buffers of that many rows, the same object each time."""
        ...

    def features(self, states: Tensor) -> Tensor:
        """[R, Hh] of the target's states [R, K * H], the layers of spec.state_layers side by side; unchanged."""
        ...

    def run(self, token_ids: Tensor, features: Tensor, cache: KvCache, plan: AttentionPlan) -> Tensor:
        """[R, Hh], the output of the rows; their keys and values enter the cache.

        token_ids: [R] int64, contiguous, of the target's vocabulary. features: [R, Hh]; may be what run returned,
        its first R rows. cache: of spec.decoder's layers and heads. plan: of these rows.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, Vd] float32 of any N rows of what run returned; unchanged."""
        ...


class HeadRunner:
    """Runs a head over rows. Owns its KV cache, and the hidden states of a pass that is timed.

    A pass over rows of committed tokens takes the target's states; a pass over draft tokens takes, in their place,
    the head's own hidden states of the rows that drafted them. To be called in inference mode.

    vocab_size: the target's: token ids of inputs are below it. kv: size of the head's cache, which the runner
    allocates. states: the target's buffer, [max_rows, K * H].
    """

    def __init__(self, head: Head, backend: Backend, kv: KvShape, *, states: Tensor, vocab_size: int) -> None:
        self.head = head
        self.vocab_size = vocab_size
        self._backend = backend
        self._block_size = kv.block_size
        self._cache = backend.allocate_kv(kv)
        self._hidden = states[:0]  # [R, Hh], of the last `forward`
        drafting, stack = backend.head_drafting, head.drafting_stack
        takes = drafting is not None and stack is not None and drafting.takes(stack)
        self._drafting = drafting if takes else None
        self._dummy_states = states.zero_()  # for passes that are only timed

    @property
    def sampling_kernels(self) -> SamplingKernels | None:
        return self._backend.sampling_kernels

    @property
    def experts_read(self) -> int:
        """See Backend."""
        return self._backend.experts_read

    def row_edges(self, most: int) -> tuple[int, ...]:
        """See Backend."""
        return self._backend.row_edges(most)

    def read(self, batch: RowBatch, states: Tensor) -> Tensor:
        """A pass over committed tokens. states: [R, K * H] of the positions before them.

        Returns hidden [R, Hh], valid until the next pass.
        """
        return self._run(batch, self.head.features(states))

    def draft(self, batch: RowBatch, hidden: Tensor) -> Tensor:
        """A pass over draft tokens. hidden: [R, Hh] of the rows that drafted them; may be what this returned."""
        return self._run(batch, hidden)

    def logits_of(self, hidden: Tensor) -> Tensor:
        """[N, Vd] float32 of the head's vocabulary; valid until the next call. hidden: [N, Hh]."""
        return self.head.logits(hidden)

    def repeatable_memory(self) -> Sequence[Tensor] | None:
        """See Runner."""
        return repeatable_memory(self._backend, self._cache)

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
        room = self.head.draft_room(batch.num_rows)
        return self._drafting.draft(stack, self._cache, rows, rules, room)

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> None:
        """A pass as `read` runs it, to be timed."""
        self._hidden = self.read(batch, self._dummy_states[: batch.num_rows])

    @torch.inference_mode()
    def logits(self, rows: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Of rows of the last `forward`."""
        numbers = torch.from_numpy(np.asarray(rows, dtype=np.int64)).to(self._hidden.device)
        return self.logits_of(self._hidden.index_select(0, numbers))

    @torch.inference_mode()
    def fill_cache(self, layout: RowLayout) -> None:
        """Store some keys and values where a pass over these rows would store its own."""
        num_rows = len(layout.positions)
        token_ids = torch.arange(num_rows, device=self._backend.device) % self.vocab_size
        features = self.head.features(self._dummy_states[:num_rows])
        self.head.run(token_ids, features, self._cache, self._backend.plan(layout, self._block_size))

    def _run(self, batch: RowBatch, features: Tensor) -> Tensor:
        plan = self._backend.plan(batch.layout, self._block_size)
        return self.head.run(batch.token_ids.to(self._backend.device), features, self._cache, plan)
