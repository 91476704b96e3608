"""Plans at fixed places, and what else the recordings of a place need: see Capture.

A plan owns its index arrays, on the device once and on the host twice, and the attention wrappers of the layers
that were run with it. Laying a step out is one transfer of all arrays, then a plan of every kind of attention that
the recorded layers have: FlashInfer's own copies of three of the arrays, and of its plan, come with that. Kinds
are found when the work is run before it is recorded. Nothing of this has run on a GPU yet.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from faser.kernels.cuda.device import Accelerator
from faser.kernels.cuda.events import DeviceEvent
from faser.kernels.cuda.flashinfer.library import PagedAttention
from faser.kernels.cuda.flashinfer.paged_attention import (
    INT_WORKSPACE_BYTES,
    AttentionKind,
    AttentionWrappers,
    plan_attention,
)
from faser.kernels.cuda.staging import DoubleBuffer, PinnedReadback, PinnedStagingBuffer, ReadbackPool
from faser.kernels.interface.backend import RowLayout
from faser.kernels.interface.graph_capture import CapturedGraph, GraphBatchSize
from faser.kernels.interface.paged_layout import NO_SLOT, LayoutSizes, LayoutWriter, layout_within
from faser.kernels.interface.processors import DeviceLane


class FixedPlan:
    """A plan whose arrays stay in place. Rows of what is recorded with it are the bucket's, padding included.

    It is recorded blank: all rows are padding, yet each belongs to a sequence, for FlashInfer wants to see as many
    rows in a plan as it is given, and takes from its first plan how many there may ever be.
    """

    def __init__(
        self,
        bucket: GraphBatchSize,
        block_size: int,
        max_blocks: int,
        *,
        accelerator: Accelerator,
        wrappers: AttentionWrappers,
    ) -> None:
        assert bucket.rows >= bucket.sequences >= 1, bucket
        assert not bucket.one_row_each or bucket.rows == bucket.sequences, bucket
        self.block_size = block_size
        self.one_row_each = bucket.one_row_each
        self._wrappers = wrappers
        # Each sequence that is not there has a block too, and the blank layout has some for its rows.
        pages = max(max_blocks, bucket.rows // block_size) + bucket.sequences
        sizes = LayoutSizes(rows=bucket.rows, sequences=bucket.sequences, pages=pages)
        self._staging = DoubleBuffer(accelerator, sizes.numbers, torch.int32)
        self.device = layout_within(self._staging.device, sizes)
        self._hosts = tuple(layout_within(each, sizes) for each in self._staging.hosts)
        self._writers = tuple(
            LayoutWriter(each, block_size, one_row_each=bucket.one_row_each) for each in self._hosts
        )
        self._no_pages = self.device.page_indices[:0]
        self._planned: dict[AttentionKind, PagedAttention] = {}
        self._splits: dict[AttentionKind, bool] = {}
        # Behind what planning gave to the device: copies of its own pinned memory, and of the host's arrays. These
        # are written to again in the layout after the next, and the next one has waited for the event.
        self._copied: DeviceEvent = accelerator.event()
        self._host = self._hosts[0]
        self._write(_blank(bucket, block_size))
        self._host.slots.fill_(NO_SLOT)
        self._staging.send()
        self._is_blank = True

    @property
    def bytes(self) -> int:
        """Device memory of the arrays and the wrappers, without the workspace that they share."""
        return self._staging.device.nbytes + len(self._planned) * INT_WORKSPACE_BYTES

    def lay_out(self, layout: RowLayout) -> None:
        """See Capture."""
        num_read = self._write(layout)
        self._is_blank = False
        self._copied.synchronize()
        self._staging.send(num_read)
        for kind, wrapper in self._planned.items():
            self._plan(wrapper, kind)
        self._copied.record()

    def attention(self, kind: AttentionKind) -> PagedAttention:
        """The wrapper of a kind, planned for the layout. A kind that is new is planned here, so not recorded."""
        wrapper = self._planned.get(kind)
        if wrapper is None:
            assert self._is_blank, "a kind of attention that was not there when the plan was recorded"
            wrapper = self._planned[kind] = self._wrappers.fixed(kind, self.device)
            self._splits[kind] = self._wrappers.splits(kind, len(self.device.seq_len))
            self._plan(wrapper, kind)
            self._copied.record()
        return wrapper

    def _write(self, layout: RowLayout) -> int:
        """A layout into the host's arrays that are to be sent next; how much of them is to be sent."""
        at = self._staging.claim()
        self._host = self._hosts[at]
        return self._writers[at].fill(layout)

    def _plan(self, wrapper: PagedAttention, kind: AttentionKind) -> None:
        splits = self._splits[kind]
        plan_attention(wrapper, kind, self._host, self.block_size, self._no_pages, splits=splits)


def _blank(bucket: GraphBatchSize, block_size: int) -> RowLayout:
    """All rows of a bucket from position 0 on, spread over its sequences; all in the first block."""
    counts = np.full(bucket.sequences, bucket.rows // bucket.sequences, dtype=np.int32)
    counts[: bucket.rows % bucket.sequences] += 1
    starts = np.zeros(bucket.sequences + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    positions = np.arange(bucket.rows, dtype=np.int32) - np.repeat(starts[:-1], counts)
    blocks = -(-int(counts.max()) // block_size)
    return RowLayout(
        query_start=torch.from_numpy(starts),
        seq_len=torch.from_numpy(counts),
        positions=torch.from_numpy(positions),
        block_table=torch.zeros((bucket.sequences, blocks), dtype=torch.int32),
    )


class CudaCapture:
    """See Capture. wrappers: of the place whose work is recorded. place: None: the whole device."""

    def __init__(
        self, accelerator: Accelerator, wrappers: AttentionWrappers, place: DeviceLane | None = None
    ) -> None:
        self._accelerator = accelerator
        self._wrappers = wrappers
        self._recorder = accelerator.graph_recorder(place)
        self._readbacks = ReadbackPool(accelerator)
        self._plans: list[FixedPlan] = []

    def plan(self, bucket: GraphBatchSize, block_size: int, max_blocks: int) -> FixedPlan:
        """See Capture."""
        plan = FixedPlan(bucket, block_size, max_blocks, accelerator=self._accelerator, wrappers=self._wrappers)
        self._plans.append(plan)
        return plan

    def lay_out(self, plan: FixedPlan, layout: RowLayout) -> None:
        """See Capture. Waits until the step before has taken its own layout, not until it is done."""
        plan.lay_out(layout)

    def record(self, work: Callable[[], None]) -> CapturedGraph:
        """See Capture. The work is run twice first: that loads kernels and finds kinds of attention."""
        return self._recorder.capture(work)

    def stage(self, count: int, dtype: torch.dtype) -> PinnedStagingBuffer:
        return PinnedStagingBuffer(self._accelerator, count, dtype)

    def fetch(self, values: Sequence[Tensor]) -> PinnedReadback:
        return self._readbacks.read_back(values)

    @property
    def recorded_bytes(self) -> int:
        """See Capture. Without the workspace, which all places of a backend share."""
        return self._recorder.graph_bytes + sum(plan.bytes for plan in self._plans)
