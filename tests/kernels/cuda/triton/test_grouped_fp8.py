"""Products of weights with scales of groups are those of float64, however the rows are cut.

Bugs these tests have been seen to catch: the scale of the group beside, and of the rows below; the scales of gate
for up; in few rows, those of a lane for the next one.
"""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.errors import ConfigError, EngineError
from faser.kernels.cuda.triton.few_rows import few_rows
from faser.kernels.cuda.triton.grouped_fp8 import TILES, GroupedTiles, grouped_product, tiles_of
from faser.kernels.cuda.triton.scaled_fp8 import ScaledFp8
from faser.kernels.interface.fp8 import FP8, Fp8Linear, Fp8Rows, pack_fp8
from tests.kernels.cuda.triton.rows import DEVICE

# Rows and columns of a block; 5 rows share no scales in memory.
BLOCKS = [(128, 128), (32, 64), (5, 16)]


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def packed(size: int, width: int, block: tuple[int, int], seed: int = 1) -> Fp8Rows:
    """A weight with scales that differ by up to 50 times."""
    scales = torch.exp(random(-(-size // block[0]), -(-width // block[1]), seed=seed)) / width**0.5
    values = random(size, width, seed=seed + 1).clamp(-3, 3).to(FP8)
    by_row = scales.repeat_interleave(block[0], 0)[:size].contiguous()
    rows = Fp8Rows(values=values, scales=by_row, group=block[1])
    return pack_fp8(rows, None, torch.device(DEVICE)).weight


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    limit = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    assert_close(found.double(), wanted, rtol=limit, atol=limit * float(wanted.abs().max()) / 8)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rows, size, width, dtype", [(3, 70, 208, torch.bfloat16), (21, 40, 144, torch.float16)])
def test_a_product_is_that_of_float64(
    rows: int, size: int, width: int, dtype: torch.dtype, block: tuple[int, int]
) -> None:
    """Of sizes that end within a block, with each of what may stand around it."""
    x, weight = random(rows, width).to(dtype), packed(size, width, block)
    bias, residual = random(size, seed=3).to(dtype), random(rows, size, seed=4).to(dtype)
    wanted = x.double() @ weight.dequantised().double().T
    near(grouped_product(x, weight, None, torch.empty_like(residual)), wanted, dtype)
    out = residual.clone()
    assert grouped_product(x, weight, bias, out, out) is out
    near(out, wanted + bias.double() + residual.double(), dtype)
    wide = grouped_product(x, weight, None, torch.empty(rows, size, device=DEVICE))
    near(wide, wanted, torch.float32)


def test_all_tiles_and_numbers_of_rows_give_a_row_the_same_numbers() -> None:
    x, weight = random(70, 96).bfloat16(), packed(48, 96, (32, 32))
    wanted = x.double() @ weight.dequantised().double().T
    for most, some in TILES.items():
        for tiles in some:
            small = GroupedTiles(rows=min(tiles.rows, 32), outputs=tiles.outputs, depth=tiles.depth)
            out = torch.empty(70, 48, dtype=torch.float32, device=DEVICE)
            near(grouped_product(x, weight, None, out, tiles=small), wanted, torch.float32)
        assert tiles_of(most) == some
    assert tiles_of(100_000) == TILES[128]


def test_one_scale_a_row_is_one_group() -> None:
    values = random(24, 80, seed=5).to(FP8)
    weight = Fp8Rows(values=values, scales=random(24, seed=6).abs())
    x = random(2, 80).bfloat16()
    found = grouped_product(x, weight, None, torch.empty(2, 24, dtype=torch.float32, device=DEVICE))
    near(found, x.double() @ weight.dequantised().double().T, torch.float32)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.full(but=("-block0", "silu-block1", "silu-block2"))
def test_few_rows_in_one_launch_are_those_of_float64(activation: str, block: tuple[int, int]) -> None:
    rows, size, width = 2, 48, 1072  # more than a step of the kernel, and a part of one
    x, weight = random(rows, width).bfloat16(), packed(size, width, block)
    norm, bias = 1 + random(width, seed=2) / 4, random(size, seed=3).bfloat16()
    wide = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.double()
    wanted = wide @ weight.dequantised().double().T + bias.double()
    num = size // 2 if activation else size
    residual = random(rows, num, seed=4)
    if activation:
        wanted = torch.nn.functional.silu(wanted[:, :num]) * wanted[:, num:]
    out = residual.clone()
    few_rows(
        x,
        weight.values,
        out,
        scales=weight.scales,
        group=weight.group,
        lines=weight.lines,
        norm=norm,
        eps=1e-5,
        bias=bias,
        residual=out,
        activation=activation,
    )
    near(out, wanted + residual.double(), torch.float32)


def test_what_has_no_kernel_is_refused_with_its_size() -> None:
    products = ScaledFp8(torch.device(DEVICE))
    rows = Fp8Rows(values=torch.zeros(16, 48).to(FP8), scales=torch.ones(16, 6), group=8)
    with pytest.raises(ConfigError, match="groups of a multiple of 16 columns; one has 8"):
        products.check(rows)
    weight = packed(16, 64, (16, 32))
    with pytest.raises(EngineError, match=r"x has shape \(2, 32\)|weight has shape"):
        grouped_product(random(2, 32), weight, None, random(2, 16))


def test_a_product_of_the_backend_leaves_the_rows_in_16_bits() -> None:
    """A product with one scale a row rounds them to 8."""
    x, weight = random(4, 64).bfloat16(), packed(32, 64, (32, 32))
    out = torch.empty(4, 32, dtype=torch.float32, device=DEVICE)
    ScaledFp8(torch.device(DEVICE)).linear(x, Fp8Linear(weight=weight, bias=None), out, None)
    near(out, x.double() @ weight.dequantised().double().T, torch.float32)
