"""FlashInfer's attention wrappers: how to make and plan them, and how large their workspace must be.

Owns the workspace of a backend, which holds the partial results of split sequences. Knows neither caches nor
models. FlashInfer plans on the host, from host arrays, and copies the plan from a pinned buffer of the wrapper to
the device: the caller must not plan a wrapper again before that copy is done.

A wrapper for CUDA graphs is made for fixed arrays and a fixed number of sequences. A graph captures the addresses
of the arrays and the plan, and the grid. The grid depends on the most rows that a plan may have, which FlashInfer
takes from the first plan, and on the processors planned for. Each plan says which blocks of the grid have work.

The statements about FlashInfer were read in 0.7.4: prefill.py, decode.py, scheduler.cuh, batch_prefill.cu.
The prefill kernel's planner was also run, on a stand-in of the CUDA runtime
(tests/kernels/cuda/flashinfer/test_planner.py), for its use of the workspace, its plans for lanes, and whether
anything captured changes from plan to plan.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.cuda.device import Accelerator
from faser.kernels.cuda.flashinfer.library import BLOCKS_PER_PROCESSOR, FlashInfer, PagedAttention
from faser.kernels.cuda.flashinfer.paged_layout import PagedLayout
from faser.kernels.interface.shapes import AttentionShape

# That a wrapper keeps for its plans: some numbers for every row, sequence and block. FlashInfer's 8 MiB, on the
# device and again on the host, would take a gigabyte for all graphs.
PLAN_BYTES = 256 << 10
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends for the partial results of split sequences
# Query heads per KV head from which on decoding takes the tensor cores: the kernel for prompts, whose plans may
# have empty pieces and be made for a lane. The other kernel's may not (decode.cuh: a chunk's length is unsigned).
_TENSOR_CORE_GROUP = 2
_MOST_BLOCKS_PER_PROCESSOR = 32  # of the decode kernel; the hardware limit
_MANY_ROWS = 128  # packed query rows, that fill the widest tile
_SLACK_BYTES = 64  # for the alignment of two arrays in a workspace


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Kind of attention, apart from the layout. one_row_each: every sequence has exactly one row.

    dtype: of queries and results. kv_dtype: of keys and values, dtype or float8_e4m3fn. Kernels widen these as
    they load them, to dtype for tensor cores, else to float32; FlashInfer takes scales that are not given as one.
    """

    shape: AttentionShape
    dtype: torch.dtype
    kv_dtype: torch.dtype
    one_row_each: bool

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.shape.num_heads // self.shape.num_kv_heads

    @property
    def uses_tensor_cores(self) -> bool:
        """Return whether the kernel uses tensor cores. The decode kernel without has plans of another form."""
        return not self.one_row_each or self.group >= _TENSOR_CORE_GROUP


class AttentionWorkspace:
    """Holds the partial results of split sequences from one kernel until the next one joins them.

    All wrappers of a backend share it, on all lanes: nothing in it outlives one layer's attention, and steps of
    one backend never run at the same time. The overlap partition makes a lane's stream wait for the caller's
    stream before its first kernel, and the caller's stream for the lane's last one: a step on a lane runs after
    all steps launched before it, and before all later ones, on whatever lane. Graph capture keeps that order
    (cuda/device.py). Two lanes that run concurrently have a backend each. Plans are not stored here: they live
    from step to step, and every wrapper has memory of its own for its plan.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def of(self, needed_bytes: int) -> Tensor:
        """Return at least needed_bytes uint8. Earlier callers keep theirs: graphs have captured its address."""
        if self._memory is None or self._memory.nbytes < needed_bytes:
            size = max(_WORKSPACE_BYTES, needed_bytes)
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._accelerator.device)
        return self._memory


class AttentionWrappers:
    """Makes wrappers for num_processors of the device's processors. They run one after the other."""

    def __init__(
        self, accelerator: Accelerator, library: FlashInfer, workspace: AttentionWorkspace, num_processors: int
    ) -> None:
        self._library = library
        self._workspace = workspace
        self._accelerator = accelerator
        self._num_processors = num_processors

    @torch.inference_mode(False)  # so that planning works outside of inference mode too
    def eager(self, kind: AttentionKind) -> PagedAttention:
        """A wrapper for plans of any size."""
        wrapper = self._new(kind, self._workspace.of(split_bytes(kind, self._planned_for(kind))), {})
        if kind.uses_tensor_cores:
            wrapper.left_out_blocks = BLOCKS_PER_PROCESSOR * (self._all_processors - self._num_processors)
        return wrapper

    @torch.inference_mode(False)
    def fixed(self, kind: AttentionKind, arrays: PagedLayout, *, rows_each: int | None = None) -> PagedAttention:
        """A wrapper for plans that fit into these device arrays. The first plan must have as many rows as they do.

        The caller fills arrays.page_indices; planning writes the values of the other arrays again. rows_each: of
        every sequence in every plan; None: any number.
        """
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
        workspace = self.reserve(kind, arrays.sizes.rows, arrays.sizes.sequences, rows_each)
        wrapper = self._new(kind, workspace, options)
        plans = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=self._accelerator.device)
        wrapper.reset_workspace_buffer(workspace, plans)
        return wrapper

    def reserve(self, kind: AttentionKind, rows: int, sequences: int, rows_each: int | None) -> Tensor:
        """Return a workspace that a fixed wrapper of this size fits into."""
        processors = self._planned_for(kind)
        return self._workspace.of(
            split_bytes(kind, processors, rows=rows, sequences=sequences, rows_each=rows_each)
        )

    def left_out_blocks(self, kind: AttentionKind, grid: "PlanGrid", counts: NDArray[np.int32]) -> int:
        """Return how many of the device's blocks a fixed plan leaves out. counts: rows of every sequence."""
        if not kind.uses_tensor_cores:
            return 0
        pieces = grid.most_pieces(kind, self._num_processors, grid.tiles_of(kind, counts))
        return BLOCKS_PER_PROCESSOR * self._all_processors - pieces * kind.shape.num_kv_heads

    def _new(self, kind: AttentionKind, workspace: Tensor, options: dict[str, Any]) -> PagedAttention:
        """Names fa2, because FlashInfer's own choice may be a kernel that was not compiled."""
        library = self._library
        if kind.one_row_each:
            make = library.BatchDecodeWithPagedKVCacheWrapper
            options = options | {"use_tensor_cores": kind.uses_tensor_cores}
        else:
            make = library.BatchPrefillWithPagedKVCacheWrapper
        return make(float_workspace_buffer=workspace, kv_layout="NHD", backend="fa2", **options)

    def _planned_for(self, kind: AttentionKind) -> int:
        """Processors that the planner plans for: always all, for the kernel without tensor cores."""
        return self._num_processors if kind.uses_tensor_cores else self._all_processors

    @property
    def _all_processors(self) -> int:
        return self._accelerator.num_processors


def plan_attention(
    wrapper: PagedAttention,
    kind: AttentionKind,
    host: PagedLayout,
    block_size: int,
    pages: Tensor,
    *,
    rows_each: int | None = None,
) -> None:
    """Plan from host arrays: given device arrays, FlashInfer would wait for the device.

    pages: [all] int32 on the device, which no planner reads; empty if the wrapper's own array holds them.
    rows_each: every sequence has as many rows, in every plan of a fixed wrapper: its tiles are as wide as these,
    not as the most that one sequence could have if the others had one; None: any number.
    """
    shape = kind.shape
    # FlashInfer's window does not count the row itself, FASER's does.
    options: dict[str, Any] = {
        "num_qo_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "page_size": block_size,
        "sm_scale": shape.scale,
        "logits_soft_cap": shape.score_cap or 0.0,
        "window_left": -1 if shape.window is None else shape.window - 1,
        "q_data_type": kind.dtype,
        "kv_data_type": kind.kv_dtype,
        "seq_lens": host.seq_len,
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
            uniform_q_len=rows_each,
            **options,
        )


def split_bytes(
    kind: AttentionKind, num_processors: int, *, rows: int = 0, sequences: int = 0, rows_each: int | None = None
) -> int:
    """Most workspace that a plan takes: weighted values and their weights, float32, of all blocks of the grid.

    rows, sequences: of a fixed plan, which needs room for its largest grid; 0: an eager plan, which splits only
    into as many blocks as run at the same time. rows_each: see plan_attention. Follows the layout of FlashInfer's
    planner (scheduler.cuh).
    """
    if not kind.uses_tensor_cores:
        return _partial_bytes(kind, _MOST_BLOCKS_PER_PROCESSOR * num_processors // kind.shape.num_kv_heads)
    if not rows:
        tile = _tile(_MANY_ROWS, kind.shape.head_dim)
        return _partial_bytes(kind, -(-_blocks_at_once(kind, num_processors) * tile // kind.group))
    grid = PlanGrid.of(kind, rows, sequences, rows_each)
    blocks = max(grid.blocks, grid.most_pieces(kind, num_processors, grid.tiles or grid.blocks))
    return _partial_bytes(kind, -(-blocks * grid.tile // kind.group))


@dataclass(frozen=True, slots=True)
class PlanGrid:
    """The blocks of a captured prefill kernel, per KV head, as FlashInfer's planner counts them.

    tile: packed query rows of a block. blocks: tiles that a plan may have. tiles: of every plan; None: they vary.
    """

    tile: int
    blocks: int
    tiles: int | None

    @classmethod
    def of(cls, kind: AttentionKind, rows: int, sequences: int, rows_each: int | None) -> "PlanGrid":
        """rows_each: see plan_attention."""
        tile = _tile((rows_each or rows - sequences + 1) * kind.group, kind.shape.head_dim)
        each = 1 if kind.one_row_each else rows_each
        tiles = None if each is None else sequences * -(-each * kind.group // tile)
        return cls(tile, -(-rows * kind.group // tile) + sequences - 1 if tiles is None else tiles, tiles)

    def tiles_of(self, kind: AttentionKind, counts: NDArray[np.int32]) -> int:
        """counts: rows of every sequence. Padding sequences without rows have no tile."""
        return int((-(-counts * kind.group // self.tile)).sum())

    def most_pieces(self, kind: AttentionKind, num_processors: int, tiles: int) -> int:
        """Most blocks that a plan of so many tiles may have.

        FlashInfer's planner cuts sequences into no more pieces than run at the same time, so of many sequences it
        cuts none, and the step waits for one block that reads all of the longest. Here half as many are left for
        longer sequences, which is too few to cut sequences of one length that FlashInfer leaves whole. Where the
        number of tiles varies, the captured grid is the limit, which has to fit every plan.
        """
        at_once = _blocks_at_once(kind, num_processors)
        most = tiles + at_once // 2
        return max(at_once, most if self.tiles is not None else min(most, self.blocks))


def tile_rows(shape: AttentionShape) -> tuple[int, ...]:
    """Most rows of a sequence that one tile of each width holds, ascending; at least 2, and without the widest."""
    group = shape.num_heads // shape.num_kv_heads
    widest = _tile(_MANY_ROWS, shape.head_dim)
    packed = [most for most in (16, 32, 64) if _tile(most, shape.head_dim) < _tile(most + 1, shape.head_dim)]
    assert _tile(packed[-1] + 1, shape.head_dim) == widest, shape
    return tuple(most // group for most in packed if most // group > 1)


def _blocks_at_once(kind: AttentionKind, num_processors: int) -> int:
    """Most blocks per KV head that run at the same time."""
    return BLOCKS_PER_PROCESSOR * num_processors // kind.shape.num_kv_heads


def _partial_bytes(kind: AttentionKind, rows: int) -> int:
    """Workspace for the partial results of this many rows, all heads."""
    return rows * kind.shape.num_heads * (kind.shape.head_dim + 1) * 4 + _SLACK_BYTES


def _tile(packed_rows: int, head_dim: int) -> int:
    """Query rows of one block: utils.cuh, FA2DetermineCtaTileQ. The larger heads are, the fewer fit.

    packed_rows: rows times query heads per KV head, of the longest sequence.
    """
    if head_dim >= 512:
        return 16 if packed_rows <= 32 else 32
    if packed_rows > 64 and head_dim < 256:
        return 128
    return 64 if packed_rows > 16 else 16
