"""Mixtures of experts on a GPU: each row passes the networks that its router chooses, in five launches.

    route      the experts of each row, and their weights
    gather     the pairs (row, place among its experts) of each expert, in the order of rows
    gate_up    gate · up of each pair; a program has some outputs of some pairs of one expert
    down       the expert's results of each pair, in float32
    add        the weighed results of each row, in the order of its own weights, to the residual stream

No launch depends on how many pairs an expert has, so all of them can be part of a CUDA graph: programs for pairs
that an expert does not have end at once. Every pair is computed by one program alone, over all inputs in one
order: no row changes another one's bits, but for what a larger block of rows may do to a product of the tensor
cores. A weight is read once for up to ROWS pairs.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.triton.common import (
    ACTIVATIONS,
    EXACT,
    activated,
    expect,
    expect_lines,
    jit,
    jit_for_any,
    next_power_of_2,
)

_TYPES = (torch.bfloat16, torch.float16)
_MOST_EXPERTS = 4096  # whose logits one program keeps in registers
_FEW, _MANY = 16, 64  # rows of a program; few where most experts have few pairs
_OUTPUTS, _DEPTH = 64, 64  # of a program, and of a piece of the weights; never tuned
_PAIRS, _COLUMNS = 512, 1024  # of a piece of work without products
_ALIGNED = tl.constexpr(8)  # elements: weights begin at multiples of 16 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The matrices of E equal networks, where they lie. gate_up: [2 F, H] each, gate then up; down: [H, F] each.

    gate_up_offsets, down_offsets: [E] int64, of each from the first one, in elements. gate_up_bias: [E, 2 F];
    down_bias: [E, H], of the weights' type; None: there are none.
    """

    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    gate_up_offsets: Tensor
    down_offsets: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @classmethod
    def of(
        cls,
        gate_up: tuple[Tensor, ...],
        down: tuple[Tensor, ...],
        gate_up_biases: tuple[Tensor, ...] | None = None,
        down_biases: tuple[Tensor, ...] | None = None,
    ) -> "ExpertWeights":
        """biases: of each expert, [2 F] and [H]; they are copied, the matrices are not.

        Raises EngineError that names the matrix that is not like the first one.
        """
        for name, matrices in (("gate_up", gate_up), ("down", down)):
            first = matrices[0]
            for number, each in enumerate(matrices):
                expect(f"{name} of expert {number}", each, tuple(first.shape), *_TYPES, like=first)
                if each.data_ptr() % 16 or each.dtype is not first.dtype:
                    raise EngineError(f"{name} of expert {number} is not aligned and of the type of the first one")
        return cls(
            gate_up=gate_up,
            down=down,
            gate_up_offsets=_offsets(gate_up),
            down_offsets=_offsets(down),
            gate_up_bias=None if gate_up_biases is None else torch.stack(gate_up_biases),
            down_bias=None if down_biases is None else torch.stack(down_biases),
        )

    @property
    def size(self) -> int:
        """F: of the inner networks."""
        return self.down[0].shape[1]


def _offsets(matrices: tuple[Tensor, ...]) -> Tensor:
    first = matrices[0]
    found = [(each.data_ptr() - first.data_ptr()) // first.element_size() for each in matrices]
    return torch.tensor(found, dtype=torch.int64).to(first.device)


@jit
def _route(logits, num_experts, chosen, weights,
           RENORMALISE: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One row. Of equal logits the lower expert comes first. Experts differ, also where no logit is a number."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    free = expert < num_experts
    logit = tl.load(logits + row * num_experts + expert, mask=free, other=float("-inf"))
    most = tl.max(logit)
    total = tl.sum(tl.exp(logit - most))
    place = tl.arange(0, PLACES)
    found = tl.zeros((PLACES,), tl.int32)
    weight = tl.zeros((PLACES,), tl.float32)
    for number in tl.static_range(TOP):
        best = tl.max(tl.where(free, logit, float("-inf")))
        at = tl.min(tl.where(free & (logit == best), expert, BLOCK))
        at = tl.where(at < BLOCK, at, tl.min(tl.where(free, expert, BLOCK)))
        found = tl.where(place == number, at, found)
        weight = tl.where(place == number, tl.exp(best - most), weight)
        free = free & (expert != at)
    if RENORMALISE:
        total = tl.sum(weight)
    tl.store(chosen + row * TOP + place, found, mask=place < TOP)
    tl.store(weights + row * TOP + place, weight / total, mask=place < TOP)


@jit_for_any("num_pairs", "num_rows")
def _gather_pairs(chosen, num_pairs, num_rows, pairs, counts, read, BLOCK: tl.constexpr):
    """One expert: the numbers of its pairs, ascending. A row has it once, so there are at most num_rows."""
    expert = tl.program_id(0)
    found = 0
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine = tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert
        place = found + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pairs + expert.to(tl.int64) * num_rows + place, pair, mask=mine)
        found += tl.sum(mine.to(tl.int32))
    tl.store(counts + expert, found)
    tl.atomic_add(read, 1, mask=found > 0)


@jit
def _sums(rows, piece, sums, WIDE: tl.constexpr):
    """sums + rows @ piece.T, float32. WIDE: widen the factors first: the interpreter multiplies no bfloat16."""
    if WIDE:
        return tl.dot(rows.to(tl.float32), tl.trans(piece.to(tl.float32)), sums, input_precision="ieee")
    return tl.dot(rows, tl.trans(piece), sums)


@jit
def _pairs_from(pairs, first, count, ROWS: tl.constexpr):
    """ROWS pairs of an expert, from the first on, int64, and which of them there are."""
    place = first + tl.arange(0, ROWS)
    there = place < count
    return tl.load(pairs + place, mask=there, other=0).to(tl.int64), there


@jit_for_any("num_rows")
def _gate_up(x, stride, first_weight, offsets, biases, pairs, counts, num_rows, inner, width, size,
             TOP: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr,
             OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Some outputs of some pairs of one expert."""
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    first = tl.program_id(2) * ROWS
    if first < count:
        pair, there = _pairs_from(pairs + expert * num_rows, first, count, ROWS)
        weight = first_weight + tl.multiple_of(tl.load(offsets + expert), _ALIGNED)
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        gate_at = weight + output.to(tl.int64)[:, None] * width
        up_at = gate_at + size.to(tl.int64) * width
        row_at = x + (pair // TOP)[:, None] * stride
        gate = tl.zeros((ROWS, OUTPUTS), tl.float32)
        up = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for start in range(0, width, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            inside = (output < size)[:, None] & (depth < width)[None, :]
            rows = tl.load(row_at + depth[None, :], mask=there[:, None] & (depth < width)[None, :], other=0.0)
            gate = _sums(rows, tl.load(gate_at + depth[None, :], mask=inside, other=0.0), gate, WIDE)
            up = _sums(rows, tl.load(up_at + depth[None, :], mask=inside, other=0.0), up, WIDE)
        if BIASED:
            bias = biases + expert * 2 * size + output
            gate += tl.load(bias, mask=output < size, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + size, mask=output < size, other=0.0).to(tl.float32)[None, :]
        kind = x.dtype.element_ty
        found = activated(gate.to(kind), up.to(kind), ACTIVATION)
        at = inner + pair[:, None] * size + output[None, :]
        tl.store(at, found.to(kind), mask=there[:, None] & (output < size)[None, :])


@jit_for_any("num_rows")
def _down(inner, first_weight, offsets, biases, pairs, counts, num_rows, given, width, size, BIASED: tl.constexpr,
          ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Some outputs of some pairs of one expert."""
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    first = tl.program_id(2) * ROWS
    if first < count:
        pair, there = _pairs_from(pairs + expert * num_rows, first, count, ROWS)
        weight = first_weight + tl.multiple_of(tl.load(offsets + expert), _ALIGNED)
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        weight_at = weight + output.to(tl.int64)[:, None] * size
        row_at = inner + pair[:, None] * size
        sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for start in range(0, size, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            inside = (output < width)[:, None] & (depth < size)[None, :]
            rows = tl.load(row_at + depth[None, :], mask=there[:, None] & (depth < size)[None, :], other=0.0)
            sums = _sums(rows, tl.load(weight_at + depth[None, :], mask=inside, other=0.0), sums, WIDE)
        if BIASED:
            bias = tl.load(biases + expert * width + output, mask=output < width, other=0.0)
            sums += bias.to(tl.float32)[None, :]
        at = given + pair[:, None] * width + output[None, :]
        tl.store(at, sums, mask=there[:, None] & (output < width)[None, :])


@jit
def _add(given, weights, hidden, stride, width, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """Some columns of one row, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(TOP):
        pair = row * TOP + number
        total += tl.load(weights + pair) * tl.load(given + pair * width + column, mask=inside, other=0.0)
    at = hidden + row * stride + column
    stream = tl.load(at, mask=inside, other=0.0)
    tl.store(at, (stream.to(tl.float32) + total).to(stream.dtype), mask=inside)


def experts(
    networks: ExpertWeights,
    x: Tensor,
    logits: Tensor,
    hidden: Tensor,
    read: Tensor,
    *,
    top_k: int,
    renormalise: bool,
    activation: str,
) -> None:
    """See Backend.experts. x, hidden: [R, H] bfloat16 or float16, each row contiguous. logits: [R, E] float32.

    read: [1] int64, to which the number of experts that any row has chosen is added.
    Raises EngineError that names the tensor that does not fit.
    """
    (rows, width), count, size = x.shape, len(networks.down), networks.size
    first = networks.gate_up[0]
    expect_lines("x", x, (rows, width), first.dtype, like=first)
    expect_lines("hidden", hidden, (rows, width), first.dtype, like=first)
    expect("logits", logits, (rows, count), torch.float32, like=first)
    expect("down", networks.down[0], (width, size), first.dtype, like=first)
    expect("gate_up", first, (2 * size, width), *_TYPES, like=first)
    expect("read", read, (1,), torch.int64, like=first)
    for name, bias, outputs in (("gate_up", networks.gate_up_bias, 2 * size), ("down", networks.down_bias, width)):
        if bias is not None:
            expect(f"the biases of {name}", bias, (count, outputs), first.dtype, like=first)
    assert activation in ACTIVATIONS, activation
    if not 0 < top_k <= count <= _MOST_EXPERTS:
        raise EngineError(f"a row passes {top_k} of {count} experts; the kernel takes 1 to {_MOST_EXPERTS}")
    if not rows:
        return

    def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    chosen, pairs, counts = room(rows, top_k), room(count, rows), room(count)
    weights, given = room(rows, top_k, dtype=torch.float32), room(rows * top_k, width, dtype=torch.float32)
    inner = room(rows * top_k, size, dtype=x.dtype)
    _route[(rows,)](
        logits, count, chosen, weights, RENORMALISE=renormalise, TOP=top_k, PLACES=next_power_of_2(top_k),
        BLOCK=next_power_of_2(count), **EXACT,
    )  # fmt: skip
    _gather_pairs[(count,)](chosen, rows * top_k, rows, pairs, counts, read, BLOCK=_PAIRS)
    block = _FEW if rows * top_k <= _FEW * count else _MANY
    shape = {"ROWS": block, "OUTPUTS": _OUTPUTS, "DEPTH": _DEPTH, "WIDE": x.device.type == "cpu"}
    blocks = -(-rows // block)
    gate_up_bias, down_bias = networks.gate_up_bias, networks.down_bias
    _gate_up[(-(-size // _OUTPUTS), count, blocks)](
        x, x.stride(0), first, networks.gate_up_offsets, first if gate_up_bias is None else gate_up_bias,
        pairs, counts, rows, inner, width, size,
        TOP=top_k, ACTIVATION=activation, BIASED=gate_up_bias is not None, **shape, **EXACT,
    )  # fmt: skip
    _down[(-(-width // _OUTPUTS), count, blocks)](
        inner, networks.down[0], networks.down_offsets, first if down_bias is None else down_bias,
        pairs, counts, rows, given, width, size, BIASED=down_bias is not None, **shape, **EXACT,
    )  # fmt: skip
    _add[(rows, -(-width // _COLUMNS))](
        given, weights, hidden, hidden.stride(0), width, TOP=top_k, BLOCK=_COLUMNS, **EXACT
    )
