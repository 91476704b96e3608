"""The drafting loop of a block drafter: one pass over the rows of all blocks, then a walk over their candidates.

    pass    all rows of all sequences at once: hidden states, and the candidates of every place
    walk    place by place: the candidates behind the token that was chosen before, of which the request's own
            sampling chooses one

A place's candidates are few and differ by sequence. The sampler sees the union of them as a small vocabulary, in
the order of the target's ids, so that ties and the race for random tokens are those of the whole vocabulary.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import StopRule
from faser.engine.execution.drafting.blocks.graphs import BlockGraphs, BlockPass
from faser.engine.execution.drafting.blocks.model import BlockModel, block_rows
from faser.engine.execution.drafting.head_memory import HiddenStates
from faser.engine.execution.drafting.loop import (
    DraftBatch,
    DraftInput,
    DraftProgress,
    Piece,
    chunks,
    drafted,
    no_drafts,
    on_host,
)
from faser.engine.execution.drafting.samplers import (
    DraftRows,
    DraftSampler,
    DraftTokens,
    PointMassSampler,
    drafted_by_runner,
)
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.runner import CachedRunner
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.block_drafting import BlockInputs
from faser.kernels.interface.blocks import DraftedTokens, DraftRules
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import RowLayout
from faser.optional import maybe
from faser.types.arrays import Ints

_log = logging.getLogger("faser")

_LARGEST = 100.0  # log-odds of a confidence


class BlockRunner(CachedRunner):
    """Runs a block drafter over rows. Owns its KV cache. To be called in inference mode.

    vocab_size: the target's. kv: size of the drafter's cache, which the runner allocates. states: the target's
    buffer, [max_rows, K * H], for passes that are only timed. graphs: to be set where the device has any.
    """

    def __init__(
        self, model: BlockModel, backend: Backend, kv: KvShape, *, states: Tensor, vocab_size: int
    ) -> None:
        super().__init__(backend, kv)
        self.head = model
        self.graphs: BlockGraphs | None = None
        self.vocab_size = vocab_size
        self._dummy_states = states.zero_()
        self._hidden = states[:0]  # [R, H], of the last `forward`
        self._replayed = False
        drafting, self._stack = backend.block_drafting, model.drafting_stack
        takes = drafting is not None and self._stack is not None and drafting.takes(self._stack)
        self._drafting = drafting if takes else None
        if drafting is not None and not takes:
            _log.info("%s drafts operation by operation: its layers have no native pass", model.spec.method)

    @property
    def device(self) -> torch.device:
        return self._backend.device

    def run(self, layout: RowLayout, context: Sequence[int], token_ids: Ints, states: Tensor) -> Tensor:
        """Return hidden [B, H] of the rows of blocks. layout: of all rows. token_ids: [B].

        context: how many rows of each sequence come before its block. states: [C, K * H], theirs.
        """
        rows = block_rows(self._backend, self.head, layout, context, token_ids, self._block_size)
        return self.head.run(states, rows, self._cache)

    @property
    def drafts_in_one_call(self) -> bool:
        return self._drafting is not None

    def draft_all(self, inputs: BlockInputs, rules: DraftRules) -> DraftedTokens:
        """The drafts of `run` and the loop's walk."""
        assert self._drafting is not None, "see drafts_in_one_call"
        assert self._stack is not None
        return self._drafting.draft(self._stack, self._cache, inputs, rules, self.head.draft_room)

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> None:
        """A pass over blocks that are these rows, to be timed."""
        self._replayed = self.graphs is not None and self.graphs.run(batch.layout, batch.token_ids.numpy())
        if self._replayed:
            return
        context = [0] * (len(batch.layout.query_start) - 1)
        self._hidden = self.run(batch.layout, context, batch.token_ids.numpy(), self._dummy_states[:0])

    @torch.inference_mode()
    def logits(self, rows: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Scores of the candidates of rows of the last `forward`."""
        numbers = torch.from_numpy(np.asarray(rows, dtype=np.int64)).to(self._hidden.device)
        if self._replayed and self.graphs is not None:
            return self.graphs.scores.index_select(0, numbers)
        return self.head.candidates(self._hidden.index_select(0, numbers), torch.zeros_like(numbers)).scores

    @torch.inference_mode()
    def fill_cache(self, layout: RowLayout) -> None:
        """Store some keys and values where context rows would store theirs."""
        counts = layout.query_start.diff().tolist()
        self.run(layout, counts, np.zeros(0, dtype=np.int64), self._dummy_states[: len(layout.positions)])


class BlockLoop:
    """Loop of a block drafter. One native call where the runner has it, else operation by operation.

    table: of the drafter's cache. max_rows: most rows of a pass. sampler: of the target's tokens. predicts: how it
    chooses, where one call or graphs can do that; None: they cannot.
    """

    def __init__(
        self,
        runner: BlockRunner,
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
        self._sampler = sampler
        self._predicts = predicts if runner.drafts_in_one_call else None
        self._graphs = runner.graphs
        self._replays = predicts
        self._max_rows = max_rows
        self._spec = runner.head.spec
        self._mask = self._spec.mask_token_id or 0  # any token where masks have an embedding of their own

    @property
    def memory(self) -> Sequence[Tensor] | None:
        """Return the cache, as Runner.repeatable_memory does; None where bits of a row depend on its batch."""
        return self._runner.repeatable_memory()

    def places(self, max_tokens: int) -> int:
        """Rows of the cache that a draft takes behind those of committed tokens."""
        return self._spec.rows(min(max_tokens, self._spec.most_tokens))

    @torch.inference_mode()
    def read(self, inputs: Sequence[DraftInput]) -> None:
        """Compute the context rows of committed tokens, without a draft."""
        if self._graphs is None or not self._graphs.read(self._context(inputs), self._numbers(inputs)):
            self._read(inputs)

    @torch.inference_mode()
    def draft(
        self,
        inputs: Sequence[DraftInput],
        _stop: StopRule | None,
        _until: Callable[[], bool] | None = None,
    ) -> DraftBatch:
        """Draft for every input in one pass, which cannot stop early: the cut is made before verification."""
        if not inputs:
            return no_drafts()
        most = self._spec.most_tokens
        inputs = [replace(each, max_tokens=min(each.max_tokens, most)) for each in inputs]
        num_rows = sum([len(each.token_ids) + self._spec.rows(each.max_tokens) for each in inputs])
        if self._predicts is not None and num_rows <= self._max_rows:
            return self._in_one_call(inputs, self._predicts)
        if self._graphs is not None and self._replays is not None:
            found = self._in_graphs(inputs, self._graphs, self._replays)
            if found is not None:
                return found
        hidden, passes = self._pass(inputs)
        return self._walk(inputs, hidden).batch(passes)

    def _in_one_call(self, inputs: Sequence[DraftInput], predicts: PointMassSampler) -> DraftBatch:
        slots = [each.slot for each in inputs]
        starts, context = np.array([(each.start, len(each.token_ids)) for each in inputs]).T
        max_tokens = np.array([each.max_tokens for each in inputs])
        draft_starts = starts + context + [each.shift for each in inputs]
        ahead = predicts.ahead(np.array(slots), draft_starts, int(max_tokens.max()))
        found = self._runner.draft_all(
            BlockInputs(
                starts=starts,
                context=context,
                anchors=np.array([each.token_ids[-1] for each in inputs]),
                states=self._states.gather([piece for each in inputs for piece in each.states]),
                block_table=self._table.of(slots),
            ),
            DraftRules(max_tokens=max_tokens, metadata=ahead.metadata, noise=ahead.noise),
        )
        return drafted(found)

    def _in_graphs(
        self, inputs: Sequence[DraftInput], graphs: BlockGraphs, sampler: PointMassSampler
    ) -> DraftBatch | None:
        """None: there are no graphs for these blocks. Context rows that have none are computed before."""
        progress, spec, context = DraftProgress(inputs), self._spec, self._context(inputs)
        counts = np.array([spec.rows(each.max_tokens) for each in inputs])
        begins = np.cumsum(counts) - counts
        first = int(not spec.predicts_from_anchor)  # the row that predicts the first token
        token_ids, anchors = np.full(counts.sum(), self._mask), np.full(counts.sum(), -1)
        token_ids[begins] = anchors[begins + first] = [each.token_ids[-1] for each in inputs]
        given = BlockPass(
            context=context,
            numbers=self._numbers(inputs),
            blocks=self._table.lay_out(
                progress.slots.tolist(), progress.places.astype(np.int32), counts.astype(np.int32), token_ids
            ).layout,
            token_ids=token_ids,
            depth=np.arange(len(token_ids)) - begins.repeat(counts),
            anchors=anchors,
            firsts=begins + first,
            most=int(progress.max_tokens.max()),
            requests=sampler.metadata(progress.slots, progress.draft_starts),
        )
        passes = 1
        if not graphs.has_context(context):
            given = replace(given, context=None)
        if not graphs.fits(given):
            return None
        if given.context is None:
            passes += self._read(inputs)
        active = np.arange(len(inputs))
        for tokens in map(drafted_by_runner, graphs.draft(given)()):
            of_active = DraftTokens(token_ids=tokens.token_ids[active], margins=tokens.margins[active])
            active = progress.take(active, of_active, None)
        return progress.batch(passes)

    def _context(self, inputs: Sequence[DraftInput]) -> RowLayout:
        counts = np.array([len(each.token_ids) for each in inputs], dtype=np.int32)
        starts = np.array([each.start for each in inputs], dtype=np.int32)
        rows = np.zeros(counts.sum(), dtype=np.int64)
        return self._table.lay_out([each.slot for each in inputs], starts, counts, rows).layout

    def _numbers(self, inputs: Sequence[DraftInput]) -> Ints:
        return self._states.numbers([piece for each in inputs for piece in each.states])

    def _read(self, inputs: Sequence[DraftInput]) -> int:
        states, passes, first = self._states.gather([piece for each in inputs for piece in each.states]), 0, 0
        for pieces in chunks(inputs, self._max_rows):
            count = sum([len(each.token_ids) for each in pieces])
            self._run(pieces, [], states[first : first + count])
            passes, first = passes + 1, first + count
        return passes

    def _pass(self, inputs: Sequence[DraftInput]) -> tuple[Tensor, int]:
        """Return hidden [N, H] of the rows that predict, draft after draft, and how many passes that took."""
        num_context = sum([len(each.token_ids) for each in inputs])
        num_block = sum([self._spec.rows(each.max_tokens) for each in inputs])
        if num_context + num_block <= self._max_rows:
            states = self._states.gather([piece for each in inputs for piece in each.states])
            return self._run(inputs, inputs, states), 1
        passes, parts, rest = self._read(inputs), [], list(inputs)
        while rest:
            ends = np.cumsum([self._spec.rows(each.max_tokens) for each in rest])
            count = int(np.searchsorted(ends, self._max_rows, side="right"))
            assert count, f"a block of {ends[0]} rows; a pass has {self._max_rows}"
            parts.append(self._run([], rest[:count], torch.empty(0)).clone())
            passes, rest = passes + 1, rest[count:]
        return torch.cat(parts), passes

    def _run(self, context: Sequence[DraftInput | Piece], blocks: Sequence[DraftInput], states: Tensor) -> Tensor:
        """A pass over context rows, or blocks, or both of the same sequences."""
        found = context or blocks
        num_context = [len(each.token_ids) for each in context] or [0] * len(blocks)
        num_block = [self._spec.rows(each.max_tokens) for each in blocks] or [0] * len(context)
        starts = [each.start + (0 if context else len(each.token_ids)) for each in found]
        counts = np.add(num_context, num_block)
        layout = self._table.lay_out(
            [each.slot for each in found],
            np.array(starts, dtype=np.int32),
            counts.astype(np.int32),
            np.zeros(counts.sum(), dtype=np.int64),
        ).layout
        token_ids = np.full(sum(num_block), self._mask)
        anchors = np.cumsum([0, *num_block[:-1]]) if blocks else np.zeros(0, dtype=np.int64)
        token_ids[anchors] = [each.token_ids[-1] for each in blocks]
        hidden = self._runner.run(layout, num_context, token_ids, states)
        if self._spec.predicts_from_anchor or not blocks:
            return hidden
        predicting = np.delete(np.arange(len(token_ids)), anchors)
        return hidden.index_select(0, torch.from_numpy(predicting).to(hidden.device))

    def _walk(self, inputs: Sequence[DraftInput], hidden: Tensor) -> DraftProgress:
        """Choose the tokens from left to right."""
        progress = DraftProgress(inputs)
        firsts = np.cumsum([0, *(each.max_tokens for each in inputs[:-1])])
        anchors = np.full(len(hidden), -1)
        anchors[firsts] = [each.token_ids[-1] for each in inputs]
        found = self._runner.head.candidates(hidden, torch.from_numpy(anchors).to(hidden.device))
        of_rows, token_ids = found.scores.numpy(force=True), found.token_ids.numpy(force=True)
        pairs, confidences = maybe(on_host, found.pairs), maybe(on_host, found.confidences)
        active, rows, before = np.arange(len(inputs)), progress.first_rows(), np.zeros_like(firsts)
        for depth in range(max(each.max_tokens for each in inputs)):
            at = firsts[active] + depth
            scores = of_rows[at] if pairs is None else of_rows[at] + pairs[at, :, before]
            tokens, chosen = self._choose(scores, token_ids[at], rows)
            if confidences is not None:
                margins = confidences[at, before].astype(np.float64).clip(-_LARGEST, _LARGEST)
                tokens = replace(tokens, margins=margins)
            staying = progress.take(active, tokens, None)
            before = chosen[np.searchsorted(active, staying)]
            active = staying
            if len(active):
                _, rows = progress.feed(active)
        return progress

    def _choose(self, scores: NDArray[np.float32], token_ids: Ints, rows: DraftRows) -> tuple[DraftTokens, Ints]:
        """A token for every row, and its number among the candidates. scores, token_ids: [S, C] of these."""
        ids = np.sort(token_ids[0]) if len(token_ids) == 1 else np.unique(token_ids)
        logits = np.full((len(scores), len(ids)), -np.inf, dtype=np.float32)
        np.put_along_axis(logits, np.searchsorted(ids, token_ids), scores, axis=1)
        found = self._sampler.choose(torch.from_numpy(logits).to(self._runner.device), rows, ids)
        chosen = ids[found.token_ids]
        probs = found.probs
        if probs is not None:
            whole = probs.new_zeros(len(probs), self._runner.vocab_size)
            probs = whole.index_copy_(1, torch.from_numpy(ids).to(probs.device), probs)
        numbers = (token_ids == chosen[:, None]).argmax(axis=1)
        return replace(found, token_ids=chosen, probs=probs), numbers
