"""From a logit to its fixed-point probability, within kernels.

The arithmetic of engine/execution/sampling/distribution.py, bit for bit. Weights are exp(scaled) by single float32
operations, none of them fused; fixed-point probabilities are whole numbers of units of 2**-52, summed as int64, so
that neither the order of sums nor the division into chunks can matter.

    row          | chunk 0 | chunk 1 | ... |     a program has one chunk of one row and stores what it finds;
    stored       |   [R, C] of each chunk  |     the programs of the next launch add it up

Knows nothing of drafts. Launches that use these functions need tensors.EXACT.
"""

import triton.language as tl

from faser.kernels.cuda.triton.common import jit
from faser.types.arrays import NO_TOKEN

NOTHING = tl.constexpr(float("-inf"))
NO_ID = tl.constexpr(NO_TOKEN)
_LOWEST = tl.constexpr(-60.0)  # nats; a token that far below the most likely one has a probability of 0
_LOG2_E = tl.constexpr(1.44269504)
_LN2_HIGH = tl.constexpr(0.693145751953125)  # two parts of 16 bits: their products with an exponent are exact
_LN2_LOW = tl.constexpr(49087 * 2.0**-35)
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
_WEIGHT_ONE = tl.constexpr(2.0**32)
_PROB_TIMES_WEIGHT_ONE = tl.constexpr(2.0**84)
PROB_ONE = tl.constexpr(2**52)
_SIGN_OFF = tl.constexpr(0x7FFFFFFF)


@jit
def scaled_logits(row, columns, width, largest, temperature):
    """(logit - largest) / temperature, float32, at most 0; -inf past the width. row: where the row begins."""
    logits = tl.load(row + columns, mask=columns < width, other=NOTHING)
    return tl.div_rn(logits - largest, tl.zeros_like(logits) + temperature)


@jit
def weights(scaled):
    """exp(scaled), float32: engine/execution/sampling/distribution.py, _weights."""
    nats = tl.where(scaled > _LOWEST, scaled, _LOWEST)
    shifted = nats * _LOG2_E + _MAGIC
    exponent = shifted - _MAGIC
    part = (nats - exponent * _LN2_HIGH) - exponent * _LN2_LOW
    power = part * 8.312521e-3 + 4.189016e-2
    power = power * part + 0.16667114
    power = power * part + 0.4999923
    power = power * part + 1.0
    power = power * part + 1.0
    bits = power.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True)


@jit
def whole_weights(scaled):
    """Weights in units of 2**-32, int64, rounded down."""
    return tl.floor(weights(scaled) * _WEIGHT_ONE).to(tl.int64)


@jit
def prob_unit(total_weight):
    """float32, the fixed-point probability of a weight of 1. total_weight: of the row's whole weights."""
    total = total_weight.to(tl.float64)
    return ((total * 0.0 + _PROB_TIMES_WEIGHT_ONE) / total).to(tl.float32)


@jit
def whole_probs(scaled, unit):
    """Fixed-point probabilities, int64."""
    return tl.floor(weights(scaled) * unit).to(tl.int64)


@jit
def order_keys(scaled):
    """int32 from 0 up, the more likely the smaller: for numbers up to 0 the bits after the sign are in order."""
    return scaled.to(tl.int32, bitcast=True) & _SIGN_OFF


@jit
def is_kept(scaled, columns, width, log_min_p, edge_key, edge_id):
    """Return which tokens the truncation keeps. edge_key, edge_id: the last one that top_k and top_p keep."""
    key = order_keys(scaled)
    within = (key < edge_key) | ((key == edge_key) & (columns <= edge_id))
    return within & (scaled >= log_min_p) & (columns < width)


@jit
def row_sum(chunks, row, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr):
    """Sum of the numbers that the row's chunks stored, int64. SPAN: the power of 2 from NUM_CHUNKS up."""
    chunk = tl.arange(0, SPAN)
    return tl.sum(tl.load(chunks + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=0))


@jit
def kept_probs(
    row, columns, logits, stride, width, largest, temperature, log_min_p, chunk_weight, edge_key, edge_id,
    NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """int64, of columns of a row with a temperature: 0 where the truncation removes a token."""
    start = logits + row.to(tl.int64) * stride
    scaled = scaled_logits(start, columns, width, tl.load(largest + row), tl.load(temperature + row))
    edge = (tl.load(edge_key + row), tl.load(edge_id + row))
    kept = is_kept(scaled, columns, width, tl.load(log_min_p + row), edge[0], edge[1])
    unit = prob_unit(row_sum(chunk_weight, row, NUM_CHUNKS, SPAN))
    return tl.where(kept, whole_probs(scaled, unit), 0)
