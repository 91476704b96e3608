"""The kernels of a mixture of experts; see experts.py for what they do one after the other.

A program of a product has some outputs of a block of pairs of one expert. There are as many programs as the pairs
could need, however they are spread over the experts; those that are left over end at once.

SCALED: weights are 8-bit floats, and those of an expert have scales [outputs / LINES, groups], rounded up, one for
GROUP inputs; see grouped_fp8.py.

CODED: weights are low-bit codes; see low_bit.py, also for the constants. offsets: then [5, E], of codes, scales,
halves of scales, minimums, halves of minimums. ORDERED: `order` has the input of each column of each expert.
"""

import triton.language as tl

from faser.kernels.cuda.triton.common import activated, jit, jit_for_any, normalised
from faser.kernels.cuda.triton.grouped_fp8 import scaled_sums
from faser.kernels.cuda.triton.low_bit import low_bit_tile


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


@jit_for_any("num_rows")
def _route_few(hidden, stride, norm, router_norm, eps, router, router_bias, scales, slots, normed, logits, pairs,
               counts, weights, read, arrived, num_rows, width, num_experts,
               ROWS: tl.constexpr, SUM_ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
               BLOCK: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr,
               RENORMALISE: tl.constexpr, SCALED: tl.constexpr, PADDED: tl.constexpr, BIASED: tl.constexpr,
               SHARES: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Norms of all rows, and some outputs of the router; the program that is last to end routes all rows.

    SHARES: of the expert that every row passes the router's last output is the logit; it is the last expert, with
    the last pair of each row. arrived: the first is 0 before and after; the others are those of _down.
    logits: [R, columns], in between. TOP: pairs of a row without the shared one.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = num_experts + SHARES
    row = tl.arange(0, SUM_ROWS).to(tl.int64)
    row_at = hidden + row[:, None] * stride
    there = (row < num_rows)[:, None]
    squares = tl.zeros((SUM_ROWS,), tl.float32)
    for start in range(0, width, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        rows = tl.load(row_at + depth[None, :], mask=there & (depth < width)[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(rows * rows, 1)
    output = program * OUTPUTS + tl.arange(0, OUTPUTS)
    weight_at = router + output.to(tl.int64)[:, None] * width
    sums = _no_sums(SUM_ROWS, OUTPUTS, False)
    for start in range(0, width, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        inside = there & (depth < width)[None, :]
        factors = tl.load(weight_at + depth[None, :], mask=(output < columns)[:, None] & (depth < width)[None, :],
                          other=0.0)  # fmt: skip
        rows = tl.load(row_at + depth[None, :], mask=inside, other=0.0)
        by_router = tl.load(router_norm + depth, mask=depth < width, other=0.0)[None, :]
        sums = _sums(factors, normalised(rows, squares[:, None], width, eps, by_router), sums, False, WIDE)
        if start // DEPTH % programs == program:
            by = tl.load(norm + depth, mask=depth < width, other=0.0)[None, :]
            found = normalised(rows, squares[:, None], width, eps, by)
            tl.store(normed + row[:, None] * width + depth[None, :], found, mask=inside)
    if BIASED:
        sums += tl.load(router_bias + output, mask=output < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(logits + row[:, None] * columns + output[None, :], sums, mask=there & (output < columns)[None, :])
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(arrived, 0)
        _route_all(logits, scales, slots, pairs, counts, weights, read, num_rows, num_experts, ROWS, BLOCK, TOP,
                   PLACES, RENORMALISE, SCALED, PADDED, SHARES)  # fmt: skip


@jit
def _route_all(logits, scales, slots, pairs, counts, weights, read, num_rows, num_experts, ROWS: tl.constexpr,
               BLOCK: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr, RENORMALISE: tl.constexpr,
               SCALED: tl.constexpr, PADDED: tl.constexpr, SHARES: tl.constexpr):  # fmt: skip
    """_route and _gather_pairs for the rows of one program. Reads past the L1 cache what other programs wrote."""
    row, expert, place = tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, PLACES)
    valid = row < num_rows
    if PADDED:
        valid &= tl.load(slots + row, mask=valid, other=-1) >= 0
    among = (expert < num_experts)[None, :]
    free = (row >= 0)[:, None] & among
    at_row = logits + row[:, None] * (num_experts + SHARES)
    logit = tl.load(at_row + expert[None, :], mask=valid[:, None] & among, other=0.0, cache_modifier=".cg")
    most = tl.max(tl.where(free, logit, float("-inf")), 1)
    total = tl.sum(tl.where(free, tl.exp(logit - most[:, None]), 0.0), 1)
    number_of = tl.full((ROWS, BLOCK), -1, tl.int32)
    weight = tl.zeros((ROWS, PLACES), tl.float32)
    scale = tl.full((ROWS, PLACES), 1.0, tl.float32)
    for number in tl.static_range(TOP):
        best = tl.max(tl.where(free, logit, float("-inf")), 1)
        at = tl.min(tl.where(free & (logit == best[:, None]), expert[None, :], BLOCK), 1)
        at = tl.where(at < BLOCK, at, tl.min(tl.where(free, expert[None, :], BLOCK), 1))
        chosen = expert[None, :] == at[:, None]
        number_of = tl.where(chosen, number, number_of)
        weight = tl.where(place[None, :] == number, tl.exp(best - most)[:, None], weight)
        if SCALED:
            scale = tl.where(place[None, :] == number, tl.load(scales + at)[:, None], scale)
        free = free & (expert[None, :] != at[:, None])
    if RENORMALISE:
        total = tl.sum(weight, 1)
    weight = weight / total[:, None] * scale
    pairs_each = TOP + SHARES
    taken = (number_of >= 0) & valid[:, None]
    before = tl.cumsum(taken.to(tl.int32), 0) - taken.to(tl.int32)
    pair = row[:, None] * pairs_each + number_of
    tl.store(pairs + expert[None, :] * num_rows + before, pair, mask=taken)
    count = tl.sum(taken.to(tl.int32), 0)
    tl.store(counts + expert, count, mask=expert < num_experts)
    tl.atomic_add(read, tl.sum((count > 0).to(tl.int64)))
    tl.store(
        weights + row[:, None] * pairs_each + place[None, :], weight, mask=valid[:, None] & (place < TOP)[None, :]
    )
    if SHARES:
        own = tl.load(logits + row * (num_experts + 1) + num_experts, mask=valid, other=0.0, cache_modifier=".cg")
        tl.store(weights + row * pairs_each + TOP, 1.0 / (1.0 + tl.exp(-own)), mask=valid)
        before = tl.cumsum(valid.to(tl.int32), 0) - valid.to(tl.int32)
        tl.store(pairs + num_experts * num_rows + before, row * pairs_each + TOP, mask=valid)
        tl.store(counts + num_experts, tl.sum(valid.to(tl.int32)))


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
def _matrix_of(first_weight, offsets, expert):
    """Return where an expert's matrix begins: at a multiple of 16 bytes."""
    ALIGNED: tl.constexpr = 128 // first_weight.dtype.element_ty.primitive_bitwidth
    return first_weight + tl.multiple_of(tl.load(offsets + expert), ALIGNED)


@jit
def _factors_of(scales, scale_halves, minimums, minimum_halves, offsets, num_experts, expert):
    """Return where the factors of an expert's codes begin."""
    own = offsets + expert
    return (
        scales + tl.load(own + num_experts),
        scale_halves + tl.load(own + 2 * num_experts),
        minimums + tl.load(own + 3 * num_experts),
        minimum_halves + tl.load(own + 4 * num_experts),
    )


@jit
def _coded_sums(codes, of_groups, line, there, start, width, groups, rows, sums, FORM: tl.constexpr,
                ZERO: tl.constexpr, GROUP: tl.constexpr, SCALES_HALVED: tl.constexpr,
                SCALES_PER_HALF: tl.constexpr, LOWERED: tl.constexpr, MINIMUMS_HALVED: tl.constexpr,
                MINIMUMS_PER_HALF: tl.constexpr,
                OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
                WIDE: tl.constexpr):  # fmt: skip
    """_sums of weights in low-bit codes, rounded to the type of the rows. of_groups: see _factors_of."""
    weights = low_bit_tile(
        codes, of_groups[0], of_groups[1], of_groups[2], of_groups[3], line, there, start, width, groups, FORM,
        ZERO, GROUP, SCALES_HALVED, SCALES_PER_HALF, LOWERED, MINIMUMS_HALVED, MINIMUMS_PER_HALF, OUTPUTS, DEPTH,
    )  # fmt: skip
    return _sums(weights.to(rows.dtype), rows, sums, WEIGHTS_FIRST, WIDE)


@jit
def _no_sums(ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):
    return tl.zeros((OUTPUTS, ROWS) if WEIGHTS_FIRST else (ROWS, OUTPUTS), tl.float32)


@jit
def _pairs_from(pairs, first, count, ROWS: tl.constexpr):
    """ROWS pairs of an expert, from the first on, int64, and which of them there are."""
    place = first + tl.arange(0, ROWS)
    there = place < count
    return tl.load(pairs + place, mask=there, other=0).to(tl.int64), there


@jit_for_any("first", "num_experts")
def _widen(codes, offsets, scales, scale_halves, minimums, minimum_halves, counts, out, first, num_experts, size,
           width, groups, FORM: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, SCALES_HALVED: tl.constexpr,
           SCALES_PER_HALF: tl.constexpr, LOWERED: tl.constexpr, MINIMUMS_HALVED: tl.constexpr,
           MINIMUMS_PER_HALF: tl.constexpr, LINES: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Some weights of an expert, from the first one on, in out's type; none where no pair is of that expert."""
    number = tl.program_id(2)
    expert = (first + number).to(tl.int64)
    if tl.load(counts + number) > 0:
        line, start = (tl.program_id(0) * LINES + tl.arange(0, LINES)).to(tl.int64), tl.program_id(1) * DEPTH
        of_groups = _factors_of(scales, scale_halves, minimums, minimum_halves, offsets, num_experts, expert)
        found = low_bit_tile(
            _matrix_of(codes, offsets, expert), of_groups[0], of_groups[1], of_groups[2], of_groups[3], line,
            line < size, start, width, groups, FORM, ZERO, GROUP, SCALES_HALVED, SCALES_PER_HALF, LOWERED,
            MINIMUMS_HALVED, MINIMUMS_PER_HALF, LINES, DEPTH,
        )  # fmt: skip
        column = start + tl.arange(0, DEPTH)
        at = out + (number.to(tl.int64) * size + line)[:, None] * width + column[None, :]
        tl.store(at, found.to(out.dtype.element_ty), mask=(line < size)[:, None] & (column < width)[None, :])


@jit_for_any("num_rows", "num_experts")
def _gate_up(x, stride, first_weight, offsets, biases, scales, scale_halves, minimums, minimum_halves, order,
             groups, pairs, counts, num_rows, num_experts, inner, width, size,
             SCALED: tl.constexpr, LINES: tl.constexpr, GROUP: tl.constexpr,
             CODED: tl.constexpr, FORM: tl.constexpr, ZERO: tl.constexpr, SCALES_HALVED: tl.constexpr,
             SCALES_PER_HALF: tl.constexpr, LOWERED: tl.constexpr, MINIMUMS_HALVED: tl.constexpr,
             MINIMUMS_PER_HALF: tl.constexpr, ORDERED: tl.constexpr, TOP: tl.constexpr,
             ACTIVATION: tl.constexpr, BIASED: tl.constexpr, EXPERTS: tl.constexpr,
             ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
             WIDE: tl.constexpr):  # fmt: skip
    pieces = tl.cdiv(size, OUTPUTS)
    expert, first, count, piece = _work_of(tl.program_id(0), counts, num_experts, pieces, EXPERTS, ROWS)
    if expert < num_experts:
        pair, there = _pairs_from(pairs + expert * num_rows, first, count, ROWS)
        weight = _matrix_of(first_weight, offsets, expert)
        output = piece * OUTPUTS + tl.arange(0, OUTPUTS)
        gate_at = weight + output.to(tl.int64)[:, None] * width
        up_at = gate_at + size.to(tl.int64) * width
        row_at = x + (pair // TOP)[:, None] * stride
        if SCALED:
            own = scales + expert * (tl.cdiv(2 * size, LINES) * groups)
            gate_scale_at, up_scale_at = own + output // LINES * groups, own + (size + output) // LINES * groups
        if CODED:
            of_groups = _factors_of(scales, scale_halves, minimums, minimum_halves, offsets, num_experts, expert)
            line = output.to(tl.int64)
        gate = _no_sums(ROWS, OUTPUTS, WEIGHTS_FIRST)
        up = _no_sums(ROWS, OUTPUTS, WEIGHTS_FIRST)
        for start in range(0, width, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            inside = (output < size)[:, None] & (depth < width)[None, :]
            column = depth
            if ORDERED:
                column = tl.load(order + expert * width + depth, mask=depth < width, other=0)
            rows = tl.load(row_at + column[None, :], mask=there[:, None] & (depth < width)[None, :], other=0.0)
            if CODED:
                gate = _coded_sums(weight, of_groups, line, output < size, start, width, groups, rows, gate, FORM,
                                   ZERO, GROUP, SCALES_HALVED, SCALES_PER_HALF, LOWERED, MINIMUMS_HALVED,
                                   MINIMUMS_PER_HALF, OUTPUTS, DEPTH, WEIGHTS_FIRST, WIDE)  # fmt: skip
                up = _coded_sums(weight, of_groups, size + line, output < size, start, width, groups, rows, up,
                                 FORM, ZERO, GROUP, SCALES_HALVED, SCALES_PER_HALF, LOWERED, MINIMUMS_HALVED,
                                 MINIMUMS_PER_HALF, OUTPUTS, DEPTH, WEIGHTS_FIRST, WIDE)  # fmt: skip
            else:
                gate_weights = tl.load(gate_at + depth[None, :], mask=inside, other=0.0)
                up_weights = tl.load(up_at + depth[None, :], mask=inside, other=0.0)
                if SCALED:
                    scale = tl.load(gate_scale_at + start // GROUP, mask=output < size, other=0.0)
                    up_scale = tl.load(up_scale_at + start // GROUP, mask=output < size, other=0.0)
                    gate = scaled_sums(gate_weights, rows, gate, scale, WEIGHTS_FIRST, WIDE)
                    up = scaled_sums(up_weights, rows, up, up_scale, WEIGHTS_FIRST, WIDE)
                else:
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
def _down(inner, first_weight, offsets, biases, scales, scale_halves, minimums, minimum_halves, order, groups,
          pairs, counts, num_rows, num_experts, given, width, size, factors, slots, hidden, stride, arrived,
          SCALED: tl.constexpr, LINES: tl.constexpr, GROUP: tl.constexpr,
          CODED: tl.constexpr, FORM: tl.constexpr, ZERO: tl.constexpr, SCALES_HALVED: tl.constexpr,
          SCALES_PER_HALF: tl.constexpr, LOWERED: tl.constexpr, MINIMUMS_HALVED: tl.constexpr,
          MINIMUMS_PER_HALF: tl.constexpr, ORDERED: tl.constexpr,
          ADD_ROWS: tl.constexpr, PADDED: tl.constexpr, TOP: tl.constexpr,
          BIASED: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
          DEPTH: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """ADD_ROWS: the last program to end of all experts for a piece of the outputs does the work of _add there.

    There are at most as many rows, and an expert's pairs have one program a piece. 0: nothing is added. arrived:
    from the second on, one for each piece, 0 before and after.
    """
    pieces = tl.cdiv(width, OUTPUTS)
    expert, first, count, piece = _work_of(tl.program_id(0), counts, num_experts, pieces, EXPERTS, ROWS)
    if expert < num_experts:
        pair, there = _pairs_from(pairs + expert * num_rows, first, count, ROWS)
        weight = _matrix_of(first_weight, offsets, expert)
        output = piece * OUTPUTS + tl.arange(0, OUTPUTS)
        weight_at = weight + output.to(tl.int64)[:, None] * size
        row_at = inner + pair[:, None] * size
        if SCALED:
            scale_at = scales + expert * (tl.cdiv(width, LINES) * groups) + output // LINES * groups
        if CODED:
            of_groups = _factors_of(scales, scale_halves, minimums, minimum_halves, offsets, num_experts, expert)
        sums = _no_sums(ROWS, OUTPUTS, WEIGHTS_FIRST)
        for start in range(0, size, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            inside = (output < width)[:, None] & (depth < size)[None, :]
            column = depth
            if ORDERED:
                column = tl.load(order + expert * size + depth, mask=depth < size, other=0)
            rows = tl.load(row_at + column[None, :], mask=there[:, None] & (depth < size)[None, :], other=0.0)
            if CODED:
                sums = _coded_sums(weight, of_groups, output.to(tl.int64), output < width, start, size, groups,
                                   rows, sums, FORM, ZERO, GROUP, SCALES_HALVED, SCALES_PER_HALF, LOWERED,
                                   MINIMUMS_HALVED, MINIMUMS_PER_HALF, OUTPUTS, DEPTH, WEIGHTS_FIRST,
                                   WIDE)  # fmt: skip
            else:
                weights = tl.load(weight_at + depth[None, :], mask=inside, other=0.0)
                if SCALED:
                    scale = tl.load(scale_at + start // GROUP, mask=output < width, other=0.0)
                    sums = scaled_sums(weights, rows, sums, scale, WEIGHTS_FIRST, WIDE)
                else:
                    sums = _sums(weights, rows, sums, WEIGHTS_FIRST, WIDE)
        if WEIGHTS_FIRST:
            sums = tl.trans(sums)
        if BIASED:
            bias = tl.load(biases + expert * width + output, mask=output < width, other=0.0)
            sums += bias.to(tl.float32)[None, :]
        at = given + pair[:, None] * width + output[None, :]
        tl.store(at, sums, mask=there[:, None] & (output < width)[None, :])
        if ADD_ROWS:
            tl.debug_barrier()
            each = tl.arange(0, EXPERTS)
            blocks = tl.sum((tl.load(counts + each, mask=each < num_experts, other=0) > 0).to(tl.int32))
            if tl.atomic_add(arrived + 1 + piece, 1, sem="acq_rel", scope="gpu") == blocks - 1:
                tl.store(arrived + 1 + piece, 0)
                _add_few(given, factors, slots, hidden, stride, num_rows, width, output, ADD_ROWS, PADDED, TOP)


@jit
def _add_few(given, factors, slots, hidden, stride, num_rows, width, output, ROWS: tl.constexpr,
             PADDED: tl.constexpr, TOP: tl.constexpr):  # fmt: skip
    """_add for some columns of all rows. Reads past the L1 cache what other programs wrote."""
    row = tl.arange(0, ROWS).to(tl.int64)
    valid = row < num_rows
    if PADDED:
        valid &= tl.load(slots + row, mask=valid, other=-1) >= 0
    inside = valid[:, None] & (output < width)[None, :]
    total = tl.zeros(inside.shape, tl.float32)
    for number in tl.static_range(TOP):
        pair = row * TOP + number
        factor = tl.load(factors + pair, mask=valid, other=0.0)
        result_at = given + pair[:, None] * width + output[None, :]
        total += factor[:, None] * tl.load(result_at, mask=inside, other=0.0, cache_modifier=".cg")
    at = hidden + row[:, None] * stride + output[None, :]
    stream = tl.load(at, mask=inside, other=0.0)
    tl.store(at, (stream.to(tl.float32) + total).to(stream.dtype), mask=inside)


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
