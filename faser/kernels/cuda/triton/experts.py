"""Mixtures of experts on a GPU: each row passes the networks that its router chooses, in five launches.

    route      the experts of each row, and their weights, scaled
    gather     the pairs (row, place among its experts) of each expert, in the order of rows
    gate_up    gate · up of each pair; a program has some outputs of some pairs of one expert
    down       the expert's results of each pair, in float32
    add        the weighed results of each row, in the order of its own weights, to the residual stream

No launch depends on which experts the rows choose, so all of them can be part of a CUDA graph. Every pair is
computed by one program alone, over all inputs in one order, whatever its Tiles: no row changes another one's bits,
but for what a larger block of rows may do to a product of the tensor cores.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.triton.common import ACTIVATIONS, EXACT, expect, expect_lines, next_power_of_2
from faser.kernels.cuda.triton.expert_kernels import _add, _down, _gate_up, _gather_pairs, _route, _widen
from faser.kernels.cuda.triton.expert_weights import (
    TYPES,
    ExpertCodes,
    ExpertProduct,
    ExpertScaling,
    ExpertWeights,
)
from faser.kernels.cuda.triton.grouped_fp8 import WHOLE_ROW
from faser.kernels.cuda.triton.low_bit import factors_of, kind_of
from faser.optional import or_else

# Of an expert that every row passes: what it gives, [R, H] float32, and logits, [R] float32, whose σ weigh that.
SharedOutput = tuple[Tensor, Tensor]
_MOST_EXPERTS = 4096  # whose logits one program keeps in registers
_MOST_ROWS_A_WARPGROUP = 64  # of a tile in 8 bits
_WIDENED = (16, 256)  # lines and columns of a program that dequantises
# What kernels of weights in 16 bits are compiled for.
_PLAIN: dict[str, Any] = {"SCALED": False, "LINES": 1, "GROUP": WHOLE_ROW, "CODED": False}
_PLAIN |= {"FORM": "", "ZERO": 0, "LOWERED": False, "SCALES_HALVED": False, "SCALES_PER_HALF": 1}
_PLAIN |= {"MINIMUMS_HALVED": False, "MINIMUMS_PER_HALF": 1}
FEW_ROWS = 8  # at most: one program routes them all, or adds their results up
_PAIRS, _COLUMNS = 512, 1024  # of a piece of work without products


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Tiles of a program of a product. rows: pairs; outputs; depth: of a piece of its weights.

    warps: that share the work. stages: pieces that are on their way at a time. weights_first: weights are the
    first factor of the tensor cores' products, and rows the second one; of the first they take 64 at least.
    """

    rows: int
    outputs: int
    depth: int
    warps: int = 4
    stages: int = 3
    weights_first: bool = False


# By the mean number of pairs of an expert, up to the first number. Of those that were tried on an H200 these are
# the fastest, or within some per cent (benchmarks/results/h200-tiles); all had the same bits.
_TILES = (
    (12.0, Tiles(rows=16, outputs=64, depth=128, weights_first=True)),
    (24.0, Tiles(rows=32, outputs=64, depth=64, stages=4, weights_first=True)),
    (64.0, Tiles(rows=64, outputs=64, depth=64, stages=4, weights_first=True)),
    (math.inf, Tiles(rows=128, outputs=64, depth=64, weights_first=True)),
)
ALL_TILES = tuple(tiles for _, tiles in _TILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Pairs of each expert. Pair r K + k is row r at the k-th of its K experts; rows of padding have none.

    weights: [R, K] float32. pairs: [E, R] int32, of each expert the numbers of its pairs, ascending; counts: [E]
    int32, how many these are. slots: see `experts`.
    """

    weights: Tensor
    pairs: Tensor
    counts: Tensor
    slots: Tensor | None = None

    @property
    def num_pairs(self) -> int:
        return self.weights.numel()


def experts(
    networks: ExpertWeights,
    x: Tensor,
    logits: Tensor,
    hidden: Tensor,
    read: Tensor,
    shared: SharedOutput | None = None,
    slots: Tensor | None = None,
    *,
    top_k: int,
    renormalise: bool,
    activation: str,
    scales: Tensor | None = None,
    piece_bytes: int | None = None,
) -> None:
    """Compute Backend.experts. x, hidden: [R, H] bfloat16 or float16, each row contiguous. logits: [R, E] float32.

    read: [1] int64, to which the number of experts that any row has chosen is added. shared: added
    last; None: no expert is shared. slots: [R] int64, below 0 for padding, whose rows stay as they are; None: no
    row is. scales: [E] float32. piece_bytes: low-bit weights are dequantised first, some experts at a time, into
    one buffer of at most this size; None: kernels read the codes.
    Raises EngineError that names the tensor that does not fit.
    """
    (rows, width), count = x.shape, networks.count
    first = networks.first
    expect_lines("x", x, (rows, width), *TYPES, like=first)
    expect_lines("hidden", hidden, (rows, width), x.dtype, like=first)
    expect("logits", logits, (rows, count), torch.float32, like=first)
    networks.check(x.dtype, width)
    expect("read", read, (1,), torch.int64, like=first)
    expect("scales", scales, (count,), torch.float32, like=first)
    if shared is not None:
        given, shared_logits = shared
        expect("what the shared expert gives", given, (rows, width), torch.float32, like=first)
        expect("logits of the shared expert", shared_logits, (rows,), torch.float32, like=first)
    expect("slots", slots, (rows,), torch.int64, like=first)
    assert activation in ACTIVATIONS, activation
    if not 0 < top_k <= count <= _MOST_EXPERTS:
        raise EngineError(f"a row passes {top_k} of {count} experts; the kernel takes 1 to {_MOST_EXPERTS}")
    if not rows:
        return
    tiles = tiles_for(rows * top_k, count)
    routes = route(logits, read, top_k=top_k, renormalise=renormalise, scales=scales, slots=slots)
    inner = gate_up(networks, x, routes, activation, tiles, piece_bytes=piece_bytes)
    add(down(networks, inner, routes, tiles, piece_bytes=piece_bytes), routes, hidden, shared)


def tiles_for(num_pairs: int, num_experts: int) -> Tiles:
    """Choose the tiles by how many pairs an expert has on average."""
    return next(tiles for most, tiles in _TILES if num_pairs <= most * num_experts)


def of_fewer_bits(tiles: Tiles) -> Tiles:
    """Return tiles for weights in 8 bits or fewer: more warps share large ones, as widening takes registers."""
    return replace(tiles, warps=2 * tiles.warps) if tiles.rows > _MOST_ROWS_A_WARPGROUP else tiles


def most_blocks(num_pairs: int, num_experts: int, rows: int) -> int:
    """Blocks of this number of rows that the pairs of all experts make at most, however they are spread.

    Each expert that has any pair may have one block that is not full.
    """
    return (num_pairs + min(num_pairs, num_experts) * (rows - 1)) // rows


def route(
    logits: Tensor,
    read: Tensor,
    *,
    top_k: int,
    renormalise: bool,
    scales: Tensor | None = None,
    slots: Tensor | None = None,
) -> Routes:
    rows, count = logits.shape
    chosen, pairs, counts = (
        logits.new_empty(each, dtype=torch.int32) for each in ((rows, top_k), (count, rows), count)
    )
    weights = torch.empty_like(chosen, dtype=torch.float32)
    _route[(rows,)](
        logits, count, or_else(scales, logits), or_else(slots, logits), chosen, weights,
        RENORMALISE=renormalise, SCALED=scales is not None, PADDED=slots is not None, TOP=top_k,
        PLACES=next_power_of_2(top_k), BLOCK=next_power_of_2(count), **EXACT,
    )  # fmt: skip
    _gather_pairs[(count,)](chosen, rows * top_k, rows, pairs, counts, read, BLOCK=_PAIRS)
    return Routes(weights=weights, pairs=pairs, counts=counts, slots=slots)


def gate_up(
    networks: ExpertWeights,
    x: Tensor,
    routes: Routes,
    activation: str,
    tiles: Tiles,
    *,
    piece_bytes: int | None = None,
) -> Tensor:
    """Return for each pair the activated inner values of its expert: [R K, F], of x's type."""
    (rows, top_k), size = routes.weights.shape, networks.size
    inner = x.new_empty((rows * top_k, size))
    for part, own in _parts(networks.gate_up, routes, x, piece_bytes):
        stored, options = _stored(part, own)
        _gate_up[_programs(own, size, tiles)](
            x, x.stride(0), part.matrices[0], part.offsets, or_else(part.bias, x), *stored, own.pairs, own.counts,
            rows, part.count, inner, x.shape[1], size, TOP=top_k, ACTIVATION=activation,
            BIASED=part.bias is not None, **_options(x, part, tiles, options),
        )  # fmt: skip
    return inner


def down(
    networks: ExpertWeights,
    inner: Tensor,
    routes: Routes,
    tiles: Tiles,
    *,
    hidden: Tensor | None = None,
    arrived: Tensor | None = None,
    piece_bytes: int | None = None,
) -> Tensor:
    """Return for each pair the result of its expert: [R K, H] float32.

    hidden: to whose rows, at most FEW_ROWS, the weighed results are added. arrived: zeros, see few_row_experts.py.
    """
    width, size, slots = networks.width, networks.size, routes.slots
    given = inner.new_empty((len(inner), width), dtype=torch.float32)
    into = or_else(hidden, inner)
    for part, own in _parts(networks.down, routes, inner, piece_bytes):
        stored, options = _stored(part, own)
        _down[_programs(own, width, tiles)](
            inner, part.matrices[0], part.offsets, or_else(part.bias, inner), *stored, own.pairs, own.counts,
            len(own.weights), part.count, given, width, size, own.weights, or_else(slots, given), into,
            into.stride(0), or_else(arrived, own.counts), ADD_ROWS=0 if hidden is None else FEW_ROWS,
            PADDED=slots is not None, TOP=own.weights.shape[1], BIASED=part.bias is not None,
            **_options(inner, part, tiles, options),
        )  # fmt: skip
    return given


def _parts(
    product: ExpertProduct, routes: Routes, rows: Tensor, piece_bytes: int | None
) -> Iterator[tuple[ExpertProduct, Routes]]:
    """Yield the product and its pairs; or those of some experts after the others, with dequantised weights."""
    codes = product.stored
    if piece_bytes is None or not isinstance(codes, ExpertCodes):
        yield product, routes
        return
    (outputs, inputs), count, first = product.shape, product.count, codes.matrices[0]
    most = min(count, max(1, piece_bytes // (outputs * inputs * rows.element_size())))
    room = rows.new_empty((most, outputs, inputs))
    for start in range(0, count, most):
        some = slice(start, start + most)
        own = replace(routes, pairs=routes.pairs[some], counts=routes.counts[some])
        weights = room[: len(own.counts)]
        _widen[(-(-outputs // _WIDENED[0]), -(-inputs // _WIDENED[1]), len(weights))](
            first.codes, product.offsets, *factors_of(first), own.counts, weights, start, count, outputs, inputs,
            first.scales.values.shape[1], **kind_of(first), LINES=_WIDENED[0], DEPTH=_WIDENED[1], **EXACT,
        )  # fmt: skip
        yield product.part(start, weights), own


def _programs(routes: Routes, outputs: int, tiles: Tiles) -> tuple[int]:
    blocks = most_blocks(routes.num_pairs, len(routes.counts), tiles.rows)
    return (blocks * -(-outputs // tiles.outputs),)


def _stored(product: ExpertProduct, routes: Routes) -> tuple[tuple[Tensor | int, ...], dict[str, Any]]:
    """Return factors, order and groups of a row for a kernel, and what it is compiled for."""
    nothing, order, stored = routes.weights, or_else(product.order, routes.counts), product.stored
    options = _PLAIN | {"ORDERED": product.order is not None}
    if stored is None:
        return (nothing, nothing, nothing, nothing, order, 0), options
    if isinstance(stored, ExpertScaling):
        sizes = {"SCALED": True, "GROUP": stored.group, "LINES": stored.lines}
        return (stored.scales, nothing, nothing, nothing, order, stored.scales.shape[2]), options | sizes
    first = stored.matrices[0]
    given: tuple[Tensor | int, ...] = (*factors_of(first), order, first.scales.values.shape[1])
    return given, options | kind_of(first) | {"CODED": True}


def _options(rows: Tensor, product: ExpertProduct, tiles: Tiles, stored: dict[str, Any]) -> dict[str, Any]:
    if product.stored is not None:
        tiles = of_fewer_bits(tiles)
    return {
        **stored,
        "EXPERTS": next_power_of_2(product.count),
        "ROWS": tiles.rows,
        "OUTPUTS": tiles.outputs,
        "DEPTH": math.gcd(tiles.depth, stored["GROUP"]) if stored["SCALED"] else tiles.depth,
        "WEIGHTS_FIRST": tiles.weights_first,
        "WIDE": rows.device.type == "cpu",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        **EXACT,
    }


def add(given: Tensor, routes: Routes, hidden: Tensor, shared: SharedOutput | None = None) -> None:
    """To each row of hidden the weighed sum of its pairs, and what the shared expert gives."""
    (rows, top_k), width = routes.weights.shape, given.shape[1]
    beside = shared or (given, given)  # without one never read
    _add[(rows, -(-width // _COLUMNS))](
        given, routes.weights, *beside, or_else(routes.slots, given), hidden, hidden.stride(0),
        width, TOP=top_k, SHARES=shared is not None, PADDED=routes.slots is not None, BLOCK=_COLUMNS, **EXACT,
    )  # fmt: skip
