"""The kernels of a mixture of experts; see experts.py for what they do one after the other.

A program of a product has some outputs of a block of pairs of one expert. There are as many programs as the pairs
could need, however they are spread over the experts; those that are left over end at once.
"""

import triton.language as tl

from faser.kernels.cuda.triton.common import activated, jit, jit_for_any

_ALIGNED = tl.constexpr(8)  # elements: weights begin at multiples of 16 bytes


@jit
def _route(logits, num_experts, scales, slots, chosen, weights, RENORMALISE: tl.constexpr, SCALED: tl.constexpr,
           PADDED: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One row. Of equal logits the lower expert comes first. Experts differ, also where no logit is a number.

    PADDED: slots has a number below 0 for a row of padding, which chooses -1.
    """
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
    weight = weight / total
    if SCALED:
        weight *= tl.load(scales + found, mask=place < TOP, other=0.0)
    if PADDED:
        found = tl.where(tl.load(slots + row) < 0, -1, found)
    tl.store(chosen + row * TOP + place, found, mask=place < TOP)
    tl.store(weights + row * TOP + place, weight, mask=place < TOP)


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
def _work_of(program, counts, num_experts, pieces, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """A program's expert, the first of the pairs, how many the expert has, and the piece of the outputs.

    Programs of an expert are neighbours, and among these the ones of the same piece: what one of them reads of the
    weights, the others find in the L2 cache. pieces: of the outputs. num_experts and more: there is nothing to do.
    """
    expert = tl.arange(0, EXPERTS)
    blocks = tl.cdiv(tl.load(counts + expert, mask=expert < num_experts, other=0), ROWS)
    ends = tl.cumsum(blocks, 0)
    before = ends * pieces <= program
    found = tl.sum(before.to(tl.int32))
    place = program - pieces * tl.max(tl.where(before, ends, 0))
    count = tl.load(counts + found, mask=found < num_experts, other=0)
    own = tl.maximum(tl.cdiv(count, ROWS), 1)
    return found.to(tl.int64), place % own * ROWS, count, place // own


@jit
def _sums(weights, rows, sums, WEIGHTS_FIRST: tl.constexpr, WIDE: tl.constexpr):
    """sums + rows @ weights.T, float32; transposed where weights come first.

    WIDE: widen the factors first: the interpreter multiplies no bfloat16.
    """
    if WIDE:
        weights, rows = weights.to(tl.float32), rows.to(tl.float32)
    one, other = (weights, rows) if WEIGHTS_FIRST else (rows, weights)
    return tl.dot(one, tl.trans(other), sums, input_precision="ieee")


@jit
def _no_sums(ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):
    return tl.zeros((OUTPUTS, ROWS) if WEIGHTS_FIRST else (ROWS, OUTPUTS), tl.float32)


@jit
def _pairs_from(pairs, first, count, ROWS: tl.constexpr):
    """ROWS pairs of an expert, from the first on, int64, and which of them there are."""
    place = first + tl.arange(0, ROWS)
    there = place < count
    return tl.load(pairs + place, mask=there, other=0).to(tl.int64), there


@jit_for_any("num_rows", "num_experts")
def _gate_up(x, stride, first_weight, offsets, biases, pairs, counts, num_rows, num_experts, inner, width, size,
             TOP: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr, EXPERTS: tl.constexpr,
             ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
             WIDE: tl.constexpr):  # fmt: skip
    pieces = tl.cdiv(size, OUTPUTS)
    expert, first, count, piece = _work_of(tl.program_id(0), counts, num_experts, pieces, EXPERTS, ROWS)
    if expert < num_experts:
        pair, there = _pairs_from(pairs + expert * num_rows, first, count, ROWS)
        weight = first_weight + tl.multiple_of(tl.load(offsets + expert), _ALIGNED)
        output = piece * OUTPUTS + tl.arange(0, OUTPUTS)
        gate_at = weight + output.to(tl.int64)[:, None] * width
        up_at = gate_at + size.to(tl.int64) * width
        row_at = x + (pair // TOP)[:, None] * stride
        gate = _no_sums(ROWS, OUTPUTS, WEIGHTS_FIRST)
        up = _no_sums(ROWS, OUTPUTS, WEIGHTS_FIRST)
        for start in range(0, width, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            inside = (output < size)[:, None] & (depth < width)[None, :]
            rows = tl.load(row_at + depth[None, :], mask=there[:, None] & (depth < width)[None, :], other=0.0)
            gate_weights = tl.load(gate_at + depth[None, :], mask=inside, other=0.0)
            up_weights = tl.load(up_at + depth[None, :], mask=inside, other=0.0)
            gate = _sums(gate_weights, rows, gate, WEIGHTS_FIRST, WIDE)
            up = _sums(up_weights, rows, up, WEIGHTS_FIRST, WIDE)
        if WEIGHTS_FIRST:
            gate, up = tl.trans(gate), tl.trans(up)
        if BIASED:
            bias = biases + expert * 2 * size + output
            gate += tl.load(bias, mask=output < size, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + size, mask=output < size, other=0.0).to(tl.float32)[None, :]
        kind = x.dtype.element_ty
        found = activated(gate.to(kind), up.to(kind), ACTIVATION)
        at = inner + pair[:, None] * size + output[None, :]
        tl.store(at, found.to(kind), mask=there[:, None] & (output < size)[None, :])


@jit_for_any("num_rows", "num_experts")
def _down(inner, first_weight, offsets, biases, pairs, counts, num_rows, num_experts, given, width, size,
          BIASED: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
          DEPTH: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    pieces = tl.cdiv(width, OUTPUTS)
    expert, first, count, piece = _work_of(tl.program_id(0), counts, num_experts, pieces, EXPERTS, ROWS)
    if expert < num_experts:
        pair, there = _pairs_from(pairs + expert * num_rows, first, count, ROWS)
        weight = first_weight + tl.multiple_of(tl.load(offsets + expert), _ALIGNED)
        output = piece * OUTPUTS + tl.arange(0, OUTPUTS)
        weight_at = weight + output.to(tl.int64)[:, None] * size
        row_at = inner + pair[:, None] * size
        sums = _no_sums(ROWS, OUTPUTS, WEIGHTS_FIRST)
        for start in range(0, size, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            inside = (output < width)[:, None] & (depth < size)[None, :]
            rows = tl.load(row_at + depth[None, :], mask=there[:, None] & (depth < size)[None, :], other=0.0)
            weights = tl.load(weight_at + depth[None, :], mask=inside, other=0.0)
            sums = _sums(weights, rows, sums, WEIGHTS_FIRST, WIDE)
        if WEIGHTS_FIRST:
            sums = tl.trans(sums)
        if BIASED:
            bias = tl.load(biases + expert * width + output, mask=output < width, other=0.0)
            sums += bias.to(tl.float32)[None, :]
        at = given + pair[:, None] * width + output[None, :]
        tl.store(at, sums, mask=there[:, None] & (output < width)[None, :])


@jit
def _add(given, weights, shared, shared_logits, slots, hidden, stride, width,
         TOP: tl.constexpr, SHARES: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Some columns of one row, rounded once; of padding none."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if PADDED:
        inside &= tl.load(slots + row) >= 0
    total = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(TOP):
        pair = row * TOP + number
        total += tl.load(weights + pair) * tl.load(given + pair * width + column, mask=inside, other=0.0)
    if SHARES:
        weight = 1.0 / (1.0 + tl.exp(-tl.load(shared_logits + row)))
        total += weight * tl.load(shared + row * width + column, mask=inside, other=0.0)
    at = hidden + row * stride + column
    stream = tl.load(at, mask=inside, other=0.0)
    tl.store(at, (stream.to(tl.float32) + total).to(stream.dtype), mask=inside)
