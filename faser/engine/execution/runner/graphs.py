"""The CUDA graphs of one runner on one lane, or on the whole device.

    backbone       rows -> hidden states          one graph per GraphBatchSize (graph_sizes.py)
    LM head        hidden states -> logits        one graph per number of rows
    sampler        logits -> tokens               one graph per number of rows and truncation flags
    draft sampler  logits -> tokens and margins   one graph per number of rows and truncation flags

Every lane has plans and a graph memory pool of its own. The buffers between the graphs belong to the runner; its
lanes share them, since a runner uses one lane at a time. A step is padded to the next size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from faser.config.speculation import MAX_DRAFT_TOKENS
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.graph_sizes import GraphSizes, StepSizes, next_size
from faser.engine.execution.runner.model import RunnableModel
from faser.engine.execution.sampling.tokens import DeviceTokenSampler
from faser.kernels.interface.adapters import Adapters, row_adapters
from faser.kernels.interface.graph_capture import CapturedGraph, GraphBatchSize, GraphCapture, StagingBuffer
from faser.kernels.interface.mixers import NUMBERS, States, StateStep
from faser.kernels.interface.sampling import TruncationFlags
from faser.kernels.interface.shapes import AttentionPlan, KvCache, RowLayout
from faser.optional import maybe

_NO_SEQUENCE = np.array((0, 0, 0, 0, 0, 1 << 40))  # of StateStep.numbers: it has no row, and no row is behind it
_MOST_DRAFT_ROWS = MAX_DRAFT_TOKENS + 1  # of one sequence that verifies drafts
# Tiles of one sequence times its positions, which each of them reads. Estimated for 8B models: reading them costs
# 28 ms for every million, and the launches of an eager step up to 6 ms.
_MOST_READ_BY_TILES = 1 << 17
ALL_FLAGS = (
    TruncationFlags(random=False, top_k=False, top_p=False),
    *(
        TruncationFlags(random=True, top_k=top_k, top_p=top_p)
        for top_k in (False, True)
        for top_p in (False, True)
    ),
)


class GraphInputs:
    """Token ids of a step's rows at a fixed address, with the source of each id that comes by token feedback.

    adapts: with the adapter slots of the rows, too.
    """

    def __init__(self, capture: GraphCapture, max_rows: int, *, adapts: bool = False) -> None:
        self._max_rows, self._adapts = max_rows, adapts
        self._staging: StagingBuffer = capture.staging_buffer((2 + adapts) * max_rows, torch.int64)

    def send(self, batch: RowBatch, token_sampler: DeviceTokenSampler) -> None:
        numbers, count = self._staging.host(), batch.num_rows
        token_ids, sources = numbers[: self._max_rows], numbers[self._max_rows : 2 * self._max_rows]
        token_ids[:count], token_ids[count:] = batch.token_ids.numpy(), 0
        sources[:] = -1
        if batch.feedback is not None:
            sources[batch.feedback.rows] = token_sampler.place(batch.feedback.tokens) + batch.feedback.sources
        if self._adapts:
            slots = numbers[2 * self._max_rows :]
            slots[:count], slots[count:] = row_adapters(batch.layout), -1
        self._staging.send()

    def adapters(self, rows: int) -> torch.Tensor:
        """Return the adapter slots of the rows: [rows] int64, on the device; below 0: none."""
        return self._staging.device[2 * self._max_rows :][:rows]

    def read(self, rows: int, token_sampler: DeviceTokenSampler) -> torch.Tensor:
        """Return the token ids of the rows: [rows] int64, on the device."""
        device = self._staging.device
        token_ids, sources = device[:rows], device[self._max_rows : self._max_rows + rows]
        fed_back = token_sampler.words.index_select(0, sources.clamp_min(0)).clamp_min(0)
        return torch.where(sources >= 0, fed_back, token_ids)


class StateInputs:
    """The numbers of a step's sequences that delta nets read, at a fixed address."""

    def __init__(self, capture: GraphCapture, states: States, max_sequences: int) -> None:
        self._states = states
        self._staging: StagingBuffer = capture.staging_buffer(NUMBERS * max_sequences, torch.int64)

    def send(self, step: StateStep) -> None:
        numbers, count = self._staging.host().reshape(NUMBERS, -1), len(step.slots)
        numbers[:, :count], numbers[:, count:] = step.numbers, _NO_SEQUENCE[:, None]
        self._staging.send()

    def read(self, num_sequences: int) -> StateStep:
        """The step as a graph of this many sequences reads it."""
        nothing = np.empty(0, dtype=np.int64)
        return StateStep(
            states=self._states,
            slots=nothing,
            ends=nothing,
            starts=nothing,
            counts=nothing,
            num_drafts=nothing,
            first_rows=nothing,
            sent=self._staging.device.view(NUMBERS, -1)[:, :num_sequences],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphParts:
    """The parts of a runner that its graphs work with, on every lane.

    logit_rows: numbers of the rows of hidden states that the LM head reads. state_inputs: None: the model has no
    recurrent states. adapters: None: no row has one.
    """

    decoder: RunnableModel
    cache: KvCache
    block_size: int
    num_blocks: int
    token_sampler: DeviceTokenSampler
    inputs: GraphInputs
    logit_rows: StagingBuffer
    state_inputs: StateInputs | None = None
    adapters: Adapters | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneGraph:
    """max_blocks: most blocks that all sequences of a step have together."""

    batch_size: GraphBatchSize
    plan: AttentionPlan
    max_blocks: int
    graph: CapturedGraph


class StepGraphs:
    """The graphs of one lane; before `capture_all` there are none, and no step fits one.

    capture: of this lane, used by nothing else. max_logit_rows: most rows whose logits are computed at once.
    samples: whether the runner samples tokens.
    """

    def __init__(
        self,
        parts: GraphParts,
        capture: GraphCapture,
        sizes: GraphSizes,
        *,
        max_logit_rows: int,
        samples: bool = True,
    ) -> None:
        self._samples = samples
        self._parts = parts
        self._capture = capture
        self._sizes = sizes
        self._logit_sizes = tuple(each for each in sizes.rows if each <= max_logit_rows)
        self._step_sizes = StepSizes(sizes)
        # By the size that a step is padded to; no graph is of the size None, of steps that fit no size.
        self._backbones: dict[GraphBatchSize | None, BackboneGraph] = {}
        self._adapted: dict[GraphBatchSize | None, BackboneGraph] = {}  # of steps with adapters
        self._lm_heads: dict[int | None, CapturedGraph] = {}
        self._samplers: dict[tuple[int | None, TruncationFlags], CapturedGraph] = {}
        self._draft_samplers: dict[tuple[int | None, TruncationFlags], CapturedGraph] = {}

    @property
    def smallest_plan(self) -> AttentionPlan | None:
        """Return that of the smallest graph in which each sequence has one row; None: there is none such."""
        found = [each for each in self._backbones.values() if each.batch_size.one_row_each]
        return min(found, key=lambda each: each.batch_size.rows).plan if found else None

    @property
    def block_size(self) -> int:
        return self._parts.block_size

    @property
    def num_graphs(self) -> int:
        backbones = len(self._backbones) + len(self._adapted)
        return backbones + len(self._lm_heads) + len(self._samplers) + len(self._draft_samplers)

    def num_expected(self, drafts: bool) -> int:
        """The number of graphs after `capture_all`."""
        samplers = len(ALL_FLAGS) * (1 + drafts) if self._samples else 0
        backbones = len(self._sizes.batch_sizes) * (1 + (self._parts.adapters is not None))
        return backbones + len(self._logit_sizes) * (1 + samplers)

    def backbone(self, batch: RowBatch) -> BackboneGraph | None:
        """The smallest graph that the batch fits into.

        None: the step has more rows than all graphs, more blocks than there is room for, or a long prompt whose
        attention would be slow.
        """
        counts = np.diff(batch.layout.query_start.numpy())
        batch_size = self._step_sizes.fitting(counts)
        has_adapters = self._parts.adapters is not None and batch.layout.adapters is not None
        backbone = (self._adapted if has_adapters else self._backbones).get(batch_size)
        if (
            backbone is None
            or _rereads_prompts(backbone.batch_size, counts, batch.layout)
            or not _has_room(backbone, batch.layout, self._parts.block_size)
        ):
            return None
        return backbone

    def run(self, backbone: BackboneGraph, layout: RowLayout) -> None:
        self._capture.update_plan(backbone.plan, layout)
        backbone.graph.replay()

    def lm_head(self, num_rows: int) -> CapturedGraph | None:
        return self._lm_heads.get(next_size(self._logit_sizes, num_rows))

    def sampler(self, num_rows: int, flags: TruncationFlags) -> CapturedGraph | None:
        return self._samplers.get((next_size(self._logit_sizes, num_rows), flags))

    def draft_sampler(self, num_rows: int, flags: TruncationFlags) -> CapturedGraph | None:
        return self._draft_samplers.get((next_size(self._logit_sizes, num_rows), flags))

    def capture_all(self, drafts: bool, progress: Callable[[], None], before: Callable[[str], None]) -> None:
        """Capture the largest first: their memory is enough for the smaller ones. Calls progress in between.

        before: is given the name of what is captured next.
        """
        for batch_size in reversed(self._sizes.batch_sizes):
            before(f"the graph of {batch_size}")
            self._backbones[batch_size] = self._capture_backbone(batch_size)
            progress()
        for batch_size in reversed(self._sizes.batch_sizes if self._parts.adapters is not None else ()):
            before(f"the graph with adapters of {batch_size}")
            self._adapted[batch_size] = self._capture_backbone(batch_size, self._parts.adapters)
            progress()
        for size in reversed(self._logit_sizes):
            before(f"the LM head of {size} rows")
            self._capture_heads(size, drafts)
            progress()

    def _capture_backbone(self, batch_size: GraphBatchSize, adapters: Adapters | None = None) -> BackboneGraph:
        """adapters: None: of steps without."""
        parts = self._parts
        adapted = maybe(lambda found: found.rows_at(parts.inputs.adapters(batch_size.rows)), adapters)
        # Sequences may share blocks, so all of them together may count more blocks than the cache has.
        max_blocks = min(
            batch_size.sequences * self._sizes.max_blocks_each, 2 * parts.num_blocks + batch_size.sequences
        )
        plan = self._capture.plan(batch_size, parts.block_size, max_blocks)

        state_step = maybe(lambda states: states.read(batch_size.sequences), parts.state_inputs)

        def run() -> None:
            hidden = parts.decoder.embed(parts.inputs.read(batch_size.rows, parts.token_sampler))
            # The same graphs serve steps with and without rows for a head: what no head reads is not read.
            last = parts.decoder.spec.num_layers
            parts.decoder.run_layers(
                hidden, 0, last, parts.cache, plan, captures=True, state_step=state_step, adapted=adapted
            )

        return BackboneGraph(batch_size=batch_size, plan=plan, max_blocks=max_blocks, graph=self._captured(run))

    def _capture_heads(self, size: int, drafts: bool) -> None:
        """The LM head and the samplers for `size` rows."""
        decoder, token_sampler = self._parts.decoder, self._parts.token_sampler
        rows, logits = self._parts.logit_rows.device[:size], decoder.logit_rows[:size]
        self._lm_heads[size] = self._captured(lambda: _run_lm_head(decoder, rows))
        for flags in ALL_FLAGS if self._samples else ():
            self._samplers[size, flags] = self._captured(partial(token_sampler.run_take, logits, flags))
            if drafts:
                self._draft_samplers[size, flags] = self._captured(partial(token_sampler.run_draft, logits, flags))

    @torch.inference_mode()
    def _captured(self, work: Callable[[], None]) -> CapturedGraph:
        return self._capture.capture(work)


def _run_lm_head(decoder: RunnableModel, rows: torch.Tensor) -> None:
    decoder.logits(decoder.hidden.index_select(0, rows))


def _rereads_prompts(size: GraphBatchSize, counts: NDArray[np.int32], layout: RowLayout) -> bool:
    """Return whether attention would read a long prompt again for every few rows.

    counts: rows of each sequence. One with more rows than a tile holds takes several tiles, and each reads all of
    its positions.
    """
    tile = size.tile_rows or size.rows - size.sequences + 1
    if size.rows == size.sequences or tile >= _MOST_DRAFT_ROWS:
        return False
    read: NDArray[np.int32] = -(-counts // tile) * layout.seq_len.numpy()
    return bool((read[counts > _MOST_DRAFT_ROWS] > _MOST_READ_BY_TILES).any())


def _has_room(backbone: BackboneGraph, layout: RowLayout, block_size: int) -> bool:
    """Return whether the graph has room for all sequences' blocks; counts them only if the table is too large."""
    if layout.block_table.numel() <= backbone.max_blocks:
        return True
    lengths: NDArray[np.int32] = layout.seq_len.numpy()
    return int((-(-lengths // np.int32(block_size))).sum()) <= backbone.max_blocks
