"""Drafts of a block drafter in CUDA graphs: three replays and one wait, whatever the number of drafts.

    context    numbers of states in the ring --> keys and values of the tokens        a graph per number of rows
               since the last draft
    block      anchors and masks --> layers --> the candidates of every row           a graph per number of rows
    walk       candidates --> tokens, place by place: the sampler sees the target's   a graph per number of
               whole vocabulary, with the candidates alone possible                   sequences, depth and flags

A row of a block is laid out as a sequence of its own where it sees the rows behind it, as in block.py. Windows
that are shorter than a sequence have other layouts: such passes run eagerly, as do those that fit no graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from faser.engine.execution.drafting.blocks.model import BlockModel, BlockRows, Candidates, SeenRows, rows_alone
from faser.engine.execution.drafting.head_memory import UNKNOWN
from faser.engine.execution.runner.graph_sizes import next_size, size_for
from faser.engine.execution.runner.graphs import ALL_FLAGS
from faser.engine.execution.sampling.tokens import SampledTokens, SamplingMetadataBuffer
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.graph_capture import CapturedGraph, GraphBatchSize, GraphCapture, Readback
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.sampling import DeviceSamplingKernels, SamplingMetadata, TruncationFlags
from faser.kernels.interface.shapes import AttentionPlan, KvCache, RowLayout
from faser.optional import present
from faser.types.arrays import Ints

_LINE = 4  # sequences; parts of a walk begin at multiples of 16 bytes, as the sampler's kernels need it
_LARGEST = 100.0  # log-odds of a confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPass:
    """The blocks of S drafts. context, blocks: layouts of the context rows and of the blocks' rows. context: None:
    they are computed.

    numbers: [C] of the context rows' states in the ring. token_ids: [B] of the blocks' rows, those of masks
    included. depth: [B], see BlockRows. anchors: [B], see BlockModel.candidates. firsts: [S] the row that predicts
    the first token of each draft. most: most tokens of a draft. requests: [S], at the first tokens' positions.
    """

    context: RowLayout | None
    numbers: Ints
    blocks: RowLayout
    token_ids: Ints
    depth: Ints
    anchors: Ints
    firsts: Ints
    most: int
    requests: SamplingMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """plans: of the layouts that it is updated for, with the most blocks of each."""

    graph: CapturedGraph
    plans: tuple[tuple[AttentionPlan, int], ...]


class BlockGraphs:
    """The graphs of one block drafter. Captures them when constructed; calls report with (done, total).

    sizes: rows of graphs, ascending. logits: [N, V] float32, room for the logits of max_sequences rows. kv: of the
    cache. max_blocks_each: most blocks of one sequence.
    """

    def __init__(
        self,
        model: BlockModel,
        cache: KvCache,
        ring: Tensor,
        backend: Backend,
        capture: GraphCapture,
        kernels: DeviceSamplingKernels,
        *,
        sizes: Sequence[int],
        max_sequences: int,
        kv: KvShape,
        max_blocks_each: int,
        logits: Tensor,
        report: Callable[[int, int], None],
    ) -> None:
        self._model = model
        self._cache = cache
        self._ring = ring
        self._capture = capture
        self._kernels = kernels
        self._block_size = kv.block_size
        self._max_blocks_each = max_blocks_each
        self._max_blocks = model.spec.block_size * kv.num_blocks
        self._logits = logits
        self._max_sequences = max_sequences
        self._sizes = tuple(sizes)
        self._width = -(-max_sequences // _LINE) * _LINE
        most, device = model.spec.most_tokens, backend.device
        self._depths = _depths(model)
        self._context_inputs = capture.staging_buffer(self._sizes[-1], torch.int64)
        self._block_inputs = capture.staging_buffer(3 * self._sizes[-1], torch.int64)
        self._walk_inputs = capture.staging_buffer(max_sequences, torch.int64)
        self._metadata = SamplingMetadataBuffer(capture, most * self._width)
        self._tokens = torch.zeros((most, self._width), dtype=torch.int64, device=device)
        self._margins = torch.zeros((most, self._width), dtype=torch.float32, device=device)
        self._nothing = torch.zeros(0, dtype=torch.int64, device=device)
        self._rows = torch.arange(self._sizes[-1], device=device)
        self._candidates = self._room(backend)
        self._of_sequences = _sequences(self._sizes, max_sequences)
        walks = [*product(self._of_sequences, self._depths, ALL_FLAGS)]
        total = 2 * len(self._sizes) + len(walks)
        self._contexts: dict[int, _Graph] = {}
        self._blocks: dict[int, _Graph] = {}
        self._walks: dict[tuple[int, int, TruncationFlags], CapturedGraph] = {}
        for rows in reversed(self._sizes):
            self._contexts[rows] = self._context_graph(rows)
            self._blocks[rows] = self._block_graph(rows)
            report(len(self._contexts) + len(self._blocks), total)
        for count, depth, flags in reversed(walks):
            self._walks[count, depth, flags] = self._captured(partial(self._walk, count, depth, flags))
            report(2 * len(self._sizes) + len(self._walks), total)

    def fits(self, given: BlockPass) -> bool:
        """Return whether `draft` has graphs for this pass."""
        window, lengths = self._model.shortest_window, given.blocks.seq_len
        if window is not None and int(lengths.max()) > window:
            return False
        has_context = given.context is None or self.has_context(given.context)
        return has_context and self._fits(self._blocks, given.blocks)

    def has_context(self, layout: RowLayout) -> bool:
        """Return whether there is a graph for these context rows."""
        return self._fits(self._contexts, layout)

    def read(self, layout: RowLayout, numbers: Ints) -> bool:
        """Launch the context rows. False: there is no graph for them, and nothing was launched."""
        if not self.has_context(layout):
            return False
        size = size_for(self._sizes, len(numbers))
        sent = self._context_inputs.host()
        sent[: len(numbers)], sent[len(numbers) :] = numbers, UNKNOWN
        self._context_inputs.send()
        self._run(self._contexts[size], layout)
        return True

    @property
    def scores(self) -> Tensor:
        """Return the scores [R, C] of the candidates of the last blocks, for passes that are only timed."""
        return self._candidates.scores

    def run(self, blocks: RowLayout, token_ids: Ints) -> bool:
        """Launch blocks alone. False: there is no graph for them, and nothing was launched."""
        if not self._fits(self._blocks, blocks):
            return False
        self._launch_blocks(blocks, token_ids, np.ones_like(token_ids), token_ids)
        return True

    def draft(self, given: BlockPass) -> Callable[[], list[SampledTokens]]:
        """Launch everything; the result waits for the tokens of each depth, [S]."""
        if given.context is not None:
            assert self.read(given.context, given.numbers), "see fits"
        self._launch_blocks(given.blocks, given.token_ids, given.depth, given.anchors)
        count, flags = len(given.firsts), given.requests.truncation_flags
        size, depth = size_for(self._of_sequences, count), size_for(self._depths, given.most)
        sent = self._walk_inputs.host()
        sent[:count], sent[count:] = given.firsts, 0
        self._walk_inputs.send()
        if flags.random:
            self._metadata.send(self._of_depths(given.requests, depth))
        self._walks[size, depth, flags].replay()
        return partial(_tokens_of, self._capture.readback((self._tokens, self._margins)), given.most, count)

    def _launch_blocks(self, blocks: RowLayout, token_ids: Ints, depth: Ints, anchors: Ints) -> None:
        rows, most = len(token_ids), self._sizes[-1]
        size = size_for(self._sizes, rows)
        sent = self._block_inputs.host().reshape(3, most)
        sent[:, :rows] = token_ids, depth, anchors
        sent[:, rows:] = 0
        self._block_inputs.send()
        self._run(self._blocks[size], blocks, rows_alone(blocks))

    def _run(self, graph: _Graph, *layouts: RowLayout) -> None:
        for (plan, _), layout in zip(graph.plans, layouts, strict=True):
            self._capture.update_plan(plan, layout)
        graph.graph.replay()

    def _fits(self, graphs: dict[int, _Graph], layout: RowLayout) -> bool:
        """Return whether there is a graph for these rows, with room for the blocks of all plans."""
        size = next_size(self._sizes, len(layout.positions))
        if size is None or len(layout.seq_len) > self._max_sequences:
            return False
        blocks = -(-layout.seq_len.numpy() // self._block_size)
        rows = np.diff(layout.query_start.numpy())
        needed = (int(blocks.sum()), int((blocks * rows).sum()))
        return all(most >= each for (_, most), each in zip(graphs[size].plans, needed, strict=False))

    def _plan(self, rows: int, *, alone: bool) -> tuple[AttentionPlan, int]:
        sequences = rows if alone else min(rows, self._max_sequences)
        size = GraphBatchSize(rows=rows, sequences=sequences, one_row_each=alone)
        most = min(rows * self._max_blocks_each, rows + self._max_blocks)
        return self._capture.plan(size, self._block_size, most), most

    def _context_graph(self, rows: int) -> _Graph:
        plan = self._plan(rows, alone=False)
        numbers, none = self._context_inputs.device[:rows], self._nothing
        given = BlockRows(
            context_at=self._rows[:rows],
            block_at=none,
            token_ids=none,
            depth=none,
            plan=plan[0],
            own=(),
            seen=(),
            windowed=(),
        )

        def run() -> None:
            states = self._ring.index_select(0, numbers.clamp_min(0))
            states.masked_fill_((numbers == UNKNOWN)[:, None], 0)
            self._model.run(states, given, self._cache)

        return _Graph(graph=self._captured(run), plans=(plan,))

    def _block_graph(self, rows: int) -> _Graph:
        own, alone = self._plan(rows, alone=False), self._plan(rows, alone=True)
        seen = (SeenRows(rows=None, plan=alone[0]),)
        token_ids, depth, anchors = self._block_inputs.device.view(3, -1)[:, :rows]
        given = BlockRows(
            context_at=self._nothing,
            block_at=self._rows[:rows],
            token_ids=token_ids,
            depth=depth,
            plan=own[0],
            own=(SeenRows(rows=None, plan=own[0]),),
            seen=seen,
            windowed=seen,
        )

        def run() -> None:
            found = self._model.candidates(self._model.run(self._ring[:0], given, self._cache), anchors)
            for place, part in zip(_parts(self._candidates), _parts(found), strict=True):
                place[:rows].copy_(part)

        return _Graph(graph=self._captured(run), plans=(own, alone))

    def _walk(self, count: int, depth: int, flags: TruncationFlags) -> None:
        """Choose the tokens of `count` drafts, from left to right. A draft that has ended goes on in vain."""
        found, logits = self._candidates, self._logits[:count]
        requests = self._metadata.rows(depth * self._width)
        at = self._walk_inputs.device[:count]
        before = torch.zeros_like(at)
        for number in range(depth):
            scores, token_ids = found.scores.index_select(0, at), found.token_ids.index_select(0, at)
            behind = before[:, None]
            if found.pairs is not None:
                pairs = found.pairs.index_select(0, at)
                scores = scores + pairs.gather(2, behind[:, None].expand(-1, pairs.shape[1], 1))[:, :, 0]
            logits.fill_(-torch.inf).scatter_(1, token_ids, scores)
            chosen, margins = self._tokens[number, :count], self._margins[number, :count]
            rows = requests.part(number * self._width, count)
            self._kernels.draft(
                logits, rows, chosen, margins, random=flags.random, top_k=flags.top_k, top_p=flags.top_p
            )
            if found.confidences is not None:
                confidences = found.confidences.index_select(0, at).gather(1, behind)[:, 0]
                margins.copy_(confidences.clamp(-_LARGEST, _LARGEST))
            before = (token_ids == chosen[:, None]).int().argmax(1)
            at = (at + 1).clamp_max(len(found.scores) - 1)

    def _room(self, backend: Backend) -> Candidates:
        """Room for the candidates of the largest pass, at fixed addresses."""
        spec, rows = self._model.spec, self._sizes[-1]
        count = min(spec.num_candidates, spec.draft_vocab_size)

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros((rows, *shape), dtype=dtype, device=backend.device)

        return Candidates(
            scores=room(count),
            token_ids=room(count, dtype=torch.int64),
            pairs=room(count, count) if spec.markov_rank else None,
            confidences=room(count) if spec.confidence else None,
        )

    def _of_depths(self, requests: SamplingMetadata, depth: int) -> SamplingMetadata:
        """The requests at each depth, in lines of _width rows. What fills a line up asks for anything."""
        at = np.minimum(np.arange(self._width), len(requests) - 1)
        positions = requests.positions[at] + np.arange(depth)[:, None]
        return requests.among(np.tile(at, depth)).at(positions.ravel())

    @torch.inference_mode()
    def _captured(self, work: Callable[[], None]) -> CapturedGraph:
        return self._capture.capture(work)


def num_walks(model: BlockModel, sizes: Sequence[int], max_sequences: int) -> int:
    """Return the number of graphs that choose tokens."""
    return len(_sequences(sizes, max_sequences)) * len(_depths(model)) * len(ALL_FLAGS)


def _sequences(sizes: Sequence[int], max_sequences: int) -> tuple[int, ...]:
    return (*(each for each in sizes if each < max_sequences), max_sequences)


def _depths(model: BlockModel) -> tuple[int, ...]:
    most = model.spec.most_tokens
    return tuple(sorted({-(-most // 2), most}))


def _parts(found: Candidates) -> list[Tensor]:
    parts = (found.scores, found.token_ids, found.pairs, found.confidences)
    return present(parts)


def _tokens_of(readback: Readback, most: int, count: int) -> list[SampledTokens]:
    token_ids, margins = readback.wait()
    return [
        SampledTokens(token_ids=token_ids[depth, :count], margins=margins[depth, :count].astype(np.float64))
        for depth in range(most)
    ]
