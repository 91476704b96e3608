"""The last token that top_k and top_p keep, found without sorting the vocabulary.

The order is by likelihood, among equals by id (engine/execution/sampling/ranking.py). Its keys are numbers of 31
bits; the key of the last kept token is found from the top, four bits at a time. Of the tokens that share the bits
found so far, each launch sums the weights by their next four bits; the next launch adds up the chunks and takes
the bits at which the sum is reached. Tokens with exactly the key that is found are counted, by id:

    key      |  smaller: kept  |   edge_key    |  larger: removed  |
    id       |                 | <= edge_id |  |

Weights are 1 for top_k and fixed-point probabilities for top_p. Radix selection is a textbook algorithm. Knows
nothing of draws and drafts.
"""

import triton.language as tl

from faser.kernels.cuda.triton.common.tensors import EXACT, jit, jit_for_any
from faser.kernels.cuda.triton.sampling.fixed_point import (
    is_kept,
    order_keys,
    prob_unit,
    row_sum,
    scaled_logits,
    whole_probs,
)
from faser.kernels.cuda.triton.sampling.workspace import SamplingInputs, SamplingWorkspace

DIGIT_BITS = 4
NUM_LEVELS = 8  # of 32 bits, of which the first is always 0

_BITS = tl.constexpr(DIGIT_BITS)
_LEVELS = tl.constexpr(NUM_LEVELS)
_NUM_DIGITS = tl.constexpr(2**DIGIT_BITS)
_AT_ONCE = tl.constexpr(4)  # digits; more of them do not fit into registers
_KEY_BITS = DIGIT_BITS * NUM_LEVELS


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

    Every program of a row finds the same; it is stored for the next level. prefixes, rests: [9, R].
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


@jit_for_any("num_rows", "level", "rest_bits")
def _digit_sums(
    logits, stride, width, largest, best, temperature, log_min_p, top_k, top_p, chunk_weight, kept_prob,
    edge_key, edge_id, prefixes, rests, sums, next_sums, num_rows, level, rest_bits,
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
        keys = order_keys(scaled)
        shared = columns < width
        if not FIRST:
            shared = shared & ((keys >> rest_bits) == prefix)
        if BY_PROB:
            kept = is_kept(
                scaled, columns, width, tl.load(log_min_p + row), tl.load(edge_key + row), tl.load(edge_id + row)
            )
            unit = prob_unit(row_sum(chunk_weight, row, NUM_CHUNKS, SPAN))
            weight = tl.where(shared & kept, whole_probs(scaled, unit), 0)
        else:
            weight = shared.to(tl.int64)
        digits = (keys >> (rest_bits - _BITS)) & (_NUM_DIGITS - 1)
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
def _count_ties(
    logits, stride, width, largest, best, temperature, top_k, top_p, kept_prob, prefixes, rests, sums, chunk_ties,
    num_rows, level,
    BY_PROB: tl.constexpr, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """chunk_ties [R, C] int64: tokens with exactly the key that is found."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    is_random = tl.load(temperature + row) > 0
    if (tl.load(best + row) >= 0) & is_random & _is_on(row, width, top_k, top_p, BY_PROB):
        key, _ = _state(
            prefixes, rests, sums, kept_prob, row, num_rows, width, top_k, top_p,
            level, False, BY_PROB, NUM_CHUNKS, SPAN,
        )  # fmt: skip
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        scaled = scaled_logits(
            logits + row.to(tl.int64) * stride, columns, width, tl.load(largest + row), tl.load(temperature + row)
        )
        tied = (order_keys(scaled) == key) & (columns < width)
        tl.store(chunk_ties + row * NUM_CHUNKS + chunk, tl.sum(tied.to(tl.int64)))


@jit_for_any("num_rows")
def _settle(
    logits, stride, width, largest, best, temperature, top_k, top_p, chunk_weight, prefixes, rests, chunk_ties,
    edge_key, edge_id, num_rows,
    BY_PROB: tl.constexpr, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The edge of a row: among the tokens with its key, the rest of the sum takes the lower ids first."""
    row = tl.program_id(0)
    most, warmth = tl.load(largest + row), tl.load(temperature + row)
    if (tl.load(best + row) >= 0) & (warmth > 0) & _is_on(row, width, top_k, top_p, BY_PROB):
        key = tl.load(prefixes + _LEVELS * num_rows + row)
        wanted = tl.load(rests + _LEVELS * num_rows + row)
        if BY_PROB:
            scaled = (tl.zeros((1,), tl.int32) + key).to(tl.float32, bitcast=True) * -1.0
            unit = prob_unit(row_sum(chunk_weight, row, NUM_CHUNKS, SPAN))
            each = tl.max(whole_probs(scaled, unit))
            wanted = (wanted + each - 1) // each
        ties = _loaded(chunk_ties, row, NUM_CHUNKS, SPAN)
        before = tl.cumsum(ties, 0) < wanted
        chunk = tl.sum(before.to(tl.int32))
        wanted = wanted - tl.sum(tl.where(before, ties, 0))
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = scaled_logits(logits + row.to(tl.int64) * stride, columns, width, most, warmth)
        tied = (order_keys(inside) == key) & (columns < width)
        short = tl.cumsum(tied.to(tl.int64), 0) < wanted
        old_key, old_id = tl.load(edge_key + row), tl.load(edge_id + row)
        found = chunk * BLOCK + tl.sum(short.to(tl.int32))
        nearer = (key < old_key) | ((key == old_key) & (found < old_id))
        tl.store(edge_key + row, tl.where(nearer, key, old_key))
        tl.store(edge_id + row, tl.where(nearer, found, old_id))


@jit
def _loaded(chunks, row, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr):
    chunk = tl.arange(0, SPAN)
    return tl.load(chunks + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=0)


def find_edges(shaped: SamplingInputs, space: SamplingWorkspace, *, by_prob: bool) -> None:
    """Move the edges of the rows to the last token of top_k (by_prob: of top_p, among the tokens kept so far).

    space: chunk_weight, edge_key and edge_id of the rows; by_prob: chunk_prob of the tokens kept so far. Nine
    launches and one for the ids; a program of a row that asks for nothing ends at once.
    """
    grid = (shaped.num_rows, space.num_chunks)
    sizes = {"BY_PROB": by_prob, "NUM_CHUNKS": space.num_chunks, "SPAN": space.span, "BLOCK": space.block}
    row = (shaped.logits, shaped.stride, shaped.width, space.largest, space.best, shaped.rows.temperature)
    cuts = (shaped.rows.top_k, shaped.rows.top_p)
    for level in range(NUM_LEVELS):
        sums, next_sums = space.digit_sums[(level + 1) % 2], space.digit_sums[level % 2]
        _digit_sums[grid](
            *row, shaped.rows.log_min_p, *cuts, space.chunk_weight, space.chunk_prob, space.edge_key,
            space.edge_id, space.prefixes, space.rests, sums, next_sums, shaped.num_rows, level,
            _KEY_BITS - level * DIGIT_BITS, FIRST=level == 0, **sizes, **EXACT,
        )  # fmt: skip
    last = space.digit_sums[(NUM_LEVELS + 1) % 2]
    _count_ties[grid](
        *row, *cuts, space.chunk_prob, space.prefixes, space.rests, last, space.chunk_ties, shaped.num_rows,
        NUM_LEVELS, **sizes, **EXACT,
    )  # fmt: skip
    _settle[(shaped.num_rows,)](
        *row, *cuts, space.chunk_weight, space.prefixes, space.rests, space.chunk_ties, space.edge_key,
        space.edge_id, shaped.num_rows, **sizes, **EXACT,
    )  # fmt: skip
