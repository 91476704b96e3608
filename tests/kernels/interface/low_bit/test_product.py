"""The definition of low-bit products. Oracle: products in float64 of the values that the package gguf reads."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from faser.kernels.interface.backend import Backend
from faser.kernels.interface.low_bit.formats import FORMATS
from faser.kernels.interface.low_bit.product import STRETCH, fused, quantise_activations
from faser.kernels.interface.low_bit.rows import BlockRows, LowBitRows, stack_low_bit
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.interface.low_bit.blocks import by_gguf, extreme_blocks, random_blocks
from tests.kernels.interface.low_bit.group_weights import random_groups

BACKEND: Backend = TorchBackend()


def random(*size: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * (spread * torch.randn(size, generator=generator)).exp()


def product(x: Tensor, weight: LowBitRows) -> Tensor:
    return BACKEND.linear(x, BACKEND.pack(weight), torch.empty(len(x), weight.shape[0]))


def bound(x: Tensor, weight: Tensor) -> Tensor:
    """[R, N] float64: half a step of every activation, and the roundings of float32 sums."""
    rows, depth = x.shape
    padded = torch.zeros(rows, -(-depth // STRETCH) * STRETCH, dtype=torch.float64)
    padded[:, :depth] = x.double()
    steps = padded.view(rows, -1, STRETCH).abs().amax(2).repeat_interleave(STRETCH, 1)[:, :depth] / 127
    magnitudes = weight.double().abs().t()
    return (steps / 2 * (1 + 2.0**-16)) @ magnitudes + depth * 2.0**-24 * ((x.double().abs() + steps) @ magnitudes)


@pytest.mark.parametrize("depth", [256, 768, 1280])
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_off_by_no_more_than_its_activations_steps_allow(name: str, depth: int) -> None:
    weight, x = random_blocks(name, 24, depth), random(5, depth)
    wide = torch.from_numpy(by_gguf(weight)).double()
    off = (product(x, weight).double() - x.double() @ wide.t()).abs()
    most = bound(x, wide)
    if FORMATS[name].has_minimums:  # a minimum and the codes' part may cancel, their roundings do not
        decoded = weight.parts[0].decode()
        assert decoded.minimums is not None
        minimums = abs(decoded.minimums.products).repeat(decoded.group, 1)
        parts = torch.from_numpy(abs(decoded.dequantised()) + 2 * minimums)
        most = bound(x, wide) + depth * 2.0**-23 * (x.double().abs() @ parts.double().t())
    assert (off <= most).all()
    assert (off > most / 1000).any(), "a bound that says nothing"


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_that_of_the_rounded_activations(name: str) -> None:
    """Oracle: float64. Nothing but the roundings of float32 is left: a wrong sum of any group shows.

    Bugs seen to be caught: the integer scale of the group before, minimums of one stretch in a superblock, a scale
    of the superblock before.
    """
    weight, x = random_blocks(name, 24, 768, seed=1), random(5, 768)
    rounded = quantise_activations(x.numpy())
    steps = rounded.scales.astype(np.float64).repeat(STRETCH, 1)
    wide, back = by_gguf(weight).astype(np.float64), rounded.values * steps
    decoded = weight.parts[0].decode()
    sizes = np.abs(wide)
    if decoded.minimums is not None:
        sizes = sizes + 2 * np.abs(decoded.minimums.products).repeat(decoded.group, 1)
    off = np.abs(product(x, weight).double().numpy() - back @ wide.T)
    assert (off <= 2.0**-20 * (np.abs(back) @ sizes.T)).all()


def test_integer_scales_within_a_superblock_weigh_groups_exactly() -> None:
    """Oracle: integers in Python. A stretch is one of them, rounded once; then scales multiply in their order.

    Seen to catch: an integer sum that is rounded in each of its groups.
    """
    weight = extreme_blocks("Q6_K", 3, 256, 0)
    part = weight.parts[0]
    assert isinstance(part, BlockRows)
    part.blocks[:, 128:192] = 0  # upper bits: codes are 0 and 1, so that three groups are beyond 2^24 already
    decoded = part.decode()
    assert decoded.scales.halves is not None
    x = torch.randint(120, 128, (2, 256), generator=torch.Generator().manual_seed(0)).float()
    x[:, ::STRETCH] = 127  # the scale is 1
    found = product(x, weight)
    beyond = 0
    for row in range(2):
        for column in range(3):
            scaled = 0.0  # every sum and product is exact in float64
            for stretch in range(4):
                integer = sum(
                    int(decoded.scales.values[column, k // 16])
                    * (int(decoded.codes[column, k]) - 32)
                    * int(x[row, k])
                    for k in range(stretch * STRETCH, (stretch + 1) * STRETCH)
                )
                beyond += abs(integer) > 2**24 and integer % 2 == 1
                scaled = float(np.float32(scaled + float(np.float32(integer))))
            assert float(found[row, column]) == float(np.float32(scaled * float(decoded.scales.halves[column, 0])))
    assert beyond > 0, "no integer that float32 has to round"


def test_a_multiply_add_is_rounded_once() -> None:
    """Oracle: fractions. Half of the sums lie a little below the middle of two floats: a second rounding shows.

    Seen to catch: float64 rounded to the nearest instead of to odd.
    """
    rng = np.random.default_rng(0)
    a, b, c = rng.uniform(-2, 2, (3, 4000)).astype(np.float32)
    little = rng.integers(1, 200, 2000) * 2.0**-23
    a[::2], b[::2] = 1 + little, (1 - little) * 2.0**-24  # the product: 2^-24 (1 - little^2)
    c[::2] = 1 + (2 * rng.integers(0, 2**22, 2000) + 1) * 2.0**-23
    signs, sizes = rng.choice([-1, 1], 4000).astype(np.float32), np.float32(2.0) ** rng.integers(-40, 40, 4000)
    a, c = a * signs * sizes, c * signs * sizes
    found = fused(a, b, c)
    for x, y, z, sum_of in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        for end in (-np.inf, np.inf):
            neighbour = float(np.nextafter(np.float32(sum_of), np.float32(end)))
            assert abs(exact - Fraction(sum_of)) <= abs(exact - Fraction(neighbour))


@pytest.mark.parametrize("has_minimums", [False, True])
@pytest.mark.parametrize("bits, group_size", [(4, 32), (4, 128), (8, 64), (8, 768)])
def test_a_product_with_codes_and_scales_is_off_by_no_more(bits: int, group_size: int, has_minimums: bool) -> None:
    """Oracle: float64 products of codes, scales and minimums, each by itself."""
    weight = random_groups(bits, 24, 768, group_size=group_size, has_minimums=has_minimums, has_order=True)
    x, part = random(5, 768), weight.parts[0].decode()
    assert weight.order is not None
    columns = x[:, torch.from_numpy(weight.order).long()]
    codes = torch.from_numpy(part.codes).double() - part.zero_point
    wide = codes * torch.from_numpy(part.scales.products).double().repeat_interleave(part.group, 1)
    magnitudes = wide.abs()
    if part.minimums is not None:
        minimums = torch.from_numpy(part.minimums.products).double().repeat_interleave(part.group, 1)
        wide, magnitudes = wide + minimums, magnitudes + minimums.abs()
    off = (product(x, weight).double() - columns.double() @ wide.t()).abs()
    most = bound(columns, wide) + 768 * 2.0**-23 * (columns.double().abs() @ magnitudes.t())
    assert (off <= most).all()
    assert (off > most / 1000).any(), "a bound that says nothing"


def test_activations_that_are_steps_of_their_scale_lose_nothing() -> None:
    """Oracle: integers. Then the integer sums are all there is."""
    x = torch.randint(-127, 128, (3, 256), generator=torch.Generator().manual_seed(0)).float()
    x[:, ::STRETCH] = 127
    weight = random_blocks("Q8_0", 8, 256)
    found = quantise_activations(x.numpy())
    assert np.array_equal(found.values, x.numpy())
    assert (found.scales == 1).all()
    wanted = x.double() @ torch.from_numpy(by_gguf(weight)).double().t()
    torch.testing.assert_close(product(x, weight).double(), wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("depth", [96, 256, 640])
def test_an_activation_is_off_by_half_a_step_of_its_own_stretch(depth: int) -> None:
    """Bugs seen to be caught: rounded towards zero, one scale for all of a row."""
    x = random(20, depth).numpy()
    found = quantise_activations(x)
    for first in range(0, depth, STRETCH):
        part = x[:, first : first + STRETCH].astype(np.float64)
        step = np.abs(part).max(1, keepdims=True) / 127
        back = found.values[:, first : first + STRETCH] * found.scales[:, first // STRETCH, None].astype(
            np.float64
        )
        assert (np.abs(back - part) <= step * (0.5 + 2.0**-16)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_no_finite_product_and_spoils_no_other(bad: float) -> None:
    x = random(3, 256)
    x[1, 7] = bad
    out = product(x, random_blocks("Q4_1", 16, 256))
    assert not out[1].isfinite().any()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30])
def test_rows_of_zeros_and_of_hardly_more_are_no_trouble(size: float) -> None:
    found = quantise_activations(np.full((2, 64), size, np.float32))
    assert np.isfinite(found.scales).all()
    back = found.values * found.scales[:, :1]
    assert np.allclose(back, size, rtol=2.0**-7, atol=2.0**-107)


def test_embedding_rows_are_the_dequantised_ones() -> None:
    weight = stack_low_bit([random_blocks("Q4_K", 20, 256), random_blocks("Q6_K", 9, 256)])
    ids = torch.tensor([28, 0, 19, 20, 3, 3])
    packed = BACKEND.pack(weight)
    for dtype in (torch.float32, torch.bfloat16):
        found = BACKEND.embed(ids, packed, torch.empty(len(ids), 256, dtype=dtype))
        assert torch.equal(found, torch.from_numpy(by_gguf(weight))[ids].to(dtype))
