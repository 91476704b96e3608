"""Attention of a captured step, whose plan follows the layouts: planned again only where the plan would change.

FlashInfer's plan of a fixed wrapper says which block computes which part of which sequence:

    blocks  |  sequence, tile of its rows, piece of its positions        pieces of chunk_tokens positions each

It follows from the rows of each sequence and from how many pieces each is cut into. The kernel reads the lengths
themselves from the device. So while rows and numbers of pieces stay, a plan serves longer sequences too: the
pieces are the same, but for the last one of each sequence. Otherwise the compiled planner is called directly, on
the arrays that were staged anyway, without the Python of the wrapper's `plan` and its copies to the device.

Read in FlashInfer 0.7.2.post1 (scheduler.cuh: PrefillSplitQOKVIndptr, DecodeSplitKVIndptr; prefill.cuh:
num_kv_chunks) and held against its planner in tests/kernels/cuda/flashinfer/test_planner.py.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.cuda.device import Accelerator
from faser.kernels.cuda.flashinfer.library import PagedAttention
from faser.kernels.cuda.flashinfer.paged_attention import AttentionKind, plan_attention
from faser.kernels.cuda.flashinfer.planners import planner_of
from faser.kernels.interface.paged_layout import PagedLayout

_PINNED = 2  # position of the pinned buffer among the planner's arguments
_NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class _PlanForm:
    """Where a plan says what: as many numbers as `length`. tile: None: its kernel has one row a sequence."""

    length: int
    chunk: int
    splits: int
    tile: int | None


_FORMS = {15: _PlanForm(15, 9, 14, 3), 10: _PlanForm(10, 7, 9, None)}  # PrefillPlanInfo, DecodePlanInfo


@dataclass(frozen=True, slots=True)
class PlanExtent:
    """How far a plan reaches. chunk_tokens: positions of a piece; None: no sequence is cut, whatever its length.

    most_tokens: positions that are cut; of a longer sequence the window leaves no more.
    """

    chunk_tokens: int | None
    most_tokens: int

    def num_pieces(self, seq_len: NDArray[np.int32]) -> bytes:
        """Of each sequence, as bytes to compare. seq_len: [S], at least 1."""
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
        rows_each: int | None = None,
    ) -> None:
        """Plan for the layout in host, as FlashInfer does, which fixes the most rows.

        rows_each: of every sequence in every layout; None: any number.
        """
        plan_attention(wrapper, kind, host, block_size, no_pages, rows_each=rows_each)
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


_LAYOUT_ARRAYS = ("query_indptr", "page_indptr", "seq_len")


def _replaced(argument: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    if isinstance(argument, Tensor):
        for old, new in pairs:
            if argument.data_ptr() == old.data_ptr() and argument.shape == old.shape:
                return new
    return argument
