"""The recordings of one runner at one place: on the whole device, or on a lane's part of it.

    trunk     rows -> hidden states     by GraphBatchSize: so many rows, of so many sequences, one each or several
    head      hidden states -> logits   by how many rows
    choice    logits -> tokens          by how many rows, and by what their requests ask for

Places differ in the processors that work was recorded for and in their pools and plans. What goes in and out of a
step, and what lies between its parts, are buffers of the runner, whichever place it runs on: it takes turns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from faser.engine.execution.cuda_graphs.batch_sizes import BatchSizes, DraftGraphs, GraphSizes, next_size
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.sampling.token_samplers import DeviceTokenSampler
from faser.kernels.interface.backend import AttentionPlan, KvCache, RowLayout
from faser.kernels.interface.graph_capture import CapturedGraph, GraphBatchSize, GraphCapture, StagingBuffer
from faser.kernels.interface.sampling_metadata import TruncationFlags

_ALL_CUTS = (
    TruncationFlags(random=False, top_k=False, top_p=False),
    *(
        TruncationFlags(random=True, top_k=top_k, top_p=top_p)
        for top_k in (False, True)
        for top_p in (False, True)
    ),
)


class GraphInputs:
    """Token ids of a step's rows at a fixed place, and where fed ones come from."""

    def __init__(self, capture: GraphCapture, max_rows: int) -> None:
        self._max_rows = max_rows
        self._stage: StagingBuffer = capture.stage(2 * max_rows, torch.int64)

    def send(self, batch: RowBatch, chooser: DeviceTokenSampler) -> None:
        numbers, count = self._stage.host(), batch.num_rows
        token_ids, sources = numbers[: self._max_rows], numbers[self._max_rows :]
        token_ids[:count], token_ids[count:] = batch.token_ids.numpy(), 0
        sources[:] = -1
        if batch.feed is not None:
            pending = batch.feed.pending.tokens
            assert pending.data_ptr() == chooser.tokens.data_ptr(), "fed from another runner's choice"
            sources[batch.feed.rows] = batch.feed.sources
        self._stage.send()

    def read(self, rows: int, chooser: DeviceTokenSampler) -> torch.Tensor:
        """[rows] int64, on the device."""
        device = self._stage.device
        token_ids, sources = device[:rows], device[self._max_rows : self._max_rows + rows]
        fed = chooser.tokens.index_select(0, sources.clamp_min(0)).clamp_min(0)
        return torch.where(sources >= 0, fed, token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphParts:
    """What of a runner is recorded: the same wherever it runs. head_rows: of hidden states, that become logits."""

    decoder: Decoder
    cache: KvCache
    block_size: int
    num_blocks: int
    chooser: DeviceTokenSampler
    inputs: GraphInputs
    head_rows: StagingBuffer

    @property
    def num_layers(self) -> int:
        return self.decoder.spec.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneGraph:
    """max_blocks: that all sequences of a step may have together."""

    bucket: GraphBatchSize
    plan: AttentionPlan
    max_blocks: int
    recording: CapturedGraph


class StepGraphs:
    """capture: of the place, for nobody else. max_logit_rows: most rows whose logits are taken at once."""

    def __init__(
        self, recorded: GraphParts, capture: GraphCapture, sizes: GraphSizes, *, max_logit_rows: int
    ) -> None:
        self._recorded = recorded
        self._capture = capture
        self._sizes = sizes
        self._head_sizes = tuple(each for each in sizes.rows if each <= max_logit_rows)
        self._buckets = {each: BatchSizes(sizes, one_row_each=each) for each in (True, False)}
        self._trunks: dict[tuple[GraphBatchSize, int], BackboneGraph] = {}
        self._heads: dict[int, CapturedGraph] = {}
        self._takes: dict[tuple[int, TruncationFlags], CapturedGraph] = {}
        self._guesses: dict[tuple[int, TruncationFlags, float], CapturedGraph] = {}

    @property
    def num_recordings(self) -> int:
        return len(self._trunks) + len(self._heads) + len(self._takes) + len(self._guesses)

    def num_wanted(self, guessing: DraftGraphs) -> int:
        """How many there will be."""
        trunks = len(self._sizes.buckets) * len(self._depths(guessing))
        return trunks + len(self._head_sizes) * (1 + len(_ALL_CUTS) * (1 + len(guessing.windows)))

    def trunk(self, batch: RowBatch, depth: int) -> BackboneGraph | None:
        """The smallest that the batch fits into."""
        layout = batch.layout
        num_rows, num_sequences = batch.num_rows, layout.seq_len.shape[0]
        bucket = self._buckets[num_rows == num_sequences].fitting(num_rows, num_sequences)
        trunk = None if bucket is None else self._trunks.get((bucket, depth))
        if trunk is None or not _has_room(trunk, layout, self._recorded.block_size):
            return None
        return trunk

    def run(self, trunk: BackboneGraph, layout: RowLayout) -> None:
        self._capture.lay_out(trunk.plan, layout)
        trunk.recording.replay()

    def head(self, num_rows: int) -> CapturedGraph | None:
        size = next_size(self._head_sizes, num_rows)
        return None if size is None else self._heads[size]

    def take(self, num_rows: int, cuts: TruncationFlags) -> CapturedGraph | None:
        size = next_size(self._head_sizes, num_rows)
        return None if size is None else self._takes.get((size, cuts))

    def guess(self, num_rows: int, cuts: TruncationFlags, window: float) -> CapturedGraph | None:
        size = next_size(self._head_sizes, num_rows)
        return None if size is None else self._guesses.get((size, cuts, window))

    def record(self, guessing: DraftGraphs, progress: Callable[[], None]) -> None:
        """Large ones first: what they allocate is enough for the others. progress is called now and then."""
        for bucket in reversed(self._sizes.buckets):
            for depth in self._depths(guessing):
                self._trunks[bucket, depth] = self._record_trunk(bucket, depth)
                progress()
        for size in reversed(self._head_sizes):
            self._record_ends(size, guessing.windows)
            progress()

    def _depths(self, guessing: DraftGraphs) -> tuple[int, ...]:
        most = self._recorded.num_layers
        return tuple(dict.fromkeys(most if each is None else each for each in (None, *guessing.depths)))

    def _record_trunk(self, bucket: GraphBatchSize, depth: int) -> BackboneGraph:
        recorded = self._recorded
        # Sequences may share blocks, so that all of them together can have more than there are.
        max_blocks = min(bucket.sequences * self._sizes.blocks_each, 2 * recorded.num_blocks + bucket.sequences)
        plan = self._capture.plan(bucket, recorded.block_size, max_blocks)

        def run() -> None:
            hidden = recorded.decoder.embed(recorded.inputs.read(bucket.rows, recorded.chooser))
            recorded.decoder.run_layers(hidden, 0, depth, recorded.cache, plan)

        return BackboneGraph(bucket=bucket, plan=plan, max_blocks=max_blocks, recording=self._record(run))

    def _record_ends(self, size: int, windows: tuple[float, ...]) -> None:
        """What comes behind a trunk, for so many rows."""
        decoder, chooser = self._recorded.decoder, self._recorded.chooser
        rows, logits = self._recorded.head_rows.device[:size], decoder.logit_rows[:size]
        self._heads[size] = self._record(lambda: _run_head(decoder, rows))
        for cuts in _ALL_CUTS:
            self._takes[size, cuts] = self._record(partial(chooser.run_take, logits, cuts))
            for window in windows:
                guess = partial(chooser.run_draft, logits, window, cuts)
                self._guesses[size, cuts, window] = self._record(guess)

    @torch.inference_mode()
    def _record(self, work: Callable[[], None]) -> CapturedGraph:
        return self._capture.record(work)


def _run_head(decoder: Decoder, rows: torch.Tensor) -> None:
    decoder.logits(decoder.hidden.index_select(0, rows))


def _has_room(trunk: BackboneGraph, layout: RowLayout, block_size: int) -> bool:
    """For the blocks of all sequences. They are counted only where those of the table are too many."""
    if layout.block_table.numel() <= trunk.max_blocks:
        return True
    lengths: NDArray[np.int32] = layout.seq_len.numpy()
    return int((-(-lengths // np.int32(block_size))).sum()) <= trunk.max_blocks
