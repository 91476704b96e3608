"""Gated delta nets on a GPU: chunks of interface/delta_net.py as products of small matrices, in three launches.

    convolve   queries, keys and values of the step's rows: a convolution, silu, norms
    chunks     what each value head mixes; a program has some channels of one head of one sequence
    finish     norm and gate of what was mixed; the rows are kept, for which all others have been read by then

`chunks` goes through whole chunks from the state that is kept, of which the first rows may be kept ones:

    chunk     | kept kept kept new new ... new |  new ... new  |  new new  -   -   - |
    state     S                                S'              S''
                                               '-- the last one that may not be refused is stored

Of a chunk's rows, with decays g, let G be their running sum, E[i, j] = exp(G[i] - G[j]) for j <= i and else 0. The
changes U of the state, [CHUNK, Dv], are the solution of a triangular system, and give outputs and the next state:

    U[i] + β[i] sum over j < i of E[i, j] (k[i] · k[j]) U[j]  =  β[i] (v[i] - exp(G[i]) Sᵀ k[i])
    O = diag(exp(G)) Q S + (E ∘ Q Kᵀ) U        S' = exp(G[last]) S + (diag(exp(G[last] - G)) K)ᵀ U

Rows that are not there have β = 0 and g = 0, which changes nothing. A chunk is computed from the same numbers in
the same order whichever step brought its rows, so a state after whole chunks has the same bits. Source: Yang et
al., arXiv:2412.06464, section 3.3.
"""

import torch
import triton.language as tl
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.triton.common import EXACT, expect, expect_lines, jit, jit_for_any, next_power_of_2
from faser.kernels.interface.delta_net import NORM_EPS, DeltaNet
from faser.kernels.interface.mixers import CHUNK, NUMBERS, LayerStates

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = range(16, 257, 16)  # a matrix that tl.dot takes has sides of 16 at least
_VALUES = 32  # channels of a value head that a program has; of 64 it has too few registers
_NORM_EPS = tl.constexpr(NORM_EPS)
_CHUNK = tl.constexpr(CHUNK)
_PRECISION = tl.constexpr("tf32")  # of products' factors: 10 bits; sums and all else are float32


@jit
def _sequence_of(row, first_rows, num_sequences, SEQUENCES: tl.constexpr):
    """The last sequence that begins at this row or before it."""
    number = tl.arange(0, SEQUENCES)
    begins = tl.load(first_rows + number, mask=number < num_sequences, other=1 << 62)
    return tl.sum((begins <= row).to(tl.int32)) - 1


@jit
def _rates_of(rates, row, decay, dt_bias, head, NUM_HEADS: tl.constexpr, inside):
    """β and g of rows and a head, float32; 0 outside."""
    b = tl.load(rates + row * 2 * NUM_HEADS + head, mask=inside, other=0.0)
    slow = tl.load(rates + row * 2 * NUM_HEADS + NUM_HEADS + head, mask=inside, other=0.0) + tl.load(
        dt_bias + head
    )
    soft = tl.where(slow > 20.0, slow, tl.log(1.0 + tl.exp(tl.minimum(slow, 20.0))))
    beta = tl.where(inside, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    return beta, tl.where(inside, tl.load(decay + head) * soft, 0.0)


@jit_for_any("num_sequences", "step_stride")
def _convolve(
    qkv, stride, numbers, step_stride, num_sequences, inputs, conv, convolved, scale,
    NUM_INPUTS: tl.constexpr, KERNEL: tl.constexpr, K_HEADS: tl.constexpr, K_DIM: tl.constexpr,
    V_HEADS: tl.constexpr, V_DIM: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of queries, keys or values of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = _sequence_of(row, numbers + 5 * step_stride, num_sequences, SEQUENCES)
    place = numbers + sequence
    slot, start, count = tl.load(place), tl.load(place + 2 * step_stride), tl.load(place + 3 * step_stride)
    at = row - tl.load(place + 5 * step_stride)
    if at < count:
        channels: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
        of_values = head >= 2 * K_HEADS
        begin = tl.where(of_values, 2 * K_HEADS * K_DIM + (head - 2 * K_HEADS) * V_DIM, head * K_DIM)
        offset = tl.arange(0, BLOCK)
        inside = offset < tl.where(of_values, V_DIM, K_DIM)
        channel = begin + offset
        mixed = tl.zeros((BLOCK,), dtype=tl.float32)
        for tap in tl.static_range(KERNEL):
            before = at - KERNEL + 1 + tap  # of the sequence's rows; below 0: of an earlier step
            position = start + before
            kept = inputs + (slot * NUM_INPUTS + (position + NUM_INPUTS) % NUM_INPUTS) * channels + channel
            new = qkv + (row - KERNEL + 1 + tap) * stride + channel
            earlier = tl.load(kept, mask=inside & (before < 0) & (position >= 0), other=0.0)
            own = tl.load(new, mask=inside & (before >= 0), other=0.0)
            weight = tl.load(conv + tap * channels + channel, mask=inside, other=0.0)
            mixed += (earlier.to(tl.float32) + own.to(tl.float32)) * weight
        mixed = mixed / (1.0 + tl.exp(-mixed))
        if head < 2 * K_HEADS:
            mixed = mixed * (1.0 / tl.sqrt(tl.sum(mixed * mixed) + _NORM_EPS))
        if head < K_HEADS:
            mixed = mixed * scale
        tl.store(convolved + row * channels + channel, mixed, mask=inside)


@jit_for_any("step_stride")
def _chunks(
    convolved, rates, decay, dt_bias, numbers, step_stride, states, kept_keys, kept_values, kept_rates, mixed,
    NUM_KEPT: tl.constexpr, K_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_HEADS: tl.constexpr,
    V_DIM: tl.constexpr, TILED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The rows of one sequence, and of one value head BLOCK_V channels."""
    place, head = numbers + tl.program_id(0), tl.program_id(1)
    slot, end, start = tl.load(place), tl.load(place + step_stride), tl.load(place + 2 * step_stride)
    last = start + tl.load(place + 3 * step_stride)
    new_end, first = tl.load(place + 4 * step_stride), tl.load(place + 5 * step_stride)
    channels: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    k_head = head % K_HEADS if TILED else head // (V_HEADS // K_HEADS)
    k_channel = tl.arange(0, BLOCK_K)
    v_channel = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    of_key, of_value = k_channel < K_DIM, v_channel < V_DIM
    number = tl.arange(0, _CHUNK)
    in_state = states + ((slot * V_HEADS + head) * K_DIM + k_channel[:, None]) * V_DIM + v_channel[None, :]
    whole = of_key[:, None] & of_value[None, :]
    state = tl.load(in_state, mask=whole & (end > 0), other=0.0)
    for begin in range(end, last, _CHUNK):
        position = begin + number
        known, new = position < start, (position >= start) & (position < last)
        row = first + position - start
        kept = slot * NUM_KEPT + position % NUM_KEPT
        at_row, at_kept = (row * channels)[:, None], kept[:, None]
        channel = (k_head * K_DIM + k_channel)[None, :]
        queries = tl.load(convolved + at_row + channel, mask=new[:, None] & of_key[None, :], other=0.0)
        keys = tl.load(
            convolved + at_row + K_HEADS * K_DIM + channel, mask=new[:, None] & of_key[None, :], other=0.0
        ) + tl.load(
            kept_keys + at_kept * K_HEADS * K_DIM + channel, mask=known[:, None] & of_key[None, :], other=0.0
        )
        channel = (head * V_DIM + v_channel)[None, :]
        values = tl.load(
            convolved + at_row + 2 * K_HEADS * K_DIM + channel, mask=new[:, None] & of_value[None, :], other=0.0
        ) + tl.load(
            kept_values + at_kept * V_HEADS * V_DIM + channel, mask=known[:, None] & of_value[None, :], other=0.0
        )
        beta, decays = _rates_of(rates, row, decay, dt_bias, head, V_HEADS, new)
        beta += tl.load(kept_rates + kept * 2 * V_HEADS + head, mask=known, other=0.0)
        decays += tl.load(kept_rates + kept * 2 * V_HEADS + V_HEADS + head, mask=known, other=0.0)
        total = tl.cumsum(decays, 0)
        not_later = number[:, None] >= number[None, :]
        between = tl.where(not_later, tl.exp(tl.where(not_later, total[:, None] - total[None, :], 0.0)), 0.0)
        along = tl.exp(total)[:, None]
        changes = beta[:, None] * (values - along * tl.dot(keys, state, input_precision=_PRECISION))
        coupled = tl.dot(keys, tl.trans(keys), input_precision=_PRECISION) * between * beta[:, None]
        for solved in range(1, _CHUNK):
            is_row = number == solved
            weights = tl.sum(tl.where(is_row[:, None] & (number < solved)[None, :], coupled, 0.0), 0)
            change = tl.sum(weights[:, None] * changes, 0)
            changes = tl.where(is_row[:, None], changes - change[None, :], changes)
        scores = tl.dot(queries, tl.trans(keys), input_precision=_PRECISION) * between
        found = along * tl.dot(queries, state, input_precision=_PRECISION)
        found += tl.dot(scores, changes, input_precision=_PRECISION)
        out = mixed + (row * V_HEADS + head)[:, None] * V_DIM + v_channel[None, :]
        tl.store(out, found, mask=new[:, None] & of_value[None, :])
        left = tl.sum(decays, 0)
        faded = keys * tl.exp(left - total)[:, None]
        state = tl.exp(left) * state + tl.dot(tl.trans(faded), changes, input_precision=_PRECISION)
        if begin + _CHUNK == new_end:
            tl.store(in_state, state, mask=whole)


@jit_for_any("num_sequences", "step_stride")
def _finish(
    qkv, stride, rates, decay, dt_bias, convolved, mixed, norm, eps, numbers, step_stride, num_sequences,
    inputs, kept_keys, kept_values, kept_rates, out, out_stride,
    NUM_INPUTS: tl.constexpr, NUM_KEPT: tl.constexpr, K_HEADS: tl.constexpr, K_DIM: tl.constexpr,
    V_HEADS: tl.constexpr, V_DIM: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One row of one value head; the first heads also keep the row's keys and queries."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = _sequence_of(row, numbers + 5 * step_stride, num_sequences, SEQUENCES)
    place = numbers + sequence
    slot, start, count = tl.load(place), tl.load(place + 2 * step_stride), tl.load(place + 3 * step_stride)
    at = row - tl.load(place + 5 * step_stride)
    if at < count:
        channels: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
        k_channel, v_channel = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
        of_key, of_value = k_channel < K_DIM, v_channel < V_DIM
        found = tl.load(mixed + (row * V_HEADS + head) * V_DIM + v_channel, mask=of_value, other=0.0)
        factor = 1.0 / tl.sqrt(tl.sum(found * found) / V_DIM + eps)
        z = tl.load(qkv + row * stride + channels + head * V_DIM + v_channel, mask=of_value, other=0.0).to(
            tl.float32
        )
        weight = tl.load(norm + v_channel, mask=of_value, other=0.0)
        gated = found * factor * weight * (z / (1.0 + tl.exp(-z)))
        target = out + row * out_stride + head * V_DIM + v_channel
        tl.store(target, gated.to(out.dtype.element_ty), mask=of_value)
        position, later = start + at, count - 1 - at
        kept = slot * NUM_KEPT + position % NUM_KEPT
        if later < NUM_KEPT:
            beta, decays = _rates_of(rates, row, decay, dt_bias, head, V_HEADS, at >= 0)
            tl.store(kept_rates + kept * 2 * V_HEADS + head, beta)
            tl.store(kept_rates + kept * 2 * V_HEADS + V_HEADS + head, decays)
            values = convolved + row * channels + 2 * K_HEADS * K_DIM + head * V_DIM + v_channel
            kept_value = kept_values + (kept * V_HEADS + head) * V_DIM + v_channel
            tl.store(kept_value, tl.load(values, mask=of_value), mask=of_value)
            if head < K_HEADS:
                keys = convolved + row * channels + (K_HEADS + head) * K_DIM + k_channel
                kept_key = kept_keys + (kept * K_HEADS + head) * K_DIM + k_channel
                tl.store(kept_key, tl.load(keys, mask=of_key), mask=of_key)
        if later < NUM_INPUTS:
            source = qkv + row * stride
            kept_input = inputs + (slot * NUM_INPUTS + position % NUM_INPUTS) * channels
            channel = 2 * K_HEADS * K_DIM + head * V_DIM + v_channel
            tl.store(kept_input + channel, tl.load(source + channel, mask=of_value), mask=of_value)
            if head < K_HEADS:
                query = head * K_DIM + k_channel
                key = query + K_HEADS * K_DIM
                tl.store(kept_input + query, tl.load(source + query, mask=of_key), mask=of_key)
                tl.store(kept_input + key, tl.load(source + key, mask=of_key), mask=of_key)


def delta_net(qkv: Tensor, rates: Tensor, net: DeltaNet, held: LayerStates, numbers: Tensor, out: Tensor) -> None:
    """Compute Backend.mix of a delta net. held: the layer's states. numbers: [NUMBERS, S] int64: see StateStep.

    qkv: [R, shape.columns] float32, bfloat16 or float16; out: [R, Hv Dv] of its type; rates: [R, 2 Hv] float32,
    contiguous. Rows of no sequence are padding: nothing of them is kept, and what they give is arbitrary.
    Raises EngineError that names the tensor that does not fit, or a head outside HEAD_DIMS.
    """
    shape, (keys, values, kept_rates) = net.shape, held.rows
    for dim in (shape.k_head_dim, shape.v_head_dim):
        if dim not in HEAD_DIMS:
            raise EngineError(f"a head has {dim} channels; the kernels of delta nets take {HEAD_DIMS}")
    rows, num_sequences = len(qkv), numbers.shape[1]
    expect_lines("qkv", qkv, (rows, shape.columns), *_TYPES, like=held.state)
    expect("rates", rates, (rows, 2 * shape.num_v_heads), torch.float32, like=qkv)
    expect_lines("out", out, (rows, shape.q_size), qkv.dtype, like=qkv)
    expect_lines("numbers", numbers, (NUMBERS, num_sequences), torch.int64, like=qkv)
    expect("inputs", held.inputs, (*held.inputs.shape[:2], shape.channels), qkv.dtype, like=qkv)
    if not rows:
        return
    convolved = torch.empty((rows, shape.channels), dtype=torch.float32, device=qkv.device)
    mixed = torch.empty((rows, shape.q_size), dtype=torch.float32, device=qkv.device)
    heads = {
        "K_HEADS": shape.num_k_heads, "K_DIM": shape.k_head_dim, "V_HEADS": shape.num_v_heads,
        "V_DIM": shape.v_head_dim,
    }  # fmt: skip
    block_k, block_v = next_power_of_2(shape.k_head_dim), next_power_of_2(shape.v_head_dim)
    sequences, stride = next_power_of_2(max(num_sequences, len(held.state))), numbers.stride(0)
    num_inputs, num_kept = held.inputs.shape[1], keys.shape[1]
    _convolve[(rows, 2 * shape.num_k_heads + shape.num_v_heads)](
        qkv, qkv.stride(0), numbers, stride, num_sequences, held.inputs, net.conv, convolved,
        shape.k_head_dim**-0.5, NUM_INPUTS=num_inputs, KERNEL=shape.kernel, SEQUENCES=sequences,
        BLOCK=max(block_k, block_v), num_warps=1, **heads, **EXACT,
    )  # fmt: skip
    piece = min(block_v, _VALUES)
    _chunks[(num_sequences, shape.num_v_heads, -(-shape.v_head_dim // piece))](
        convolved, rates, net.decay, net.dt_bias, numbers, stride, held.state, keys, values, kept_rates,
        mixed, NUM_KEPT=num_kept, TILED=shape.tiled, BLOCK_K=block_k, BLOCK_V=piece, num_warps=4, **heads,
        **EXACT,
    )  # fmt: skip
    _finish[(rows, shape.num_v_heads)](
        qkv, qkv.stride(0), rates, net.decay, net.dt_bias, convolved, mixed, net.norm, net.eps, numbers, stride,
        num_sequences, held.inputs, keys, values, kept_rates, out, out.stride(0),
        NUM_INPUTS=num_inputs, NUM_KEPT=num_kept, SEQUENCES=sequences, BLOCK_K=block_k, BLOCK_V=block_v,
        num_warps=1, **heads, **EXACT,
    )  # fmt: skip
