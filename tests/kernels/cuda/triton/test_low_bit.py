"""Products with low-bit weights, and their dequantised lines, are those of the weights that the codes stand for.

Oracle: LowBitRows.dequantised, in float64. Bugs these tests have been seen to catch: halves of a byte exchanged;
the scale of the neighbour group; a zero point off by one; minimums left out; words of a lane in another order; a
line of the neighbour.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.errors import EngineError
from faser.kernels.cuda.low_bit import LowBitMatrix, pack_low_bit
from faser.kernels.cuda.triton.low_bit import (
    MOST_FEW,
    STAGES,
    dequantise,
    few_low_bit_rows,
    lines_of,
    low_bit_rows,
)
from faser.kernels.interface.low_bit.formats import FORMATS
from faser.kernels.interface.low_bit.rows import LowBitRows, group_rows
from tests.kernels.cuda.triton.rows import DEVICE
from tests.kernels.cuda.triton.test_few_rows import EPS, normed, random
from tests.kernels.interface.low_bit.blocks import random_blocks

LINES = 12


def grouped(bits: int, lines: int, width: int, size: int, *, lowered: bool) -> LowBitRows:
    """Integers with scales, as AWQ (lowered) and GPTQ have them."""
    rng = np.random.default_rng((bits, width, size))
    codes = rng.integers(0, 2**bits, (lines, width), np.uint8)
    scales = rng.uniform(0.005, 0.02, (lines, width // size)).astype(np.float16).astype(np.float32)
    minimums = -rng.integers(0, 16, scales.shape).astype(np.float32) * scales if lowered else None
    part = group_rows(
        codes, bits=bits, zero_point=0 if lowered else 2 ** (bits - 1), scales=scales, minimums=minimums
    )
    return LowBitRows(parts=(part,))


WEIGHTS = {name: partial(random_blocks, name, depth=512) for name in FORMATS} | {
    "awq": lambda rows: grouped(4, rows, 640, 128, lowered=True),
    "gptq": lambda rows: grouped(4, rows, 96, 32, lowered=False),
    "8 bits": lambda rows: grouped(8, rows, 256, 64, lowered=False),
    "a scale a row": lambda rows: grouped(4, rows, 544, 544, lowered=False),
}


def packed(name: str, lines: int = LINES) -> tuple[LowBitMatrix, Tensor]:
    """A matrix, and what it stands for in float64."""
    weight = WEIGHTS[name](rows=lines)
    (matrix,) = pack_low_bit(weight, None, torch.device(DEVICE)).parts
    return matrix, torch.from_numpy(weight.dequantised()).double().to(DEVICE)


@pytest.mark.parametrize("name", WEIGHTS)
def test_nothing_is_rounded_when_codes_are_packed(name: str) -> None:
    matrix, wanted = packed(name)
    assert torch.equal(matrix.dequantised().double(), wanted)
    lines = torch.empty(LINES - 3, matrix.width, device=DEVICE)
    assert torch.equal(dequantise(matrix, 3, lines).double(), wanted[3:])
    numbers = torch.tensor([5, 0, 5, 11], device=DEVICE)
    assert torch.equal(lines_of(matrix, numbers, lines[:4]).double(), wanted[numbers])


@pytest.mark.full(but=("Q4_K", "Q6_K", "MXFP4", "awq", "8 bits"))
@pytest.mark.parametrize("name", WEIGHTS)
def test_few_rows_and_any_number_of_rows_are_those_of_float64(name: str) -> None:
    matrix, wide = packed(name)
    x, bias, residual = random(3, matrix.width).half(), random(LINES, seed=1), random(3, LINES, seed=2)
    wanted = x.double() @ wide.T
    near = partial(assert_close, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    for outputs in STAGES:
        near(few_low_bit_rows(x, matrix, torch.empty_like(residual), outputs=outputs).double(), wanted)
    found = few_low_bit_rows(x, matrix, residual.clone(), bias=bias, residual=residual)
    near(found.double(), wanted + bias.double() + residual.double())
    rounded = x.double() @ wide.half().double().T
    near(low_bit_rows(x, matrix, torch.empty_like(residual)).double(), rounded)
    found = low_bit_rows(x, matrix, residual.clone(), bias=bias, residual=residual)
    near(found.double(), rounded + bias.double() + residual.double())


@pytest.mark.parametrize("name", ["awq", "Q4_K", "MXFP4", "Q8_0"])
def test_norm_and_gate_are_part_of_the_launch(name: str) -> None:
    matrix, wide = packed(name, 20)
    x, bias = random(2, matrix.width), random(20, seed=3)
    norm = 1 + random(matrix.width, seed=2) / 4
    both = normed(x.double(), norm.double()) @ wide.T + bias.double()
    gate, up = both.chunk(2, -1)
    out = torch.empty(2, 10, device=DEVICE)
    few_low_bit_rows(x, matrix, out, norm=norm, eps=EPS, bias=bias, activation="silu", outputs=8)
    assert_close(out.double(), torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["awq", "Q6_K"])
def test_a_row_has_the_same_bits_whatever_other_rows_there_are(name: str) -> None:
    matrix, _ = packed(name)
    x = random(16, matrix.width).half()
    together = few_low_bit_rows(x[:MOST_FEW], matrix, torch.empty(MOST_FEW, LINES, device=DEVICE), outputs=16)
    alone = few_low_bit_rows(x[1:2], matrix, torch.empty(1, LINES, device=DEVICE), outputs=8)
    assert torch.equal(alone, together[1:2])
    together = low_bit_rows(x, matrix, torch.empty(16, LINES, device=DEVICE))
    for rows in (slice(0, 1), slice(7, 12)):
        alone = low_bit_rows(x[rows], matrix, torch.empty(len(x[rows]), LINES, device=DEVICE))
        assert torch.equal(alone, together[rows])


def test_parts_of_one_kind_are_one_matrix_and_others_follow() -> None:
    weight = LowBitRows(
        parts=tuple(
            random_blocks(name, 4, 256, seed=at).parts[0] for at, name in enumerate(("Q4_K", "Q4_K", "Q6_K"))
        )
    )
    found = pack_low_bit(weight, None, torch.device(DEVICE))
    assert [(each.num_rows, each.form) for each in found.parts] == [(8, "nibbles"), (4, "bytes")]
    assert found.single is None
    stacked = torch.cat([each.dequantised() for each in found.parts]).cpu()
    assert torch.equal(stacked, torch.from_numpy(weight.dequantised()))
    sizes = {each.form: 8 * each.num_bytes / (each.num_rows * each.width) for each in found.parts}
    assert sizes == {"nibbles": 4.625, "bytes": 8 + 0.5 + 1 / 16}


def test_what_does_not_fit_is_refused_by_name() -> None:
    matrix, _ = packed("Q4_0")
    with pytest.raises(EngineError, match=r"x has shape \(2, 256\); the kernel needs \(2, 512\)"):
        low_bit_rows(torch.zeros(2, 256, device=DEVICE), matrix, torch.zeros(2, LINES, device=DEVICE))
    with pytest.raises(EngineError, match=r"out has shape \(2, 11\)"):
        few_low_bit_rows(torch.zeros(2, 512, device=DEVICE), matrix, torch.zeros(2, 11, device=DEVICE))
