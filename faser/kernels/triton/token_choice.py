"""Tokens from logits, or the masses they are drawn from, with the noise of each row's request and position.

The same tokens and masses, bit for bit, as engine/sampling.py defines them. Five launches for any number of rows,
ten more for top_k and eleven for top_p, and not one wait for the device: what is wrong with a row becomes
NO_TOKEN. Knows nothing of drafts.
"""

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.triton.masses import (
    MASS_ONE,
    NO_ID,
    NOTHING,
    exceeding,
    is_kept,
    mass_unit,
    row_sum,
    scaled_logits,
    threshold,
    whole_masses,
    whole_weights,
)
from faser.kernels.triton.noise import uniform
from faser.kernels.triton.tensors import EXACT, expect, jit
from faser.kernels.triton.truncation import find_edges
from faser.kernels.triton.workspace import ShapedLogits, Workspace

_LAST = tl.constexpr(0x7FFFFFFF)  # an edge behind all tokens


@jit
def _chunk_best(logits, stride, width, chunk_best, chunk_largest, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The first of the largest logits of a chunk; NaN as the largest if one is NaN."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row.to(tl.int64) * stride + columns, mask=columns < width, other=NOTHING)
    is_bad = tl.max((values != values).to(tl.int32)) > 0
    largest = tl.max(tl.where(values == values, values, NOTHING))
    first = tl.min(tl.where((values == largest) & (columns < width), columns, width))
    place = row * NUM_CHUNKS + chunk
    tl.store(chunk_best + place, first.to(tl.int64))
    tl.store(chunk_largest + place, tl.where(is_bad, float("nan"), largest))


@jit
def _row_best(
    chunk_best,
    chunk_largest,
    width,
    best,
    largest,
    edge_key,
    edge_id,
    NUM_CHUNKS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """The first of the largest logits of a row, and edges that cut off nothing."""
    row = tl.program_id(0)
    chunk = tl.arange(0, SPAN)
    inside = chunk < NUM_CHUNKS
    values = tl.load(chunk_largest + row * NUM_CHUNKS + chunk, mask=inside, other=NOTHING)
    columns = tl.load(chunk_best + row * NUM_CHUNKS + chunk, mask=inside, other=0)
    is_bad = tl.max((values != values).to(tl.int32)) > 0
    most = tl.max(tl.where(values == values, values, NOTHING))
    is_finite = (most > NOTHING) & (most < -NOTHING)
    first = tl.min(tl.where((values == most) & inside, columns, width))
    tl.store(best + row, tl.where(is_finite & (is_bad == 0), first, NO_ID))
    tl.store(largest + row, most)
    tl.store(edge_key + row, _LAST)
    tl.store(edge_id + row, _LAST)


@jit
def _chunk_weights(
    logits, stride, width, largest, best, temperature, chunk_weight, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    warmth = tl.load(temperature + row)
    if (tl.load(best + row) >= 0) & (warmth > 0):
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        scaled = scaled_logits(logits + row.to(tl.int64) * stride, columns, width, tl.load(largest + row), warmth)
        total = tl.sum(tl.where(columns < width, whole_weights(scaled), 0))
        tl.store(chunk_weight + row * NUM_CHUNKS + chunk, total)


@jit
def _kept_masses(
    row, columns, logits, stride, width, largest, temperature, log_min_p, chunk_weight, edge_key, edge_id,
    NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """int64, of columns of a row with a temperature: 0 where the truncation cuts a token off."""
    start = logits + row.to(tl.int64) * stride
    scaled = scaled_logits(start, columns, width, tl.load(largest + row), tl.load(temperature + row))
    edge = (tl.load(edge_key + row), tl.load(edge_id + row))
    kept = is_kept(scaled, columns, width, tl.load(log_min_p + row), edge[0], edge[1])
    unit = mass_unit(row_sum(chunk_weight, row, NUM_CHUNKS, SPAN))
    return tl.where(kept, whole_masses(scaled, unit), 0)


@jit
def _chunk_masses(
    logits, stride, width, largest, best, temperature, log_min_p, chunk_weight, edge_key, edge_id, chunk_mass,
    NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Sums of masses by chunk. WRITE: put the masses in place of the logits, also of rows that draw nothing."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    token_id = tl.load(best + row)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    if (token_id >= 0) & (tl.load(temperature + row) > 0):
        masses = _kept_masses(
            row, columns, logits, stride, width, largest, temperature, log_min_p, chunk_weight, edge_key, edge_id,
            NUM_CHUNKS, SPAN,
        )  # fmt: skip
    else:
        masses = tl.where(columns == token_id, MASS_ONE, 0).to(tl.int64)
    tl.store(chunk_mass + row * NUM_CHUNKS + chunk, tl.sum(masses))
    if WRITE:
        tl.store(logits + row.to(tl.int64) * stride + columns, masses.to(tl.float32), mask=columns < width)


@jit
def _draw(
    logits, stride, width, largest, best, temperature, log_min_p, chunk_weight, edge_key, edge_id, chunk_mass,
    seeds, positions, chosen,
    NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token_id = tl.load(best + row)
    if (token_id >= 0) & (tl.load(temperature + row) > 0):
        position = tl.load(positions + row)
        number = uniform(tl.load(seeds + row), position, position * 0, position * 0)
        chunks = tl.arange(0, SPAN)
        sums = tl.load(chunk_mass + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=0)
        limit = threshold(number, tl.sum(sums))
        chunk, before = exceeding(sums, limit)
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        masses = _kept_masses(
            row, columns, logits, stride, width, largest, temperature, log_min_p, chunk_weight, edge_key, edge_id,
            NUM_CHUNKS, SPAN,
        )  # fmt: skip
        inside, _ = exceeding(masses, limit - before)
        token_id = (chunk * BLOCK + inside).to(tl.int64)
    tl.store(chosen + row, token_id)


class TokenKernels:
    """Chooses tokens on the device. space: for these rows; it holds what was found until the next call.

    top_k, top_p, here and below: some row may ask for it. The caller knows from its requests; where it says no,
    the rows' own numbers are not looked at.
    """

    def __init__(self, space: Workspace) -> None:
        self.space = space

    def choose(self, shaped: ShapedLogits, chosen: Tensor, *, top_k: bool, top_p: bool) -> Tensor:
        """chosen [R] int64: a token of each row; NO_TOKEN where a NaN is or no finite maximum. Logits stay.

        Raises EngineError for tensors that do not fit.
        """
        expect("chosen", chosen, (shaped.num_rows,), torch.int64, like=shaped.logits)
        self._weigh(shaped, top_k=top_k, top_p=top_p)
        if shaped.num_rows:
            space, sizes = self.space, self._sizes
            _draw[(shaped.num_rows,)](
                *self._row(shaped),
                space.chunk_mass,
                shaped.rows.seeds,
                shaped.rows.positions,
                chosen,
                **sizes,
                **EXACT,
            )
        return chosen

    def masses(self, shaped: ShapedLogits, *, top_k: bool, top_p: bool) -> None:
        """Put the masses in place of the logits; their sums by chunk are in space.chunk_mass.

        A row without a temperature has all its mass at one token, a row that is NO_TOKEN in space.best none.
        Raises EngineError for tensors that do not fit.
        """
        self._weigh(shaped, top_k=top_k, top_p=top_p)
        self._sum_masses(shaped, write=True)

    def _weigh(self, shaped: ShapedLogits, *, top_k: bool, top_p: bool) -> None:
        """The most likely tokens, the edges, and the sums of what is kept."""
        shaped.check()
        space = self.space
        space.expect_room(shaped.num_rows, shaped.width)
        if not shaped.num_rows:
            return
        grid, rows = (shaped.num_rows, space.num_chunks), (shaped.num_rows,)
        where = (shaped.logits, shaped.stride, shaped.width)
        chunks, block = {"NUM_CHUNKS": space.num_chunks}, {"BLOCK": space.block}
        _chunk_best[grid](*where, space.chunk_best, space.chunk_largest, **chunks, **block)
        _row_best[rows](
            space.chunk_best, space.chunk_largest, shaped.width, space.best, space.largest, space.edge_key,
            space.edge_id, **chunks, SPAN=space.span,
        )  # fmt: skip
        _chunk_weights[grid](
            *where, space.largest, space.best, shaped.rows.temperature, space.chunk_weight,
            **chunks, **block, **EXACT,
        )  # fmt: skip
        if top_k:
            find_edges(shaped, space, by_mass=False)
        self._sum_masses(shaped, write=False)
        if top_p:
            find_edges(shaped, space, by_mass=True)
            self._sum_masses(shaped, write=False)

    def _sum_masses(self, shaped: ShapedLogits, *, write: bool) -> None:
        if shaped.num_rows:
            grid = (shaped.num_rows, self.space.num_chunks)
            _chunk_masses[grid](*self._row(shaped), self.space.chunk_mass, WRITE=write, **self._sizes, **EXACT)

    def _row(self, shaped: ShapedLogits) -> tuple[object, ...]:
        """What _kept_masses reads."""
        space, rows = self.space, shaped.rows
        return (
            shaped.logits, shaped.stride, shaped.width, space.largest, space.best, rows.temperature,
            rows.log_min_p, space.chunk_weight, space.edge_key, space.edge_id,
        )  # fmt: skip

    @property
    def _sizes(self) -> dict[str, int]:
        return {"NUM_CHUNKS": self.space.num_chunks, "SPAN": self.space.span, "BLOCK": self.space.block}
