"""The most likely token of each row, and its margin over the best other one.

Two launches: the best of each chunk, then the best of each row. A row with a NaN, or without a finite maximum, has
no token and no margin. Knows nothing of temperatures.
"""

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.triton.common import expect_lines, jit
from faser.kernels.cuda.triton.sampling.fixed_point import NO_ID, NOTHING
from faser.kernels.cuda.triton.sampling.workspace import SamplingWorkspace

_LAST = tl.constexpr(0x7FFFFFFF)  # an edge after all tokens


@jit
def _chunk_best(
    logits, stride, width, chunk_best, chunk_largest, chunk_next, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    """The first of the largest logits of a chunk, and the next largest; NaN as the largest if one is NaN."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row.to(tl.int64) * stride + columns, mask=columns < width, other=NOTHING)
    is_bad = tl.max((values != values).to(tl.int32)) > 0
    values = tl.where(values == values, values, NOTHING)
    largest = tl.max(values)
    first = tl.min(tl.where((values == largest) & (columns < width), columns, width))
    place = row * NUM_CHUNKS + chunk
    tl.store(chunk_best + place, first.to(tl.int64))
    tl.store(chunk_largest + place, tl.where(is_bad, float("nan"), largest))
    tl.store(chunk_next + place, tl.max(tl.where(columns == first, NOTHING, values)))


@jit
def _row_best(
    chunk_best, chunk_largest, chunk_next, width, best, margin, largest, edge_key, edge_id,
    NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The first of the largest logits of a row and its margin, and edges that keep every token."""
    row = tl.program_id(0)
    chunk = tl.arange(0, SPAN)
    inside = chunk < NUM_CHUNKS
    place = row * NUM_CHUNKS + chunk
    values = tl.load(chunk_largest + place, mask=inside, other=NOTHING)
    columns = tl.load(chunk_best + place, mask=inside, other=0)
    is_bad = tl.max((values != values).to(tl.int32)) > 0
    values = tl.where(values == values, values, NOTHING)
    most = tl.max(values)
    is_sound = (most > NOTHING) & (most < -NOTHING) & (is_bad == 0)
    first = tl.min(tl.where((values == most) & inside, columns, width))
    others = tl.where(columns == first, tl.load(chunk_next + place, mask=inside, other=NOTHING), values)
    tl.store(best + row, tl.where(is_sound, first, NO_ID))
    tl.store(margin + row, tl.where(is_sound, most - tl.max(others), 0.0))
    tl.store(largest + row, most)
    tl.store(edge_key + row, _LAST)
    tl.store(edge_id + row, _LAST)


def find_best(logits: Tensor, space: SamplingWorkspace, best: Tensor, margin: Tensor) -> None:
    """Fill best [R] int64, in a tie with the lowest id, and margin [R] float32; infinite without another token.

    NO_TOKEN and 0 where a row has no token. best and margin may be longer than R, such as space.best and
    space.margin. logits: [R, V] float32, each row contiguous. space: largest, edge_key and edge_id are
    initialised. Raises EngineError.
    """
    num_rows, width = logits.shape
    expect_lines("logits", logits, (num_rows, width), torch.float32, like=logits)
    space.expect_room(num_rows, width)
    if not num_rows:
        return
    _chunk_best[(num_rows, space.num_chunks)](
        logits, logits.stride(0), width, space.chunk_best, space.chunk_largest, space.chunk_next,
        NUM_CHUNKS=space.num_chunks, BLOCK=space.block,
    )  # fmt: skip
    _row_best[(num_rows,)](
        space.chunk_best, space.chunk_largest, space.chunk_next, width, best, margin, space.largest,
        space.edge_key, space.edge_id, NUM_CHUNKS=space.num_chunks, SPAN=space.span,
    )  # fmt: skip
