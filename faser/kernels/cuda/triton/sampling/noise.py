"""Random words on the device: a function of (request seed, position, purpose, draft start), and of nothing else.

The same bits as engine/execution/sampling/parameters.py, which defines the generator, the layout of its counter
and the purposes; and the numbers made of a word, by which tokens race, as kernels/interface/sampling.py defines
them. Launches that use `arrivals` need common.EXACT.
"""

import struct

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.triton.common import expect, jit

TOKEN, ACCEPT, REPLACE, DRAFT = 0, 1, 2, 3  # engine/execution/sampling/parameters.py, Purpose

_BLOCK = 128
_ROUNDS = tl.constexpr(10)
_FIRST_MULTIPLIER = tl.constexpr(0xD2511F53)
_SECOND_MULTIPLIER = tl.constexpr(0xCD9E8D57)
_FIRST_KEY_STEP = tl.constexpr(0x9E3779B9)
_SECOND_KEY_STEP = tl.constexpr(0xBB67AE85)
_LOW_32 = tl.constexpr(0xFFFFFFFF)
_UNIT_53 = tl.constexpr(2.0**-53)
_RACE = tl.constexpr(4)
_HALF_ROOT_BITS = tl.constexpr(0x3FE6A09E667F3BCD)


def _bits(number: float) -> tl.constexpr:
    """Return the bits of a float64, whose constants Triton may round to float32."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return tl.constexpr(bits)


_MINUS_LN_2 = _bits(-0.6931471805599453)
_NUMBER_17, _NUMBER_15, _NUMBER_13, _NUMBER_11 = (_bits(1.0 / each) for each in (17, 15, 13, 11))
_NUMBER_9, _NUMBER_7, _NUMBER_5, _NUMBER_3 = (_bits(1.0 / each) for each in (9, 7, 5, 3))


@jit
def _philox(x0, x1, x2, x3, first, second):
    """Philox4x32-10, uint64 words of 32 bits: Salmon et al., SC 2011, section 4.3."""
    for _ in tl.static_range(_ROUNDS):
        a = x0 * _FIRST_MULTIPLIER
        b = x2 * _SECOND_MULTIPLIER
        x0 = (b >> 32) ^ x1 ^ first
        x1 = b & _LOW_32
        x2 = (a >> 32) ^ x3 ^ second
        x3 = a & _LOW_32
        first = (first + _FIRST_KEY_STEP) & _LOW_32
        second = (second + _SECOND_KEY_STEP) & _LOW_32
    return x0, x1, x2, x3


@jit
def noise_word(seed, position, purpose, draft_start):
    """uint64. All int64 and of one shape; seed: the bits of an unsigned number."""
    low = tl.full(position.shape, _LOW_32, tl.uint64)
    key = seed.to(tl.uint64, bitcast=True)
    place = position.to(tl.uint64)
    x0, x1, _, _ = _philox(
        place & low, place >> 32, purpose.to(tl.uint64), draft_start.to(tl.uint64) & low, key & low, key >> 32
    )
    return (x0 << 32) | x1


@jit
def row_word(source, positions, row, GIVEN: tl.constexpr):
    """uint64, the word that decides a row's token. source: [R] int64 seeds; GIVEN: [R] int64, the words' bits."""
    if GIVEN:
        return tl.load(source + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row)
    return noise_word(tl.load(source + row), position, position * 0, position * 0)


@jit
def arrivals(word, at):
    """float64, the numbers `at` of a word: `arrivals` of kernels/interface/sampling.py. at: int32."""
    nothing = (at * 0).to(tl.uint64)
    low = nothing + _LOW_32
    x0, x1, x2, x3 = _philox(
        (at // 2).to(tl.uint64), nothing, nothing + _RACE, nothing, (nothing + word) & low, (nothing + word) >> 32
    )
    bits = tl.where(at % 2 == 0, (x0 << 32) | x1, (x2 << 32) | x3) >> 12
    one = nothing.to(tl.float64) + 1.0
    share = ((bits | one.to(tl.uint64, bitcast=True)).to(tl.float64, bitcast=True) - one) + _UNIT_53
    return _minus_log(share)


@jit
def _number(like, BITS: tl.constexpr):
    """float64 of these bits, in the shape of a float64."""
    return (tl.zeros_like(like).to(tl.int64) + BITS).to(tl.float64, bitcast=True)


@jit
def _minus_log(share):
    bits = share.to(tl.int64, bitcast=True)
    exponent = (bits - _HALF_ROOT_BITS) >> 52
    mantissa = (bits - (exponent << 52)).to(tl.float64, bitcast=True)
    part = (mantissa - 1.0) / (mantissa + 1.0)
    square = part * part
    series = square * _number(share, _NUMBER_17) + _number(share, _NUMBER_15)
    series = series * square + _number(share, _NUMBER_13)
    series = series * square + _number(share, _NUMBER_11)
    series = series * square + _number(share, _NUMBER_9)
    series = series * square + _number(share, _NUMBER_7)
    series = series * square + _number(share, _NUMBER_5)
    series = series * square + _number(share, _NUMBER_3)
    series = series * square + 1.0
    return exponent.to(tl.float64) * _number(share, _MINUS_LN_2) - (part + part) * series


@jit
def _uniforms(seeds, positions, draft_starts, out, purpose, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    position = tl.load(positions + i, mask=inside, other=0)
    word = noise_word(
        tl.load(seeds + i, mask=inside, other=0),
        position,
        tl.zeros_like(position) + purpose,
        tl.load(draft_starts + i, mask=inside, other=0),
    )
    tl.store(out + i, (word >> 11).to(tl.float64) * _UNIT_53, mask=inside)


def uniforms(seeds: Tensor, positions: Tensor, purpose: int, draft_starts: Tensor, out: Tensor) -> Tensor:
    """out [N] float64: a number for each row, see uniforms in engine/execution/sampling/parameters.py.

    seeds: [N] int64, the bits of the requests' uint64 seeds. positions: [N] int64, of the tokens decided on.
    draft_starts: [N] int64; zeros unless the purpose is DRAFT or ACCEPT. One device. Raises EngineError.
    """
    for name, each in (("seeds", seeds), ("positions", positions), ("draft_starts", draft_starts)):
        expect(name, each, (len(seeds),), torch.int64, like=seeds)
    expect("out", out, (len(seeds),), torch.float64, like=seeds)
    if len(seeds):
        grid = (-(-len(seeds) // _BLOCK),)
        _uniforms[grid](seeds, positions, draft_starts, out, purpose, len(seeds), BLOCK=_BLOCK)
    return out
