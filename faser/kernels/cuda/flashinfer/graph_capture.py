"""GraphCapture for FlashInfer: attention plans at fixed addresses, CUDA graphs, staging buffers and readbacks.

A fixed plan owns its index arrays, one copy on the device and two on the host, and the attention wrappers of the
layers that run with it. Updating it takes one transfer of all arrays, then, where it would change, a plan for each
kind of attention among the captured layers. The plan learns the kinds when the work runs before the capture.

FlashInfer's plan of a fixed wrapper says which block computes which part of which sequence:

    blocks  |  sequence, tile of its rows, piece of its positions        pieces of chunk_tokens positions each

It follows from the rows of each sequence and from how many pieces each is cut into. The kernel reads the lengths
themselves from the device. So while rows and numbers of pieces stay, a plan serves longer sequences too: the
pieces are the same, but for the last one of each sequence. Otherwise the compiled planner is called directly, on
the arrays that were staged anyway, without the Python of the wrapper's `plan` and its copies to the device.

Read in FlashInfer 0.7.4 (scheduler.cuh: PrefillSplitQOKVIndptr, DecodeSplitKVIndptr; prefill.cuh:
num_kv_chunks) and held against its planner in tests/kernels/cuda/flashinfer/test_planner.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.cuda.device import Accelerator
from faser.kernels.cuda.flashinfer.device_kernels import DeviceKernels
from faser.kernels.cuda.flashinfer.library import PagedAttention, planner_of
from faser.kernels.cuda.flashinfer.paged_attention import (
    PLAN_BYTES,
    AttentionKind,
    AttentionWrappers,
    PlanGrid,
    plan_attention,
    tile_rows,
)
from faser.kernels.cuda.flashinfer.paged_layout import (
    NO_SLOT,
    LayoutSizes,
    LayoutWriter,
    PagedLayout,
    layout_within,
)
from faser.kernels.cuda.staging import DoubleBuffer, PinnedReadback, PinnedStagingBuffer, ReadbackPool
from faser.kernels.interface.drafting import FollowedRows, StepMatch
from faser.kernels.interface.graph_capture import CapturedGraph, GraphBatchSize
from faser.kernels.interface.shapes import AttentionShape, DeviceLane, RowLayout

_PINNED = 2  # position of the pinned buffer among the planner's arguments
_NO_LIMIT = 1 << 30
_LAYOUT_ARRAYS = ("query_indptr", "page_indptr", "seq_len")


@dataclass(frozen=True, slots=True)
class _PlanForm:
    """Places of numbers in a plan of `length` numbers. tile: None: its kernel has one row a sequence."""

    length: int
    chunk: int
    splits: int
    tile: int | None


_FORMS = {15: _PlanForm(15, 9, 14, 3), 10: _PlanForm(10, 7, 9, None)}  # PrefillPlanInfo, DecodePlanInfo


@dataclass(frozen=True, slots=True)
class PlanExtent:
    """Reach of a plan. chunk_tokens: positions of a piece; None: no sequence is cut, whatever its length.

    most_tokens: positions that are cut; of a longer sequence the window leaves no more.
    """

    chunk_tokens: int | None
    most_tokens: int

    def num_pieces(self, seq_len: NDArray[np.int32]) -> bytes:
        """Return the pieces of each sequence, as bytes to compare. seq_len: [S], at least 1."""
        if self.chunk_tokens is None:
            return b""
        pieces: NDArray[np.int32] = (np.minimum(seq_len, self.most_tokens) - 1) // self.chunk_tokens
        return pieces.tobytes()


def plan_extent(numbers: list[int], pinned: NDArray[np.uint8], window: int | None) -> PlanExtent:
    """numbers: what the planner returned. pinned: its buffer. window: of the attention, with the row itself."""
    form = _FORMS[len(numbers)]
    if not numbers[form.splits]:
        return PlanExtent(None, _NO_LIMIT)
    at = numbers[form.chunk]
    limit = _NO_LIMIT if window is None or form.tile is None else window - 1 + numbers[form.tile]
    return PlanExtent(int(pinned[at : at + 4].view(np.int32)[0]), limit)


@dataclass(frozen=True, slots=True)
class _HostArrays:
    """arguments: of the planner, for the layouts in these arrays. query_starts: [S + 1]. seq_len: [S]."""

    arguments: tuple[Any, ...]
    query_starts: NDArray[np.int32]
    seq_len: NDArray[np.int32]


class FixedAttention:
    """A wrapper for CUDA graphs with its plan.

    num_plans: how often the plan was made, the first one included.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        wrapper: PagedAttention,
        kind: AttentionKind,
        host: PagedLayout,
        block_size: int,
        no_pages: Tensor,
        *,
        left_out: Callable[[NDArray[np.int32]], int],
        rows_each: int | None = None,
    ) -> None:
        """Plan for the layout in host, as FlashInfer does, which fixes the most rows.

        left_out: blocks that a plan leaves out, by the rows of every sequence. rows_each: of every sequence in
        every layout; None: any number.
        """
        wrapper.left_out_blocks = left_out(np.diff(host.query_indptr.numpy()))
        plan_attention(wrapper, kind, host, block_size, no_pages, rows_each=rows_each)
        self._left_out = left_out
        self.wrapper = wrapper
        self.num_plans = 1
        self._kind = kind
        self._planner = planner_of(wrapper)
        self._first = host
        self._first_arguments = self._planner.arguments
        self._pinned: NDArray[np.uint8] = self._first_arguments[_PINNED].numpy()
        self._arrays: dict[int, _HostArrays] = {}  # by the identity of the layout whose arrays they are
        self._copied = accelerator.event()  # after the copy of the plan from its pinned buffer
        self._note(self._of(host))

    def update(self, host: PagedLayout) -> None:
        """Make the plan that of the layout in host, whose arrays are on their way to the device."""
        arrays = self._of(host)
        same_rows = self._query_starts == arrays.query_starts.tobytes()
        if same_rows and self._pieces == self._extent.num_pieces(arrays.seq_len):
            return
        self._copied.synchronize()
        self._planner.left_out_blocks = self._left_out(np.diff(arrays.query_starts))
        self._planner.plan(*arrays.arguments)
        self.num_plans += 1
        self._note(arrays)

    def _note(self, arrays: _HostArrays) -> None:
        """The planner has just planned for these arrays."""
        self._copied.record()
        numbers = [int(each) for each in self._planner.found]
        self._extent = plan_extent(numbers, self._pinned, self._kind.shape.window)
        self._query_starts, self._pieces = arrays.query_starts.tobytes(), self._extent.num_pieces(arrays.seq_len)

    def _of(self, host: PagedLayout) -> _HostArrays:
        """The first call's arguments with the arrays of another layout in the place of the first one's."""
        found = self._arrays.get(id(host))
        if found is None:
            pairs = [(getattr(self._first, name), getattr(host, name)) for name in _LAYOUT_ARRAYS]
            arguments = tuple([_replaced(each, pairs) for each in self._first_arguments])
            found = _HostArrays(arguments, host.query_indptr.numpy(), host.seq_len.numpy())
            self._arrays[id(host)] = found
        return found


def _replaced(argument: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    if isinstance(argument, Tensor):
        for old, new in pairs:
            if argument.data_ptr() == old.data_ptr() and argument.shape == old.shape:
                return new
    return argument


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
        self.most_rows_each = 1 if size.one_row_each else size.rows_each or size.rows
        self._rows_each = size.rows_each
        self._wrappers = wrappers
        sequences = num_planned(size)
        # Every padding sequence has a block, and the blank layout has blocks for its rows.
        pages = max(max_blocks, size.rows // block_size) + sequences
        sizes = LayoutSizes(rows=size.rows, sequences=sequences, pages=pages)
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
        self._write(_blank(size.rows, sequences, block_size))
        self._host.slots.fill_(NO_SLOT)
        self._staging.send()
        self._is_blank = True

    @property
    def serves_shorter(self) -> bool:
        """Return whether it may be read by sequences that are shorter than it was made for; one row each.

        The kernels for tensor cores then find pieces that are empty. With several rows each they would look for
        the pieces of a row where they are not: they count them by the length that they find.
        """
        return self.one_row_each and all(kind.uses_tensor_cores for kind in self._planned)

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
            sizes = self.device.sizes
            grid = PlanGrid.of(kind, sizes.rows, sizes.sequences, self._rows_each)
            planned = self._planned[kind] = FixedAttention(
                self._accelerator,
                self._wrappers.fixed(kind, self.device, rows_each=self._rows_each),
                kind,
                self._host,
                self.block_size,
                self._no_pages,
                left_out=partial(self._wrappers.left_out_blocks, kind, grid),
                rows_each=self._rows_each,
            )
            self._copied.record()
        return planned.wrapper

    def _write(self, layout: RowLayout) -> int:
        """Write a layout into the host arrays of the next send; returns how many of their numbers to send."""
        at = self._staging.claim()
        self._host = self._hosts[at]
        return self._writers[at].fill(layout)


def num_planned(size: GraphBatchSize) -> int:
    """Return how many sequences a size's plans have: tiles hold the rows of one if all others have one."""
    return size.sequences if size.tile_rows is None else max(size.sequences, size.rows - size.tile_rows + 1)


def _blank(rows: int, sequences: int, block_size: int) -> RowLayout:
    """All rows of a plan, spread over its sequences from position 0 on, all in block 0."""
    counts = np.full(sequences, rows // sequences, dtype=np.int32)
    counts[: rows % sequences] += 1
    starts = np.zeros(sequences + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    positions = np.arange(rows, dtype=np.int32) - np.repeat(starts[:-1], counts)
    blocks = -(-int(counts.max()) // block_size)
    return RowLayout(
        query_start=torch.from_numpy(starts),
        seq_len=torch.from_numpy(counts),
        positions=torch.from_numpy(positions),
        block_table=torch.zeros((sequences, blocks), dtype=torch.int32),
    )


class FlashInferGraphCapture:
    """Capture of graphs with FlashInfer. wrappers: of the captured lane. lane: None: the whole device."""

    def __init__(
        self,
        accelerator: Accelerator,
        wrappers: AttentionWrappers,
        kernels: DeviceKernels,
        lane: DeviceLane | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._wrappers = wrappers
        self._kernels = kernels
        self._recorder = accelerator.graph_recorder(lane)
        self._readbacks = ReadbackPool(accelerator)
        self._plans: list[FixedPlan] = []

    def tile_rows(self, shape: AttentionShape) -> tuple[int, ...]:
        """See GraphCapture."""
        return tile_rows(shape)

    def reserve(self, shape: AttentionShape, sizes: Sequence[GraphBatchSize]) -> None:
        """See GraphCapture. Kinds of other types take as much."""
        for size in sizes:
            kind = AttentionKind(shape, torch.bfloat16, torch.bfloat16, size.one_row_each)
            self._wrappers.reserve(kind, size.rows, num_planned(size), size.rows_each)

    def plan(self, size: GraphBatchSize, block_size: int, max_blocks: int) -> FixedPlan:
        plan = FixedPlan(size, block_size, max_blocks, accelerator=self._accelerator, wrappers=self._wrappers)
        self._plans.append(plan)
        return plan

    def update_plan(self, plan: FixedPlan, layout: RowLayout) -> None:
        """See GraphCapture. Waits until the device has copied the previous layout, not for its step."""
        plan.update(layout)

    def match(self, step: StepMatch) -> None:
        self._kernels.match(step)

    def may_advance(self, plan: FixedPlan) -> bool:
        return plan.serves_shorter

    def advance(self, plan: FixedPlan, rows: FollowedRows, step: StepMatch | None) -> None:
        self._kernels.advance(rows, step, plan.device, plan.block_size)

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
