"""FlashInfer's attention wrappers: how they are made, planned and how large their workspace has to be.

Owns the workspace of a backend, where sequences that are split leave partial results. Knows neither caches nor
models. FlashInfer plans on the host, from arrays there, and copies what it found from a pinned buffer of the
wrapper: nobody may plan a wrapper again before that copy is done.

A wrapper for recordings is made for fixed arrays and a fixed number of sequences. What is recorded are the places
of its arrays and plan, and the grid: that depends on the most rows a plan may have, which FlashInfer takes from
the first one, and on the processors that it plans for. Of blocks of the grid, a plan says which have work.

What is said of FlashInfer here was read in 0.7.2.post1: prefill.py, decode.py, scheduler.cuh, batch_prefill.cu. Of
the prefill kernel's planner it was also seen, on a stand-in of the CUDA runtime (tests/kernels/cuda/flashinfer/test_planner.py):
what plans take of a workspace, what a lane's look like, and that nothing recorded changes from plan to plan.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from faser.kernels.cuda.device import Accelerator
from faser.kernels.cuda.flashinfer.lane_plans import BLOCKS_PER_PROCESSOR
from faser.kernels.cuda.flashinfer.library import FlashInfer, PagedAttention
from faser.kernels.interface.backend import AttentionShape
from faser.kernels.interface.paged_layout import PagedLayout

INT_WORKSPACE_BYTES = 8 << 20  # that every wrapper allocates by itself
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends for the partial results of split sequences
# From this many query heads a KV head on, a row of them fills a tile of the tensor cores well enough.
_TENSOR_CORE_GROUP = 4
_MOST_BLOCKS_PER_PROCESSOR = 32  # of the decode kernel; hardware has no room for more
_WIDEST_TILE = 128  # packed query rows; see _tile
_SLACK_BYTES = 64  # two arrays in a workspace are aligned


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What a wrapper is for, beside a layout. one_row_each: every sequence has exactly one row.

    dtype: of queries and results. kv_dtype: of keys and values, the same or float8_e4m3fn. Kernels widen these as
    they load them, to dtype for tensor cores, else to float32; scales that are not given are one.
    """

    shape: AttentionShape
    dtype: torch.dtype
    kv_dtype: torch.dtype
    one_row_each: bool

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.shape.num_heads // self.shape.num_kv_heads

    @property
    def uses_tensor_cores(self) -> bool:
        """The kernel that decodes without them is another one, with plans of another form."""
        return not self.one_row_each or self.group >= _TENSOR_CORE_GROUP


class AttentionWorkspace:
    """Where split sequences leave partial results, from one kernel until the next one joins them.

    One for all wrappers of a backend, those of its lanes included: nothing in it outlives one layer's attention,
    and steps of one backend never run at the same time, wherever they run. A lane's stream is held behind the
    caller's before its first kernel, and the caller's behind the lane's last one
    (engine/execution/overlap/streams.py). So a step on a lane comes behind all that were given before it, be it for
    the whole device or for a lane of another size, and before all that follow. Recording keeps that order wherever it runs what it records (cuda_device). The two
    lanes that run at the same time have a backend each. Plans are another matter: they stay from step to step, and
    every wrapper has memory of its own for its plan.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def of(self, needed_bytes: int) -> Tensor:
        """[≥ needed_bytes] uint8. Who got a smaller one before keeps that, which recordings know."""
        if self._memory is None or self._memory.nbytes < needed_bytes:
            size = max(_WORKSPACE_BYTES, needed_bytes)
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._accelerator.device)
        return self._memory


class AttentionWrappers:
    """Makes wrappers that run one after the other, on so many processors of the device."""

    def __init__(
        self, accelerator: Accelerator, library: FlashInfer, workspace: AttentionWorkspace, num_processors: int
    ) -> None:
        """Raises ConfigError where the library cannot plan for a part of the device."""
        self._library = library
        self._workspace = workspace
        self._all_processors = accelerator.num_processors
        self._num_processors = num_processors
        idle = self._all_processors - num_processors
        self._lane_library = library.planning_without(idle) if idle else library

    def eager(self, kind: AttentionKind) -> PagedAttention:
        """For plans of any size."""
        return self._new(kind, split_bytes(kind, self._planned_for(kind)), {})

    def splits(self, kind: AttentionKind, sequences: int) -> bool:
        """Whether long sequences of a fixed plan are split among blocks; another launch joins their parts.

        Not in decoding steps that have work for all processors as they are: no sequence would be split there, but
        FlashInfer would launch what joins them. Other steps may have far fewer sequences than there is room for.
        """
        at_once = _blocks_at_once(kind, self._num_processors)
        return not (kind.one_row_each and kind.uses_tensor_cores and sequences > at_once)

    def fixed(self, kind: AttentionKind, arrays: PagedLayout) -> PagedAttention:
        """For plans that arrays, on the device, have room for. The first plan must have as many rows as they do.

        The caller fills arrays.page_indices; planning writes the values of the others, again.
        """
        sizes = arrays.sizes
        needed = 0
        if self.splits(kind, sizes.sequences):
            processors = self._planned_for(kind)
            needed = split_bytes(kind, processors, rows=sizes.rows, sequences=sizes.sequences)
        options: dict[str, Any] = {"use_cuda_graph": True}
        if kind.one_row_each:
            options["paged_kv_indptr_buffer"] = arrays.page_indptr
            options["paged_kv_indices_buffer"] = arrays.page_indices
            options["paged_kv_last_page_len_buffer"] = arrays.last_page_len
        else:
            options["qo_indptr_buf"] = arrays.query_indptr
            options["paged_kv_indptr_buf"] = arrays.page_indptr
            options["paged_kv_indices_buf"] = arrays.page_indices
            options["paged_kv_last_page_len_buf"] = arrays.last_page_len
        return self._new(kind, needed, options)

    @torch.inference_mode(False)  # so that whoever plans may do it outside of that mode
    def _new(self, kind: AttentionKind, needed_bytes: int, options: dict[str, Any]) -> PagedAttention:
        """fa2 by name: what FlashInfer chooses on its own may be a kernel that was not compiled."""
        library = self._lane_library if kind.uses_tensor_cores else self._library
        if kind.one_row_each:
            make = library.BatchDecodeWithPagedKVCacheWrapper
            options = options | {"use_tensor_cores": kind.uses_tensor_cores}
        else:
            make = library.BatchPrefillWithPagedKVCacheWrapper
        workspace = self._workspace.of(needed_bytes)
        return make(float_workspace_buffer=workspace, kv_layout="NHD", backend="fa2", **options)

    def _planned_for(self, kind: AttentionKind) -> int:
        """Processors. Of the kernel without tensor cores FlashInfer's planner always takes all of the device."""
        return self._num_processors if kind.uses_tensor_cores else self._all_processors


def plan_attention(
    wrapper: PagedAttention,
    kind: AttentionKind,
    host: PagedLayout,
    block_size: int,
    pages: Tensor,
    *,
    splits: bool = True,
) -> None:
    """Plan from arrays on the host: given those of the device, FlashInfer would wait for it.

    pages: [all] int32 on the device, which no planner reads; none where the wrapper's own array holds them.
    splits: see AttentionWrappers.
    """
    shape = kind.shape
    # FlashInfer counts the positions to the left of a row, ours counts the row itself too.
    options: dict[str, Any] = {
        "num_qo_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "page_size": block_size,
        "sm_scale": shape.scale,
        "window_left": -1 if shape.window is None else shape.window - 1,
        "q_data_type": kind.dtype,
        "kv_data_type": kind.kv_dtype,
        "seq_lens": host.seq_len,
        "disable_split_kv": not splits,
    }
    if kind.one_row_each:
        wrapper.plan(
            indptr=host.page_indptr,
            indices=pages,
            last_page_len=host.last_page_len,
            head_dim=shape.head_dim,
            **options,
        )
    else:
        wrapper.plan(
            qo_indptr=host.query_indptr,
            paged_kv_indptr=host.page_indptr,
            paged_kv_indices=pages,
            paged_kv_last_page_len=host.last_page_len,
            head_dim_qk=shape.head_dim,
            causal=True,
            **options,
        )


def split_bytes(kind: AttentionKind, num_processors: int, *, rows: int = 0, sequences: int = 0) -> int:
    """Most workspace that a plan takes: weighted values and their weights, float32, of all blocks of the grid.

    rows, sequences: of a fixed plan, which keeps room for the largest grid; 0: of plans that split only as far as
    blocks run at the same time. As FlashInfer's planner (scheduler.cuh) lays them out.
    """
    if not kind.uses_tensor_cores:
        return _partial_bytes(kind, _MOST_BLOCKS_PER_PROCESSOR * num_processors // kind.shape.num_kv_heads)
    at_once = _blocks_at_once(kind, num_processors)
    if not rows:
        return _partial_bytes(kind, -(-at_once * _WIDEST_TILE // kind.group))
    tile = _tile((rows - sequences + 1) * kind.group)
    blocks = max(at_once, -(-rows * kind.group // tile) + sequences - 1)
    return _partial_bytes(kind, -(-blocks * tile // kind.group))


def _blocks_at_once(kind: AttentionKind, num_processors: int) -> int:
    """Up to so many blocks a KV head run at the same time: sequences are split into no more."""
    return BLOCKS_PER_PROCESSOR * num_processors // kind.shape.num_kv_heads


def _partial_bytes(kind: AttentionKind, rows: int) -> int:
    """Of so many rows of all heads; a block's tile has rows of the heads of one group."""
    return rows * kind.shape.num_heads * (kind.shape.head_dim + 1) * 4 + _SLACK_BYTES


def _tile(packed_rows: int) -> int:
    """Rows of query heads that a block takes, where the longest sequence has so many of them."""
    if packed_rows > 64:
        return _WIDEST_TILE
    return 64 if packed_rows > 16 else 16
