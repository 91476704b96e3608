"""Random numbers on the device: a function of (request seed, position, purpose, draft start), and of nothing else.

The same bits as engine/execution/sampling/parameters.py, which defines the generator, the layout of its counter
and the purposes. Knows nothing of tokens.
"""

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


@jit
def uniform(seed, position, purpose, draft_start):
    """float64 in [0, 1), a multiple of 2**-53. All int64 and of one shape; seed: the bits of an unsigned number.

    Philox4x32-10, of whose four words two are used: Salmon et al., SC 2011, section 4.3.
    """
    low = tl.full(position.shape, _LOW_32, tl.uint64)
    x0 = position.to(tl.uint64) & low
    x1 = position.to(tl.uint64) >> 32
    x2 = purpose.to(tl.uint64)
    x3 = draft_start.to(tl.uint64) & low
    first = seed.to(tl.uint64, bitcast=True) & low
    second = seed.to(tl.uint64, bitcast=True) >> 32
    for _ in tl.static_range(_ROUNDS):
        a = x0 * _FIRST_MULTIPLIER
        b = x2 * _SECOND_MULTIPLIER
        x0 = (b >> 32) ^ x1 ^ first
        x1 = b & low
        x2 = (a >> 32) ^ x3 ^ second
        x3 = a & low
        first = (first + _FIRST_KEY_STEP) & low
        second = (second + _SECOND_KEY_STEP) & low
    return (((x0 << 32) | x1) >> 11).to(tl.float64) * _UNIT_53


@jit
def row_number(source, positions, row, GIVEN: tl.constexpr):
    """float64, the number that decides a row's token. source: [R] int64 seeds; GIVEN: [R] float64 numbers."""
    if GIVEN:
        return tl.load(source + row)
    position = tl.load(positions + row)
    return uniform(tl.load(source + row), position, position * 0, position * 0)


@jit
def _uniforms(seeds, positions, draft_starts, out, purpose, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    position = tl.load(positions + i, mask=inside, other=0)
    drawn = uniform(
        tl.load(seeds + i, mask=inside, other=0),
        position,
        tl.zeros_like(position) + purpose,
        tl.load(draft_starts + i, mask=inside, other=0),
    )
    tl.store(out + i, drawn, mask=inside)


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
