"""Weights rounded on a device, a GPU where there is one, have the bits that interface/low_bit/rows.py defines.

Bugs these tests have been seen to catch: the last line tried is kept; an error of minimums that are not rounded.
"""

import numpy as np
import pytest
import torch

from faser.kernels.cuda.rounding import rounded
from faser.kernels.interface.low_bit.rows import INT4, INT8, Scheme, quantise
from tests.kernels.cuda.triton.rows import DEVICE


@pytest.mark.parametrize("scheme", [INT4, INT8], ids=lambda each: each.name)
@pytest.mark.parametrize("depth", [32, 160])
def test_bits_are_those_of_the_definition(scheme: Scheme, depth: int) -> None:
    """Groups of equal values, of zeros and of one large value among them, and a number that lies between codes."""
    random = np.random.default_rng(depth)
    weight = random.standard_normal((24, depth)).astype(np.float32) * np.exp(random.standard_normal((24, 1)))
    weight[0], weight[1], weight[2, 3], weight[3] = 0.0, 0.25, 99.0, np.arange(depth) / 8 - 1
    weight = weight.astype(np.float32)
    wanted = quantise(weight, scheme)
    codes, scales, minimums = (each.cpu() for each in rounded(torch.from_numpy(weight).to(DEVICE), scheme))
    assert np.array_equal(codes.numpy(), wanted.codes)
    assert np.array_equal(scales.float().numpy(), wanted.scales)
    zeros = np.zeros_like(wanted.scales)
    assert np.array_equal(minimums.float().numpy(), zeros if wanted.minimums is None else wanted.minimums)
    bfloat16 = torch.from_numpy(weight).bfloat16()
    assert torch.equal(rounded(bfloat16, scheme)[0], rounded(bfloat16.float(), scheme)[0])
