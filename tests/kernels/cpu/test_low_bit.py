"""Low-bit products of the native kernels. Oracle: their definition, bit for bit, on every instruction set.

Bugs these tests have been seen to catch: sums without their zero point, one panel's scales for all, halves of a
byte swapped, a short last stretch left out, a fused multiply-add, activations rounded towards zero, 16-bit sums
that overflow on AVX2.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.cpu.isa import Isa
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.low_bit.formats import FORMATS, LowBitRows, stack_low_bit
from faser.kernels.torch.backend import TorchBackend
from tests.kernels.conftest import other_isas
from tests.kernels.interface.low_bit.blocks import random_blocks

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
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "IQ4_NL"])
def test_depths_that_end_within_a_span_or_a_stretch_are_whole(
    native: NativeBackend, name: str, depth: int
) -> None:
    found, wanted = both(native, random(3, depth), random_blocks(name, 17, depth))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 8, 13, 100])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    native: NativeBackend, native_alone: NativeBackend, rows: int
) -> None:
    weight = stack_low_bit([random_blocks("Q4_K", 64, 512), random_blocks("Q6_K", 33, 512)])
    x, packed = random(rows, 512), native.pack(weight)
    together = native.linear(x, packed, torch.empty(rows, 97))
    assert torch.equal(together, native_alone.linear(x, packed, torch.empty(rows, 97)))
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(native.linear(x[row : row + 1], packed, torch.empty(1, 97))[0], together[row])


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


def test_the_largest_codes_and_activations_overflow_nothing(native: NativeBackend) -> None:
    for name in FORMATS:
        weight = random_blocks(name, 16, 256)
        part = weight.parts[0]
        halves = {0, 1, 2, 3, 208, 209}
        for at in range(part.format.num_bytes):
            if at not in halves:
                part.blocks.reshape(16, -1, part.format.num_bytes)[..., at] = 0xFF
        x = torch.full((2, 256), 3.0)
        x[1] = -3.0
        found, wanted = both(native, x, weight)
        assert torch.equal(found, wanted), name


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


def test_inputs_that_no_kernel_takes_are_refused_with_their_number(native: NativeBackend) -> None:
    mixed = stack_low_bit([random_blocks("Q8_0", 4, 64), random_blocks("Q8_0", 4, 96)])
    with pytest.raises(ConfigError, match="multiples of 32, all alike, not 64 and 96"):
        native.pack(mixed)


@pytest.mark.slow
@pytest.mark.parametrize("isa", other_isas())
def test_every_instruction_set_gives_the_same_bits(isa: Isa, kernel_cache: Path) -> None:
    """Slow: compiles the kernels once more for sets that the other tests leave out."""
    native = NativeBackend(library_path(isa, cache_dir=kernel_cache), num_threads=2)
    for seed, name in enumerate(FORMATS):
        found, wanted = both(native, random(7, 512, seed=seed), random_blocks(name, 70, 512, seed=seed))
        assert torch.equal(found, wanted), name
