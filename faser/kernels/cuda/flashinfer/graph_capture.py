"""GraphCapture for FlashInfer: attention plans at fixed addresses, CUDA graphs, staging buffers and readbacks.

A fixed plan owns its index arrays, one copy on the device and two on the host, and the attention wrappers of the
layers that run with it. Updating it takes one transfer of all arrays, then, where it would change, a plan for each
kind of attention among the captured layers (attention_plans.py). The plan learns the kinds when the work runs
before the capture.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from faser.kernels.cuda.device import Accelerator
from faser.kernels.cuda.flashinfer.attention_plans import FixedAttention
from faser.kernels.cuda.flashinfer.library import PagedAttention
from faser.kernels.cuda.flashinfer.paged_attention import PLAN_BYTES, AttentionKind, AttentionWrappers
from faser.kernels.cuda.staging import DoubleBuffer, PinnedReadback, PinnedStagingBuffer, ReadbackPool
from faser.kernels.interface.graph_capture import CapturedGraph, GraphBatchSize
from faser.kernels.interface.paged_layout import NO_SLOT, LayoutSizes, LayoutWriter, layout_within
from faser.kernels.interface.processors import DeviceLane
from faser.kernels.interface.shapes import RowLayout


class FixedPlan:
    """A plan whose arrays stay in place. Work captured with it has the rows of `size`, padding included.

    During the capture the plan is blank: all rows are padding, but each belongs to a sequence, because FlashInfer
    needs as many rows in a plan as the kernel gets, and its first plan fixes the most rows of all later ones.
    """

    def __init__(
        self,
        size: GraphBatchSize,
        block_size: int,
        max_blocks: int,
        *,
        accelerator: Accelerator,
        wrappers: AttentionWrappers,
    ) -> None:
        assert size.rows >= size.sequences >= 1, size
        assert not size.one_row_each or size.rows == size.sequences, size
        assert size.rows_each is None or size.rows == size.sequences * size.rows_each, size
        self.block_size = block_size
        self.one_row_each = size.one_row_each
        self._rows_each = size.rows_each
        self._wrappers = wrappers
        # Every padding sequence has a block, and the blank layout has blocks for its rows.
        pages = max(max_blocks, size.rows // block_size) + size.sequences
        sizes = LayoutSizes(rows=size.rows, sequences=size.sequences, pages=pages)
        self._staging = DoubleBuffer(accelerator, sizes.numbers, torch.int32)
        self.device = layout_within(self._staging.device, sizes)
        self._hosts = tuple(layout_within(each, sizes) for each in self._staging.hosts)
        self._writers = tuple(
            LayoutWriter(each, block_size, one_row_each=size.one_row_each, rows_each=size.rows_each)
            for each in self._hosts
        )
        self._no_pages = self.device.page_indices[:0]
        self._accelerator = accelerator
        self._planned: dict[AttentionKind, FixedAttention] = {}
        # Marked after the first plans, which copy from the host arrays.
        self._copied = accelerator.event()
        self._host = self._hosts[0]
        self._write(_blank(size, block_size))
        self._host.slots.fill_(NO_SLOT)
        self._staging.send()
        self._is_blank = True

    @property
    def bytes(self) -> int:
        """Device memory of the arrays and the wrappers, without their shared workspace."""
        return self._staging.device.nbytes + len(self._planned) * PLAN_BYTES

    def update(self, layout: RowLayout) -> None:
        """See GraphCapture.update_plan."""
        if self._is_blank:
            self._copied.synchronize()
            self._is_blank = False
        num_read = self._write(layout)
        self._staging.send(num_read)
        for planned in self._planned.values():
            planned.update(self._host)

    def attention(self, kind: AttentionKind) -> PagedAttention:
        """The wrapper of a kind, planned for the layout. A kind's first call plans it, before the capture."""
        planned = self._planned.get(kind)
        if planned is None:
            assert self._is_blank, "a kind of attention that the captured layers do not have"
            planned = self._planned[kind] = FixedAttention(
                self._accelerator,
                self._wrappers.fixed(kind, self.device, rows_each=self._rows_each),
                kind,
                self._host,
                self.block_size,
                self._no_pages,
                rows_each=self._rows_each,
            )
            self._copied.record()
        return planned.wrapper

    def _write(self, layout: RowLayout) -> int:
        """Write a layout into the host arrays of the next send; returns how many of their numbers to send."""
        at = self._staging.claim()
        self._host = self._hosts[at]
        return self._writers[at].fill(layout)


def _blank(size: GraphBatchSize, block_size: int) -> RowLayout:
    """All rows of a size, spread over its sequences from position 0 on, all in block 0."""
    counts = np.full(size.sequences, size.rows // size.sequences, dtype=np.int32)
    counts[: size.rows % size.sequences] += 1
    starts = np.zeros(size.sequences + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    positions = np.arange(size.rows, dtype=np.int32) - np.repeat(starts[:-1], counts)
    blocks = -(-int(counts.max()) // block_size)
    return RowLayout(
        query_start=torch.from_numpy(starts),
        seq_len=torch.from_numpy(counts),
        positions=torch.from_numpy(positions),
        block_table=torch.zeros((size.sequences, blocks), dtype=torch.int32),
    )


class FlashInferGraphCapture:
    """See GraphCapture. wrappers: of the captured lane. lane: None: the whole device."""

    def __init__(
        self, accelerator: Accelerator, wrappers: AttentionWrappers, lane: DeviceLane | None = None
    ) -> None:
        self._accelerator = accelerator
        self._wrappers = wrappers
        self._recorder = accelerator.graph_recorder(lane)
        self._readbacks = ReadbackPool(accelerator)
        self._plans: list[FixedPlan] = []

    def plan(self, size: GraphBatchSize, block_size: int, max_blocks: int) -> FixedPlan:
        plan = FixedPlan(size, block_size, max_blocks, accelerator=self._accelerator, wrappers=self._wrappers)
        self._plans.append(plan)
        return plan

    def update_plan(self, plan: FixedPlan, layout: RowLayout) -> None:
        """See GraphCapture. Waits until the device has copied the previous layout, not for its step."""
        plan.update(layout)

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        """See GraphCapture. Runs the work twice first, which loads kernels and finds the kinds of attention."""
        return self._recorder.capture(work)

    def staging_buffer(self, count: int, dtype: torch.dtype) -> PinnedStagingBuffer:
        return PinnedStagingBuffer(self._accelerator, count, dtype)

    def readback(self, values: Sequence[Tensor]) -> PinnedReadback:
        return self._readbacks.read_back(values)

    @property
    def graph_bytes(self) -> int:
        """See GraphCapture. Without the workspace, which all lanes of a backend share."""
        return self._recorder.graph_bytes + sum(plan.bytes for plan in self._plans)
