"""The last token that top_k and top_p keep, found without sorting the vocabulary.

The order is by likelihood, among equals by id (engine/execution/sampling/distribution.py). Its keys are numbers
of 31 bits. A range is one of 4096 intervals of keys, in the order of keys: a thousandth of a nat wide near the
most likely token, a sixteenth where tokens hardly count. The range in which the last kept token lies is found
from the top, four bits at a time: of the tokens whose range begins with the bits found so far, each launch sums
the weights by their next four bits; the next launch adds up the chunks and takes the bits at which the sum is
reached. The few tokens of that range are gathered, and one program a row finds the last kept one among them by
bisection; where there are too many, as in a row of equal logits, it walks through the row instead.

    key      |  smaller: kept  |   edge_key    |  larger: removed  |
    id       |                 | <= edge_id |  |

Weights are 1 for top_k and fixed-point probabilities for top_p. All sums are of whole numbers, so the order in
which tokens are gathered does not matter. Radix selection is a textbook algorithm. Knows nothing of draws and
drafts.
"""

import triton.language as tl

from faser.kernels.cuda.triton.common import EXACT, jit, jit_for_any
from faser.kernels.cuda.triton.sampling.fixed_point import (
    is_kept,
    order_keys,
    prob_unit,
    row_sum,
    scaled_logits,
    whole_probs,
)
from faser.kernels.cuda.triton.sampling.workspace import DIGIT_BITS, NUM_LEVELS, SamplingInputs, SamplingWorkspace

_BITS = tl.constexpr(DIGIT_BITS)
_LEVELS = tl.constexpr(NUM_LEVELS)
_NUM_DIGITS = tl.constexpr(2**DIGIT_BITS)
_AT_ONCE = tl.constexpr(4)  # digits; more of them do not fit into registers
_RANGE_BITS = DIGIT_BITS * NUM_LEVELS
_LAST_RANGE = tl.constexpr(2**_RANGE_BITS - 1)
# Of tokens up to a quarter of a nat below the most likely one, by value; of the others, by the key's first bits.
_RANGES_A_NAT = tl.constexpr(1024.0)
_KEY_BITS_A_RANGE = tl.constexpr(14)
_NEAR_RANGES = tl.constexpr(256)
_QUARTER = tl.constexpr(0x3E800000)  # the key of a quarter of a nat
_RANGES_BEFORE = tl.constexpr((0x3E800000 >> 14) - 256)
_NO_KEY = tl.constexpr(0x7FFFFFFF)
_SETTLE_WARPS = 8


@jit
def _ranges(scaled):
    """int32, the number of the range that each scaled logit lies in."""
    keys = order_keys(scaled)
    near = (tl.abs(scaled) * _RANGES_A_NAT).to(tl.int32)
    far = tl.minimum((keys >> _KEY_BITS_A_RANGE) - _RANGES_BEFORE, _LAST_RANGE)
    return tl.where(keys < _QUARTER, near, far)


@jit
def _target(
    kept_prob, row, width, top_k, top_p, BY_PROB: tl.constexpr, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr
):
    """The sum to be reached, int64; 0 where this truncation is off."""
    if BY_PROB:
        share = tl.load(top_p + row)
        total = row_sum(kept_prob, row, NUM_CHUNKS, SPAN)
        wanted = tl.ceil(share * total.to(tl.float64)).to(tl.int64)
        return tl.where(share < 1.0, wanted, wanted * 0)
    wanted = tl.load(top_k + row)
    return tl.where(wanted < width, wanted, wanted * 0)


@jit
def _next_digit(prefix, rest, sums, row, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr):
    """prefix and rest, four bits further. sums: [R, C, 16], by digit, of the tokens that begin with prefix."""
    chunk = tl.arange(0, SPAN)[:, None]
    digit = tl.arange(0, _NUM_DIGITS)
    places = (row * NUM_CHUNKS + chunk) * _NUM_DIGITS + digit[None, :]
    totals = tl.sum(tl.load(sums + places, mask=chunk < NUM_CHUNKS, other=0), 0)
    short = tl.cumsum(totals, 0) < rest
    found = tl.sum(short.to(tl.int32))
    return (prefix << _BITS) | found, rest - tl.sum(tl.where(short, totals, 0))


@jit
def _state(
    prefixes, rests, sums, kept_prob, row, num_rows, width, top_k, top_p,
    level, FIRST: tl.constexpr, BY_PROB: tl.constexpr, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The bits found before this level, and the sum that the tokens with these bits still have to reach.

    Every program of a row finds the same; it is stored for the next level. prefixes, rests: [levels + 1, R].
    """
    if FIRST:
        rest = _target(kept_prob, row, width, top_k, top_p, BY_PROB, NUM_CHUNKS, SPAN)
        prefix = (rest * 0).to(tl.int32)
    else:
        before = (level - 1) * num_rows + row
        prefix, rest = _next_digit(
            tl.load(prefixes + before), tl.load(rests + before), sums, row, NUM_CHUNKS, SPAN
        )
    tl.store(prefixes + level * num_rows + row, prefix)
    tl.store(rests + level * num_rows + row, rest)
    return prefix, rest


@jit
def _first_key(number):
    """The least key of a range; of the number after the last range, one more than all keys."""
    near = (number.to(tl.float32) / _RANGES_A_NAT).to(tl.int32, bitcast=True)
    far = (number + _RANGES_BEFORE) << _KEY_BITS_A_RANGE
    key = tl.where(number < _NEAR_RANGES, near, far)
    return tl.where(number > _LAST_RANGE, _NO_KEY, key)


@jit_for_any("num_rows", "level", "rest_bits")
def _digit_sums(
    logits, stride, width, largest, best, temperature, log_min_p, top_k, top_p, chunk_weight, kept_prob,
    edge_key, edge_id, prefixes, rests, sums, next_sums, num_gathered, num_rows, level, rest_bits,
    FIRST: tl.constexpr, BY_PROB: tl.constexpr, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    is_random = tl.load(temperature + row) > 0
    if (tl.load(best + row) >= 0) & is_random & _is_on(row, width, top_k, top_p, BY_PROB):
        prefix, _ = _state(
            prefixes, rests, sums, kept_prob, row, num_rows, width, top_k, top_p,
            level, FIRST, BY_PROB, NUM_CHUNKS, SPAN,
        )  # fmt: skip
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        scaled = scaled_logits(
            logits + row.to(tl.int64) * stride, columns, width, tl.load(largest + row), tl.load(temperature + row)
        )
        ranges = _ranges(scaled)
        shared = columns < width
        if FIRST:
            tl.store(num_gathered + row, 0)
        else:
            shared = shared & ((ranges >> rest_bits) == prefix)
        if BY_PROB:
            kept = is_kept(
                scaled, columns, width, tl.load(log_min_p + row), tl.load(edge_key + row), tl.load(edge_id + row)
            )
            unit = prob_unit(row_sum(chunk_weight, row, NUM_CHUNKS, SPAN))
            weight = tl.where(shared & kept, whole_probs(scaled, unit), 0)
        else:
            weight = shared.to(tl.int64)
        digits = (ranges >> (rest_bits - _BITS)) & (_NUM_DIGITS - 1)
        place = (row * NUM_CHUNKS + chunk) * _NUM_DIGITS
        for first in tl.static_range(0, _NUM_DIGITS, _AT_ONCE):
            some = first + tl.arange(0, _AT_ONCE)
            counted = tl.where(digits[None, :] == some[:, None], weight[None, :], 0)
            tl.store(next_sums + place + some, tl.sum(counted, 1))


@jit
def _is_on(row, width, top_k, top_p, BY_PROB: tl.constexpr):
    if BY_PROB:
        return tl.load(top_p + row) < 1.0
    wanted = tl.load(top_k + row)
    return (wanted > 0) & (wanted < width)


@jit_for_any("num_rows", "level")
def _gather(
    logits, stride, width, largest, best, temperature, top_k, top_p, kept_prob, prefixes, rests, sums,
    num_gathered, gathered, num_rows, level,
    BY_PROB: tl.constexpr, MOST: tl.constexpr, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gathered [R, MOST] int32: ids of the tokens in the range that is found, in any order, as far as they fit."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    is_random = tl.load(temperature + row) > 0
    if (tl.load(best + row) >= 0) & is_random & _is_on(row, width, top_k, top_p, BY_PROB):
        found, _ = _state(
            prefixes, rests, sums, kept_prob, row, num_rows, width, top_k, top_p,
            level, False, BY_PROB, NUM_CHUNKS, SPAN,
        )  # fmt: skip
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        scaled = scaled_logits(
            logits + row.to(tl.int64) * stride, columns, width, tl.load(largest + row), tl.load(temperature + row)
        )
        within = (_ranges(scaled) == found) & (columns < width)
        count = tl.sum(within.to(tl.int32))
        if count > 0:
            place = tl.atomic_add(num_gathered + row, count) + tl.cumsum(within.to(tl.int32), 0) - 1
            tl.store(gathered + row.to(tl.int64) * MOST + place, columns, mask=within & (place < MOST))


@jit
def _tokens(row, columns, inside, found, logits, stride, width, largest, temperature, unit, BY_PROB: tl.constexpr):
    """Keys and weights of those of these tokens that are in the range `found`; the others weigh nothing.

    Tokens that are not kept so far are weighed too: all of them come after the last one that is looked for.
    """
    start = logits + row.to(tl.int64) * stride
    scaled = scaled_logits(start, tl.where(inside, columns, width), width, largest, temperature)
    within = inside & (columns < width) & (_ranges(scaled) == found)
    keys = tl.where(within, order_keys(scaled), _NO_KEY)
    weights = within.to(tl.int64)
    if BY_PROB:
        weights = tl.where(within, whole_probs(scaled, unit), 0)
    return keys, weights


@jit
def _sums_of_row(
    key, token_id, row, found, logits, stride, width, largest, temperature, unit,
    BY_PROB: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """int64, of the tokens in the range `found`.

    The sum of the weights below the key, that of the key, and how many tokens of the key have ids up to token_id.
    """
    below, tied, count = tl.zeros((1,), tl.int64), tl.zeros((1,), tl.int64), tl.zeros((1,), tl.int64)
    for chunk in range(NUM_CHUNKS):
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        keys, weights = _tokens(
            row, columns, columns < width, found, logits, stride, width, largest, temperature, unit, BY_PROB
        )
        below += tl.sum(tl.where(keys < key, weights, 0))
        tied += tl.sum(tl.where(keys == key, weights, 0))
        count += tl.sum(((keys == key) & (weights > 0) & (columns <= token_id)).to(tl.int64))
    return tl.sum(below), tl.sum(tied), tl.sum(count)


@jit_for_any("num_rows")
def _settle(
    logits, stride, width, largest, best, temperature, top_k, top_p, chunk_weight, prefixes, rests,
    num_gathered, gathered, edge_key, edge_id, num_rows,
    BY_PROB: tl.constexpr, MOST: tl.constexpr, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The edge of a row: the key at which the rest of the sum is reached; of its tokens the lower ids first."""
    row = tl.program_id(0)
    largest_logit, warmth = tl.load(largest + row), tl.load(temperature + row)
    if (tl.load(best + row) >= 0) & (warmth > 0) & _is_on(row, width, top_k, top_p, BY_PROB):
        found = tl.load(prefixes + _LEVELS * num_rows + row)
        rest = tl.load(rests + _LEVELS * num_rows + row)
        unit = prob_unit(row_sum(chunk_weight, row, NUM_CHUNKS, SPAN)) if BY_PROB else warmth
        count = tl.load(num_gathered + row)
        place = tl.arange(0, MOST)
        ids = tl.load(gathered + row.to(tl.int64) * MOST + place, mask=place < count, other=0)
        keys, weights = _tokens(
            row, ids, place < count, found, logits, stride, width, largest_logit, warmth, unit, BY_PROB
        )
        low, high = _first_key(found), _first_key(found + 1) - 1
        if count <= MOST:
            low, high = tl.min(tl.where(weights > 0, keys, _NO_KEY)), tl.max(tl.where(weights > 0, keys, 0))
        while low < high:
            middle = low + (high - low) // 2
            if count <= MOST:
                reached = tl.sum(tl.where(keys <= middle, weights, 0))
            else:
                below, tied, _ = _sums_of_row(
                    middle, width, row, found, logits, stride, width, largest_logit, warmth, unit, BY_PROB,
                    NUM_CHUNKS, BLOCK,
                )  # fmt: skip
                reached = below + tied
            is_reached = reached >= rest
            high = tl.where(is_reached, middle, high)
            low = tl.where(is_reached, low, middle + 1)
        key = low
        if count <= MOST:
            below = tl.sum(tl.where(keys < key, weights, 0))
            tied = tl.sum(tl.where(keys == key, weights, 0))
            ties = tl.sum(((keys == key) & (weights > 0)).to(tl.int64))
        else:
            below, tied, ties = _sums_of_row(
                key, width, row, found, logits, stride, width, largest_logit, warmth, unit, BY_PROB, NUM_CHUNKS,
                BLOCK,
            )  # fmt: skip
        each = tied // tl.maximum(ties, 1)
        wanted = tl.maximum((rest - below + each - 1) // tl.maximum(each, 1), 1)
        first, last = width * 0, width - 1
        while first < last:
            middle = (first + last) // 2
            if count <= MOST:
                there = tl.sum(((keys == key) & (weights > 0) & (ids <= middle)).to(tl.int64))
            else:
                _, _, there = _sums_of_row(
                    key, middle, row, found, logits, stride, width, largest_logit, warmth, unit, BY_PROB,
                    NUM_CHUNKS, BLOCK,
                )  # fmt: skip
            is_there = there >= wanted
            last = tl.where(is_there, middle, last)
            first = tl.where(is_there, first, middle + 1)
        tl.store(edge_key + row, key)
        tl.store(edge_id + row, first)


def find_edges(shaped: SamplingInputs, space: SamplingWorkspace, *, by_prob: bool) -> None:
    """Move the edges of the rows to the last token of top_k (by_prob: of top_p, among the tokens kept so far).

    space: chunk_weight, edge_key and edge_id of the rows; by_prob: chunk_prob of the tokens kept so far. Five
    launches; a program of a row that asks for nothing ends at once.
    """
    grid = (shaped.num_rows, space.num_chunks)
    sizes = {"BY_PROB": by_prob, "NUM_CHUNKS": space.num_chunks, "SPAN": space.span, "BLOCK": space.block}
    row = (shaped.logits, shaped.stride, shaped.width, space.largest, space.best, shaped.rows.temperature)
    cuts = (shaped.rows.top_k, shaped.rows.top_p)
    for level in range(NUM_LEVELS):
        sums, next_sums = space.digit_sums[(level + 1) % 2], space.digit_sums[level % 2]
        _digit_sums[grid](
            *row, shaped.rows.log_min_p, *cuts, space.chunk_weight, space.chunk_prob, space.edge_key,
            space.edge_id, space.prefixes, space.rests, sums, next_sums, space.num_gathered, shaped.num_rows,
            level, _RANGE_BITS - level * DIGIT_BITS, FIRST=level == 0, **sizes, **EXACT,
        )  # fmt: skip
    last, most = space.digit_sums[(NUM_LEVELS + 1) % 2], space.most_gathered
    _gather[grid](
        *row, *cuts, space.chunk_prob, space.prefixes, space.rests, last, space.num_gathered, space.gathered,
        shaped.num_rows, NUM_LEVELS, MOST=most, **sizes, **EXACT,
    )  # fmt: skip
    _settle[(shaped.num_rows,)](
        *row, *cuts, space.chunk_weight, space.prefixes, space.rests, space.num_gathered, space.gathered,
        space.edge_key, space.edge_id, shaped.num_rows, MOST=most, **sizes,
        num_warps=_SETTLE_WARPS, **EXACT,
    )  # fmt: skip
