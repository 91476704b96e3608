"""Noise on the device is the engine's noise. Bugs these tests have been seen to catch: a missing key step."""

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl

from faser.engine.execution.sampling.parameters import Purpose, noise_words
from faser.engine.execution.sampling.parameters import uniforms as reference
from faser.kernels.cuda.triton.common import EXACT, jit
from faser.kernels.cuda.triton.sampling import noise
from faser.kernels.cuda.triton.sampling.noise import uniforms
from faser.kernels.interface.sampling import RACE_BLOCK, arrivals
from tests.kernels.cuda.triton.rows import DEVICE, on_device, zeros


def test_purposes_have_the_numbers_of_the_engine() -> None:
    assert [int(each) for each in Purpose] == [noise.TOKEN, noise.ACCEPT, noise.REPLACE, noise.DRAFT]


@pytest.mark.parametrize("purpose", list(Purpose))
def test_numbers_are_those_of_the_engine_bit_for_bit(purpose: Purpose) -> None:
    """Oracle: engine/execution/sampling/parameters.py.

    Seeds of 64 bits, positions beyond 32, more rows than a program has.
    """
    rng = np.random.default_rng(int(purpose))
    seeds = rng.integers(0, 2**64, 150, dtype=np.uint64)
    seeds[:2] = 0, 2**64 - 1
    positions = rng.integers(0, 2**40, 150)
    starts = (
        np.maximum(positions - 3, 0) if purpose in (Purpose.ACCEPT, Purpose.DRAFT) else np.zeros_like(positions)
    )
    out = zeros(150, torch.float64)
    uniforms(on_device(seeds.view(np.int64)), on_device(positions), int(purpose), on_device(starts), out)
    assert out.tolist() == reference(noise_words(seeds, positions, purpose, starts)).tolist()


@jit
def _arrivals(words: Any, out: Any, COUNT: tl.constexpr) -> None:
    places = tl.arange(0, COUNT)
    word = tl.load(words + tl.program_id(0)).to(tl.uint64, bitcast=True)
    tl.store(out + tl.program_id(0) * COUNT + places, noise.arrivals(word, places))


def test_the_numbers_of_the_race_are_those_of_the_engine_bit_for_bit() -> None:
    """Oracle: kernels/interface/sampling.py. Words of both ends; the numbers of columns and of 256 blocks."""
    words = np.array([0, 2**64 - 1, 2**32, 0x0123456789ABCDEF], dtype=np.uint64)
    out = torch.zeros(4, 512, dtype=torch.float64, device=DEVICE)
    _arrivals[(4,)](on_device(words.view(np.int64)), out, COUNT=512, **EXACT)
    assert out.tolist() == arrivals(words, RACE_BLOCK * RACE_BLOCK).tolist()
