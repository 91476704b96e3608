"""Noise on the device is the engine's noise. Bugs these tests have been seen to catch: a missing key step."""

import numpy as np
import pytest
import torch

from faser.engine.execution.sampling.parameters import Purpose
from faser.engine.execution.sampling.parameters import uniforms as reference
from faser.kernels.cuda.triton.sampling import noise
from faser.kernels.cuda.triton.sampling.noise import uniforms
from tests.kernels.cuda.triton.rows import on_device, zeros


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
    assert out.tolist() == reference(seeds, positions, purpose, starts).tolist()
