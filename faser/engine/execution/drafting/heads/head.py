"""Drafts of a head: a small model that reads the target's hidden states (eagle3.py, mtp.py).

The target's steps leave the states of committed tokens in a ring (head_memory.py). The head reads those that it
has not read yet when its next draft is asked for, and those of a long prompt as they come. Its keys and values are
in the target's blocks: where it has drafted for a prefix, the next sequence with this prefix has them too. What
states there never were of, or no longer are, the head drafts without.

    position      p ................. n - 1 | n         n + 1     ...
    states        p - 1 ............. n - 2 | -         -                the target's, which predicted the token
    rows          |  committed tokens       | x_1       x_2       ...
    hidden        |  of the pass            | of the row that drafted the token, in place of states

Source: Li et al., arXiv 2503.01840, section 3.1.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.config.speculation import MOST_STATES_READ
from faser.engine.checkpoints.heads import HeadSpec
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart, StopRule
from faser.engine.execution.drafting.cold_state import differs_from_cold
from faser.engine.execution.drafting.drafter import Proposals, by_slot
from faser.engine.execution.drafting.head_memory import HeadCache, HeadLine, HiddenStates, StatePiece
from faser.engine.execution.drafting.heads.vocabulary import WHOLE, WholeVocabulary
from faser.engine.execution.drafting.loop import (
    DraftBatch,
    DraftInput,
    DraftLoop,
    PassLoop,
    Piece,
    chunks,
    drafted,
    rows_of,
)
from faser.engine.execution.drafting.samplers import DraftSampler, PointMassSampler
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.runner import CachedRunner
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
from faser.kernels.interface.shapes import AttentionPlan, KvCache, RowLayout
from faser.optional import maybe, present
from faser.types.arrays import Ints


class StateLoop(DraftLoop, Protocol):
    """Loop of what reads the target's states."""

    @property
    def memory(self) -> Sequence[Tensor] | None:
        """Return the cache, as Runner.repeatable_memory does; None where bits of a row depend on its batch."""
        ...

    def places(self, max_tokens: int) -> int:
        """Return how many rows of the cache a draft takes behind those of committed tokens."""
        ...

    def read(self, inputs: Sequence[DraftInput]) -> None:
        """Compute the rows of committed tokens, without a draft."""
        ...


class HeadDrafter:
    """Drafter that reads the target's hidden states: a head, or a drafter of blocks.

    method: what its drafts are called. trained: positions that the head was trained for. It may well draft beyond
    them; once a slot has had to be rebuilt there, all leave blocks out before they get there. vocabulary: the
    head's, which is told the tokens that the target generates.
    """

    drafts_overlapped = False  # it needs the states of the tokens that it continues

    def __init__(
        self,
        loop: "StateLoop",
        states: HiddenStates,
        cache: HeadCache,
        method: str,
        *,
        trained: int,
        vocabulary: WholeVocabulary = WHOLE,
    ) -> None:
        self._method = method
        self.vocabulary = vocabulary
        self._trained = trained
        self._most_places: float = math.inf
        self.loop = loop
        self._states = states
        self._cache = cache
        self._lines: dict[int, HeadLine] = {}

    def start(self, start: SequenceStart) -> None:
        self._lines[start.slot] = self._cache.start(start.slot, start.token_ids)
        self._states.start(start.slot)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        found = [self._input(each) for each in plan.requests]
        drafting = [at for at, each in enumerate(found) if each is not None]
        inputs = present(found)
        batch = self.loop.draft(inputs, plan.stop, until)
        catchup_tokens = sum([max(0, len(each.token_ids) - self._lines[each.slot].num_new) for each in inputs])
        self._fill(inputs)
        if inputs:
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
        self.vocabulary.commit(slots, counts, token_ids)
        if full := self._states.take_full():
            self._read_ahead(full)

    def release(self, slot: int) -> None:
        if slot in self._lines:
            self._fill_last_block(slot)
        self._lines.pop(slot, None)
        self._states.release(slot)
        self._cache.release(slot)

    def rebuild(self, method: str, slot: int | None, /) -> bool:
        line = None if slot is None or method != self._method else self._lines.get(slot)
        if slot is None or line is None:
            return False
        pieces = self._cache.own_rows(slot)
        if self._cache.place(slot, line.computed) > self._trained:
            self._most_places = self._trained
            return True
        if not pieces or not self._states.are_there(pieces):
            return False
        blocks = self._cache.blocks(slot, pieces[0].position)
        everything = self._rows(slot, pieces, max_tokens=1)
        differs = differs_from_cold(self.loop.memory, blocks, lambda: self.loop.read([everything]))
        if differs:
            self._cache.distrust()
        return differs

    def _input(self, request: DraftRequest) -> DraftInput | None:
        """Return the committed tokens that the head has not read, at least the last one; None: it cannot draft."""
        assert not request.unverified, f"slot {request.slot}: {self._method} continues no unverified tokens"
        slot = request.slot
        last = len(self._lines[slot].token_ids) - 2  # the state that predicted the last known token
        return self._unread(slot, last, oldest=last + 1 - MOST_STATES_READ, max_tokens=request.max_tokens)

    def _read_ahead(self, slots: Collection[int]) -> None:
        """Read the states of prompts that the last step has computed; those of answers wait for a draft."""
        inputs = []
        for slot in slots:
            line = self._lines[slot]
            known = min(len(line.token_ids) - 1, self._cache.room(slot))
            pieces = self._states.pieces(slot, 0)
            if line.computed < line.num_prompt and pieces:
                last = min(pieces[-1].end, known) - 1
                if (found := self._unread(slot, last, oldest=0)) is not None:
                    inputs.append(found)
        if inputs:
            self.loop.read(inputs)
            self._fill(inputs)

    def _fill_last_block(self, slot: int) -> None:
        """Read what the last full block lacks: a sequence that begins with these blocks needs all of them."""
        line, pieces = self._lines[slot], self._states.pieces(slot, 0)
        if not pieces or line.apart or not line.computed:
            return
        size = self._cache.block_size
        end = min(pieces[-1].end, len(line.token_ids) - 1) // size * size
        if 0 < end - line.computed <= size and (found := self._unread(slot, end - 1, oldest=0)) is not None:
            self.loop.read([found])
            self._fill([found])

    def _unread(self, slot: int, last: int, *, oldest: int, max_tokens: int = 1) -> DraftInput | None:
        """Return the rows up to the state at position last that the cache lacks, at least that one.

        oldest: earlier states are left out. None: the last state is lost.
        """
        cache = self._cache
        begin = cache.begin(slot, last)
        pieces = _last_run(self._states.pieces(slot, max(begin, oldest)), last + 1)
        if not pieces:
            return None
        first = pieces[0].position
        beyond = cache.place(slot, last + self.loop.places(max_tokens)) >= self._most_places
        if first > begin or beyond:
            pieces = [*cache.leave_out(slot, first), *pieces]
        cache.write(slot, pieces[0].position)
        return self._rows(slot, pieces, max_tokens)

    def _rows(self, slot: int, pieces: Sequence[StatePiece], max_tokens: int) -> DraftInput:
        """Return the rows that read these states. The state of position p goes with the token at p + 1."""
        begin, known = pieces[0].position, self._lines[slot].token_ids
        start = self._cache.place(slot, begin)
        token_ids = array("i")
        for piece in pieces:
            token_ids.extend(known[piece.position + 1 : piece.end + 1])
        return DraftInput(
            slot=slot,
            start=start,
            token_ids=token_ids,
            max_tokens=max_tokens,
            shift=begin - start + 1,
            states=pieces,
        )

    def _fill(self, inputs: Sequence[DraftInput]) -> None:
        for each in inputs:
            self._cache.fill(each.slot, each.states)
            self._states.forget(each.slot, each.states[-1].end - 1)  # keeps the last one, to draft from it again


def _last_run(pieces: Sequence[StatePiece], end: int) -> list[StatePiece]:
    """Return the pieces that lead to this position without a gap; none where the state before it is lost."""
    found: list[StatePiece] = []
    for each in reversed(pieces):
        if each.position >= end:
            continue
        if each.end < end:
            break
        found.append(StatePiece(each.row, each.position, end - each.position))
        end = each.position
    return found[::-1]


class HeadLoop:
    """Loop of a head. One native call where the runner has it, else one pass after another.

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
        """Return the cache, as Runner.repeatable_memory does; None where bits of a row depend on its batch."""
        return self._runner.repeatable_memory()

    def places(self, max_tokens: int) -> int:
        """Rows of the cache that a draft takes behind those of committed tokens: its last token is no row."""
        return max_tokens - 1

    @torch.inference_mode()
    def read(self, inputs: Sequence[DraftInput]) -> None:
        """Compute the rows of committed tokens. A native call drafts a token each, which is dropped."""
        for each in inputs:
            if self._drafts_in_one_call([each]):
                self._draft_all([each], None)
            else:
                deque(self._passes.read([each]), maxlen=0)

    @torch.inference_mode()
    def draft(
        self,
        inputs: Sequence[DraftInput],
        stop: StopRule | None,
        until: Callable[[], bool] | None = None,
    ) -> DraftBatch:
        if until is not None or not self._drafts_in_one_call(inputs):
            return self._pass_by_pass.draft(inputs, stop, until)
        return self._draft_all(inputs, stop)

    def _drafts_in_one_call(self, inputs: Sequence[DraftInput]) -> bool:
        num_rows = sum([len(each.token_ids) for each in inputs])
        return self._predicts is not None and 0 < num_rows <= self._max_rows

    def _draft_all(self, inputs: Sequence[DraftInput], stop: StopRule | None) -> DraftBatch:
        assert self._predicts is not None
        slots = np.array([each.slot for each in inputs])
        draft_starts = np.array([each.start + len(each.token_ids) + each.shift for each in inputs])
        max_tokens = np.array([each.max_tokens for each in inputs])
        ahead = self._predicts.ahead(slots, draft_starts, int(max_tokens.max()))
        found = self._runner.draft_all(
            rows_of(inputs, self._table),
            self._states.gather([piece for each in inputs for piece in each.states]),
            DraftRules(
                max_tokens=max_tokens,
                stop=maybe(_stop_numbers, stop),
                metadata=ahead.metadata,
                noise=ahead.noise,
            ),
        )
        return drafted(found)


def _stop_numbers(stop: StopRule) -> StopNumbers:
    return StopNumbers(
        row_price=stop.row_price, pass_prices=stop.pass_prices, intercept=stop.intercept, slope=stop.slope
    )


class _HeadPasses:
    """The Passes of a head. Remembers the hidden states that the last logits were of."""

    def __init__(self, runner: "HeadRunner", table: BlockTable, states: HiddenStates, max_rows: int) -> None:
        self._runner = runner
        self.table = table
        self._states = states
        self._max_rows = max_rows
        self._hidden = torch.empty(0)  # [S, Hh]

    def read(self, inputs: Sequence[DraftInput]) -> Iterator[tuple[list[Piece], RowBatch, Tensor]]:
        """Run the rows of the inputs: the pieces of each pass, its rows, and the head's output of them."""
        states = self._states.gather([piece for each in inputs for piece in each.states])
        first = 0
        for pieces in chunks(inputs, self._max_rows):
            batch = rows_of(pieces, self.table)
            yield pieces, batch, self._runner.read(batch, states[first : first + batch.num_rows])
            first += batch.num_rows

    def first(self, inputs: Sequence[DraftInput]) -> tuple[Tensor, int]:
        ends = []
        for pieces, batch, hidden in self.read(inputs):
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
        """Return the target's id of each row of the logits: [Vd] int64, distinct; None: ids are the target's."""
        ...

    @property
    def vocabulary(self) -> WholeVocabulary:
        """Return how many of the draft_ids it chooses from."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights; those shared with the target are not counted."""
        ...

    @property
    def drafting_stack(self) -> HeadStack | None:
        """Return the weights that HeadDrafting takes; None: it drafts no such heads."""
        ...

    def draft_room(self, rows: int) -> DraftRoom:
        """The buffers of that many rows, the same object each time."""
        ...

    def features(self, states: Tensor) -> Tensor:
        """Return features [R, Hh] of the target's states [R, K * H], unchanged: spec.state_layers side by side."""
        ...

    def run(self, token_ids: Tensor, features: Tensor, cache: KvCache, plan: AttentionPlan) -> Tensor:
        """Return the output [R, Hh] of the rows; their keys and values enter the cache.

        token_ids: [R] int64, contiguous, of the target's vocabulary. features: [R, Hh]; may be what run returned,
        its first R rows. cache: of spec.decoder's layers and heads. plan: of these rows.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, Vd] float32 of any N rows of what run returned; unchanged."""
        ...


class HeadRunner(CachedRunner):
    """Runs a head over rows. Owns its KV cache, and the hidden states of a pass that is timed.

    A pass over rows of committed tokens takes the target's states; a pass over draft tokens takes, in their place,
    the head's own hidden states of the rows that drafted them. To be called in inference mode.

    vocab_size: the target's: token ids of inputs are below it. kv: size of the head's cache, which the runner
    allocates. states: the target's buffer, [max_rows, K * H].
    """

    def __init__(self, head: Head, backend: Backend, kv: KvShape, *, states: Tensor, vocab_size: int) -> None:
        super().__init__(backend, kv)
        self.head = head
        self.vocab_size = vocab_size
        self._hidden = states[:0]  # [R, Hh], of the last `forward`
        drafting, stack = backend.head_drafting, head.drafting_stack
        takes = drafting is not None and stack is not None and drafting.takes(stack)
        self._drafting = drafting if takes else None
        self._dummy_states = states.zero_()  # for passes that are only timed

    def read(self, batch: RowBatch, states: Tensor) -> Tensor:
        """A pass over committed tokens. states: [R, K * H] of the positions before them.

        Returns hidden [R, Hh], valid until the next pass.
        """
        return self._run(batch, self.head.features(states))

    def draft(self, batch: RowBatch, hidden: Tensor) -> Tensor:
        """A pass over draft tokens. hidden: [R, Hh] of the rows that drafted them; may be what this returned."""
        return self._run(batch, hidden)

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Return logits [N, Vd] float32 of the head's vocabulary; valid until the next call. hidden: [N, Hh]."""
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
        room = self.head.draft_room(batch.num_rows)
        return self._drafting.draft(stack, self._cache, rows, rules, room)

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> None:
        """A pass as `read` runs it, to be timed."""
        self._hidden = self.read(batch, self._dummy_states[: batch.num_rows])

    @torch.inference_mode()
    def logits(self, rows: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Return the logits of rows of the last `forward`."""
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
