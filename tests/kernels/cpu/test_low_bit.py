"""Low-bit products of the native kernels. Oracle: their definition, bit for bit, on every instruction set.

Bugs these tests have been seen to catch: sums without their zero point, one panel's scales for all, halves of a
byte swapped, a short last stretch left out, a fused multiply-add, activations rounded towards zero, 16-bit sums
that overflow on AVX2, the codes of another table, exponents one too high, the integer scale of the group before, a
sum in pairs that covers too many values, minimums of one stretch for a whole superblock.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import Isa, library_path
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.low_bit.formats import FORMATS
from faser.kernels.interface.low_bit.rows import (
    INT4,
    INT8,
    BlockRows,
    FloatRows,
    LowBitRows,
    Scheme,
    stack_low_bit,
)
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.conftest import other_isas
from tests.kernels.interface.low_bit.blocks import by_gguf, extreme_blocks, random_blocks
from tests.kernels.interface.low_bit.group_weights import random_groups

DEFINITION = TorchBackend()


def random(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * torch.randn(size, generator=generator).exp()


def product(
    backend: Backend, x: Tensor, weight: LowBitRows, out: Tensor, bias: Tensor | None = None, **more: Tensor
) -> Tensor:
    return backend.linear(x, backend.pack(weight, bias), out, **more)


def both(
    native: NativeBackend, x: Tensor, weight: LowBitRows, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The native product and the one that defines it, in float32."""
    size = (len(x), weight.shape[0])
    return (
        product(native, x, weight, torch.empty(size), bias),
        product(DEFINITION, x, weight, torch.empty(size), bias),
    )


@pytest.mark.parametrize("depth", [256, 768])
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_has_the_bits_of_its_definition(native: NativeBackend, name: str, depth: int) -> None:
    found, wanted = both(native, random(7, depth), random_blocks(name, 70, depth))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("depth", [32, 96, 128, 160, 576, 800])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"])
def test_depths_that_end_within_a_span_or_a_stretch_are_whole(
    native: NativeBackend, name: str, depth: int
) -> None:
    found, wanted = both(native, random(3, depth), random_blocks(name, 17, depth))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 8, 13, 100])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    native: NativeBackend, native_alone: NativeBackend, rows: int
) -> None:
    weight = stack_low_bit(
        [random_blocks(name, n, 512) for name, n in (("Q4_K", 48), ("Q6_K", 33), ("Q5_K", 20), ("MXFP4", 16))]
    )
    x, packed, columns = random(rows, 512), native.pack(weight), weight.shape[0]
    together = native.linear(x, packed, torch.empty(rows, columns))
    assert torch.equal(together, native_alone.linear(x, packed, torch.empty(rows, columns)))
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(native.linear(x[row : row + 1], packed, torch.empty(1, columns))[0], together[row])


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_any_number_of_threads_gives_the_same_bits(kernel_cache: Path, threads: int) -> None:
    """Also more threads than there is work for. Bugs seen to be caught: shares that leave a unit out, and shares
    of late threads that no other takes."""
    backend = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=threads)
    for columns in (1, 70, 700):
        weight = stack_low_bit([random_blocks("Q4_1", columns, 96), random_blocks("Q8_0", 100, 96)])
        for rows in (1, 4, 17, 70):
            for _ in range(5):
                found, wanted = both(backend, random(rows, 96), weight)
                assert torch.equal(found, wanted), (columns, rows)


GROUPS: list[tuple[int, dict[str, Any]]] = [
    (4, {"group_size": 32, "dtype": np.float16}),
    (4, {"group_size": 64, "dtype": np.float16, "has_minimums": True}),
    (4, {"group_size": 128, "has_minimums": True}),
    (4, {"group_size": 96}),
    (8, {"group_size": 32}),
    (8, {"group_size": 384, "has_minimums": True, "dtype": np.float16}),
    (8, {"group_size": 768, "has_minimums": True, "has_order": True}),
    (4, {"group_size": 768, "has_order": True}),
]


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("bits, options", GROUPS)
def test_codes_with_scales_have_the_bits_of_their_definition(
    native: NativeBackend, bits: int, options: dict[str, Any], rows: int
) -> None:
    """Bugs seen to be caught: minimums of the wrong span, scales of 128 values read as if they were of 32."""
    weight = random_groups(bits, 70, 768, **options)
    found, wanted = both(native, random(rows, 768), weight, random(70, seed=3))
    assert torch.equal(found, wanted)
    ids = torch.tensor([69, 0, 16, 33])
    rows_of_weight = native.embed(ids, native.pack(weight), torch.empty(4, 768))
    assert torch.equal(rows_of_weight, torch.from_numpy(weight.dequantised())[ids])


@pytest.mark.parametrize("depth", [96, 576])
@pytest.mark.parametrize("bits", [4, 8])
def test_one_scale_a_row_reaches_the_end_of_a_short_span(native: NativeBackend, bits: int, depth: int) -> None:
    weight = random_groups(bits, 33, depth, group_size=depth, has_minimums=True)
    found, wanted = both(native, random(3, depth), weight)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("rows", [2, 6, 13])
def test_a_row_of_codes_with_scales_has_the_same_bits_alone_and_in_a_batch(
    native: NativeBackend, rows: int
) -> None:
    weight = stack_low_bit(
        [
            random_groups(4, 40, 512, group_size=128, has_minimums=True),
            random_groups(8, 33, 512, group_size=512),
            LowBitRows(parts=(FloatRows(weight=random(24, 512), scheme=INT4),)),
        ]
    )
    x, packed = random(rows, 512), native.pack(weight)
    together = native.linear(x, packed, torch.empty(rows, 97))
    for row in range(rows):
        assert torch.equal(native.linear(x[row : row + 1], packed, torch.empty(1, 97))[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("depth", [32, 96, 576])
def test_weights_that_are_rounded_while_packed_have_the_bits_of_their_definition(
    native: NativeBackend, scheme: Scheme, depth: int, dtype: torch.dtype
) -> None:
    """Rows of zeros, of one value and of tiny values among them."""
    weight = 0.05 * random(37, depth, seed=4)
    weight[3] = 0
    weight[4] = 0.3
    weight[5] *= 1e-7
    weight[6] *= 1e-38
    rows = LowBitRows(parts=(FloatRows(weight=weight.to(dtype), scheme=scheme),))
    ids = torch.arange(37)
    found = native.embed(ids, native.pack(rows), torch.empty(37, depth))
    assert torch.equal(found, torch.from_numpy(rows.dequantised()))
    products, wanted = both(native, random(3, depth), rows)
    assert torch.equal(products, wanted)


def test_parts_of_several_formats_are_one_product(native: NativeBackend) -> None:
    weight = stack_low_bit([random_blocks(name, 21 + n, 256, seed=n) for n, name in enumerate(FORMATS)])
    found, wanted = both(native, random(9, 256), weight, random(weight.shape[0], seed=5))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_and_residual_are_added_before_the_one_rounding(native: NativeBackend, dtype: torch.dtype) -> None:
    weight, bias = random_blocks("Q5_0", 40, 96), random(40, seed=1)
    x, residual = random(4, 96).to(dtype), random(4, 40, seed=2).to(dtype)
    wide = torch.zeros(4, 60, dtype=dtype)
    found = product(native, x, weight, wide[:, 10:50], bias, residual=residual)
    wanted = product(DEFINITION, x, weight, torch.empty(4, 40, dtype=dtype), bias, residual=residual)
    assert torch.equal(found, wanted)
    assert not wide[:, :10].any()
    assert not wide[:, 50:].any()


@pytest.mark.parametrize("fill", [0x00, 0xFF])
@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_codes_scales_and_activations_overflow_nothing(
    native: NativeBackend, name: str, fill: int
) -> None:
    """Activations of one sign, of the other, and of both: sums in pairs are as large as they get, and the integers
    of stretches are those that float32 has to round."""
    assert_extremes_have_the_bits_of_their_definition(native, name, fill)


def assert_extremes_have_the_bits_of_their_definition(native: NativeBackend, name: str, fill: int) -> None:
    x = torch.randint(120, 128, (7, 256), generator=torch.Generator().manual_seed(0)).float()
    x[:, ::32] = 127
    x[1] *= -1
    x[2, ::2] *= -1
    x[3, 2::4] *= -1
    x[3, 3::4] *= -1
    x[4, :128] *= -1
    x[5] = 127
    x[6] = -127
    found, wanted = both(native, x, extreme_blocks(name, 16, 256, fill))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_no_other(native: NativeBackend, bad: float) -> None:
    x = random(3, 256)
    x[1, 200] = bad
    found, wanted = both(native, x, random_blocks("Q4_0", 20, 256))
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], wanted[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_embedding_rows_are_the_dequantised_ones(native: NativeBackend, name: str, dtype: torch.dtype) -> None:
    weight = stack_low_bit([random_blocks(name, 70, 512), random_blocks("Q8_0", 30, 512)])
    ids = torch.tensor([99, 0, 69, 70, 17, 64, 17])
    found = native.embed(ids, native.pack(weight), torch.empty(len(ids), 512, dtype=dtype))
    assert torch.equal(found, torch.from_numpy(weight.dequantised())[ids].to(dtype))


def test_every_exponent_of_mxfp4_is_exact(native: NativeBackend) -> None:
    """Down to those of numbers that are not normal; 255, which is none, makes no finite weight."""
    weight = random_blocks("MXFP4", 256, 32)
    part = weight.parts[0]
    assert isinstance(part, BlockRows)
    part.blocks[:, 0] = np.arange(256)
    found = native.embed(torch.arange(256), native.pack(weight), torch.empty(256, 32))
    with np.errstate(over="ignore"):
        wanted = torch.from_numpy(by_gguf(weight))
    assert torch.equal(found[:255], wanted[:255])
    assert not found[255].isfinite().any()


def test_inputs_that_no_kernel_takes_are_refused_with_their_number(native: NativeBackend) -> None:
    mixed = stack_low_bit([random_blocks("Q8_0", 4, 64), random_blocks("Q8_0", 4, 96)])
    with pytest.raises(ConfigError, match="multiples of 32, all alike, not 64 and 96"):
        native.pack(mixed)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("isa", other_isas())
def test_every_instruction_set_gives_the_same_bits(isa: Isa, kernel_cache: Path) -> None:
    """Slow: compiles the kernels once more for sets that the other tests leave out."""
    native = NativeBackend(library_path(isa, cache_dir=kernel_cache), num_threads=2)
    for seed, name in enumerate(FORMATS):
        found, wanted = both(native, random(7, 512, seed=seed), random_blocks(name, 70, 512, seed=seed))
        assert torch.equal(found, wanted), name
        for fill in (0x00, 0xFF):
            assert_extremes_have_the_bits_of_their_definition(native, name, fill)
    for bits, options in GROUPS:
        found, wanted = both(native, random(7, 768), random_groups(bits, 70, 768, **options))
        assert torch.equal(found, wanted), options
    for scheme in (INT8, INT4):
        rounded = LowBitRows(parts=(FloatRows(weight=random(37, 576), scheme=scheme),))
        found, wanted = both(native, random(3, 576), rounded)
        assert torch.equal(found, wanted), scheme
