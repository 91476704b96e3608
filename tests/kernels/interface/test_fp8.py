"""8-bit products: what quantising does to a number, how far off a product may be, and what is called on a GPU.

Oracles: all finite numbers of the type, of which the nearest is searched for; products in float64; the bound that
fp8.py derives from the scales.

Bugs these tests have been seen to catch: the largest value for the largest magnitude, a smaller limit, no least
scale, rows or channels not scaled or by a mean, bias or residual left out, only the first rows of a weight, a
weight that is not copied, the padding's rows for the others, sizes not checked, a lane without the products.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.engine.execution.models.loader import load_decoder
from faser.errors import ConfigError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.triton.scaled_fp8 import LOWEST_CAPABILITY, ScaledFp8, scaled_fp8
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.fp8 import (
    FP8,
    FP8_MAX,
    Fp8Linear,
    Fp8Products,
    Fp8Rows,
    ReferenceFp8,
    pack_fp8,
    quantise_rows,
    quantise_weight,
)
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.execution.models.paged import MAX_POSITIONS, PagedModel, prompt
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_kernels
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*size: int, seed: int = 0, spread: float = 0.0) -> Tensor:
    """Seeded normal numbers; spread: of their magnitudes, in powers of e."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(size, generator=generator)
    return numbers * (spread * torch.randn(size, generator=generator)).exp()


def finite_numbers() -> Tensor:
    """Every finite number of the type, [254] float64, zero twice."""
    every = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    return every[every.isfinite()]


def nearest(wanted: Tensor) -> Tensor:
    """The nearest number of the type, of two as near the one with an even mantissa. [N] float64 in and out."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(FP8).double()
    numbers, codes = numbers[numbers.isfinite()], codes[numbers.isfinite()]
    distance = (wanted[:, None] - numbers).abs()
    is_least = distance == distance.amin(1, keepdim=True)
    best = torch.where(is_least, 2 - (codes % 2 == 1).int(), 0).argmax(1)
    return numbers[best]


def error_bound(x: Tensor, weight: Tensor) -> Tensor:
    """How far off each product may be, [R, N] float64: the sum that fp8.py states."""
    wide, wide_weight = x.double().abs(), weight.double().abs()
    dx, dw = (
        torch.maximum(each / 16, quantise_rows(each).scales.double()[:, None] / 1024)
        for each in (wide, wide_weight)
    )
    return dx @ wide_weight.t() + wide @ dw.t() + dx @ dw.t()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_becomes_the_nearest_one_of_its_row(dtype: torch.dtype) -> None:
    """Oracle: a search. What is rounded is the number over the scale, itself rounded to float32."""
    x = random(6, 500, spread=1.5).to(dtype)
    found = quantise_rows(x)
    largest = x.float().abs().amax(1)
    assert torch.equal(found.scales, largest / torch.full_like(largest, FP8_MAX))
    scaled = x.float() * (torch.full_like(largest, FP8_MAX) / largest)[:, None]
    assert torch.equal(found.values.double().flatten(), nearest(scaled.double().flatten()))


def test_numbers_of_the_type_stay_what_they_are() -> None:
    numbers = finite_numbers()[None].float()
    found = quantise_rows(numbers)
    assert torch.equal(found.dequantised(), numbers)


def test_the_largest_number_of_a_row_stays_to_rounding() -> None:
    x = random(50, 33, spread=2.0)
    assert_close(quantise_rows(x).dequantised().abs().amax(1), x.abs().amax(1), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30])
def test_rows_of_zeros_and_of_hardly_more_are_no_trouble(size: float) -> None:
    found = quantise_rows(torch.full((2, 16), size))
    assert found.scales.isfinite().all()
    assert_close(found.dequantised(), torch.full((2, 16), size), rtol=2.0**-3, atol=2.0**-107)


def product(x: Tensor, weight: Fp8Rows) -> Tensor:
    """By the reference, [R, N] float32."""
    out = torch.empty(len(x), len(weight.scales))
    return ReferenceFp8().linear(x, Fp8Linear(weight=weight, bias=None), out, None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_no_finite_product_and_spoils_no_other(bad: float) -> None:
    x = random(3, 32)
    x[1, 7] = bad
    out = product(x, quantise_weight(random(16, 32, seed=1)))
    assert not out[1].isfinite().any()
    assert out[[0, 2]].isfinite().all()


def test_a_weight_is_quantised_row_by_row_however_large_it_is() -> None:
    weight = random(5000, 3)
    whole, found = quantise_rows(weight), quantise_weight(weight)
    assert torch.equal(found.values.view(torch.uint8), whole.values.view(torch.uint8))
    assert torch.equal(found.scales, whole.scales)


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_product_is_off_by_no_more_than_the_scales_allow(seed: int, spread: float) -> None:
    """Against the product of the numbers that were not quantised, in float64."""
    x, weight = random(5, 256, seed=seed, spread=spread), random(24, 256, seed=seed + 100, spread=spread)
    off = (product(x, quantise_weight(weight)).double() - x.double() @ weight.double().t()).abs()
    bound = error_bound(x, weight)
    slack = 1e-5 * (x.double().abs() @ weight.double().abs().t())  # float32 sums
    assert (off <= bound + slack).all()
    assert (off > bound / 500).any(), "a bound that says nothing"


def test_the_reference_product_is_that_of_the_dequantised_matrices() -> None:
    x, weight = random(7, 96), quantise_weight(random(40, 96, seed=1, spread=1.0))
    wanted = quantise_rows(x).dequantised().double() @ weight.dequantised().double().t()
    assert_close(product(x, weight).double(), wanted, rtol=1e-5, atol=1e-4)


def flashinfer(fp8: Fp8Products | None) -> FlashInferBackend:
    accelerator = FakeAccelerator()
    return FlashInferBackend(accelerator, FakeFlashInfer(accelerator), fake_kernels(accelerator), fp8)


def backend_of(kind: str) -> Backend:
    if kind == "torch":
        return TorchBackend()
    return flashinfer(ReferenceFp8() if kind == "flashinfer, emulated" else ScaledFp8(torch.device("cpu")))


@pytest.mark.parametrize("kind", ["torch", "flashinfer, emulated", "flashinfer, as on a GPU"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("residual", ["none", "another", "out"])
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_linear_adds_bias_and_residual_to_a_quantised_product(
    kind: str, has_bias: bool, residual: str, out_dtype: torch.dtype
) -> None:
    """As on a GPU: its kernels in Triton's interpreter, and torch's scaled product on the CPU."""
    backend = backend_of(kind)
    assert backend.has_fp8
    dtype = torch.bfloat16 if out_dtype is torch.float32 else out_dtype
    x, weight = random(5, 32).to(dtype), quantise_weight(random(16, 32, seed=1))
    bias = random(16, seed=2).to(dtype) if has_bias else None
    out = random(5, 16, seed=3).to(out_dtype)
    before = {"none": None, "another": random(5, 16, seed=4).to(out_dtype), "out": out}[residual]
    wanted = quantise_rows(x).dequantised().double() @ weight.dequantised().double().t()
    for addend in (bias, before):
        wanted = wanted if addend is None else wanted + addend.double()
    packed = backend.pack(weight, bias)
    weight.values.view(torch.uint8).zero_()
    weight.scales.zero_()
    assert backend.linear(x, packed, out, residual=before) is out
    near = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[out_dtype]
    assert_close(out.double(), wanted, rtol=near, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_any_number_of_rows_gives_what_the_reference_gives(rows: int) -> None:
    x, weight = random(rows, 64, spread=1.0), quantise_weight(random(48, 64, seed=1))
    packed = Fp8Linear(weight=weight, bias=None)
    found = ScaledFp8(torch.device("cpu")).linear(x, packed, torch.empty(rows, 48), None)
    assert_close(found, product(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_residual", [False, True])
def test_a_graph_can_capture_a_quantised_product(has_residual: bool) -> None:
    """A graph that waits for the device, or whose tensors move, fails on the emulated device."""
    backend = flashinfer(ReferenceFp8())
    packed = backend.pack(quantise_weight(random(16, 32)), random(16, seed=1).half())
    x, out = random(4, 32).half(), torch.zeros(4, 16, dtype=torch.float16)
    residual = out if has_residual else None

    def work() -> None:
        backend.linear(x, packed, out, residual=residual)

    graph = backend.graph_capture.capture(work)
    x.copy_(random(4, 32, seed=2))
    out.fill_(1)
    wanted = out.clone()
    backend.linear(x, packed, wanted, residual=wanted if has_residual else None)
    graph.replay()
    assert torch.equal(out, wanted)


def test_a_concurrent_instance_has_the_products_too() -> None:
    packed = flashinfer(ReferenceFp8()).pack(quantise_weight(random(16, 16)))
    other = flashinfer(ReferenceFp8()).concurrent_instance()
    assert other.has_fp8
    out = other.linear(random(2, 16).half(), packed, torch.empty(2, 16, dtype=torch.float16))
    assert out.isfinite().all()


def test_a_backend_without_the_products_says_so_by_name(kernel_cache: Path) -> None:
    native = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1)
    weight = quantise_weight(random(16, 16))
    assert not native.has_fp8
    assert not flashinfer(None).has_fp8
    with pytest.raises(ConfigError, match="the native backend has no fp8 products"):
        native.pack(weight)
    with pytest.raises(ConfigError, match=r"has no fp8 products; they need compute capability 8\.9"):
        flashinfer(None).pack(weight)


@pytest.mark.parametrize(
    "capability, has", [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)]
)
def test_a_gpu_has_the_products_by_its_capability(capability: tuple[int, int], has: bool) -> None:
    assert (scaled_fp8(torch.device("cpu"), capability) is not None) is has


@pytest.mark.parametrize("size", [(24, 32), (32, 24), (1, 16)])
def test_a_weight_without_a_kernel_is_refused_with_its_size(size: tuple[int, int]) -> None:
    backend = flashinfer(ScaledFp8(torch.device("cpu")))
    with pytest.raises(ConfigError, match=rf"multiples of 16; one is {size[0]} x {size[1]}"):
        backend.pack(quantise_weight(random(*size)))


def test_a_model_quantised_while_loading_says_the_same_by_the_kernels_of_a_gpu(tmp_path: Path) -> None:
    """Oracle: the same backend with the reference's products, but for sums in another order."""
    config = tiny_llama_config() | {"hidden_size": 256, "num_hidden_layers": 2, "torch_dtype": "float16"}
    weights = {name: each / 2 for name, each in random_weights(llama_shapes(config)).items()}
    write_checkpoint(tmp_path, config, weights)

    def logits(backend: Backend) -> Tensor:
        decoder = load_decoder(
            tmp_path,
            backend,
            torch.float16,
            max_model_len=MAX_POSITIONS,
            max_rows=8,
            quantization="fp8",
            progress=lambda *_: None,
        )
        return PagedModel(decoder, backend).prefill(prompt(9, VOCAB_SIZE), (4, 4))

    wanted = logits(flashinfer(ReferenceFp8()))
    assert (logits(flashinfer(ScaledFp8(torch.device("cpu")))) - wanted).norm() < 0.005 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < LOWEST_CAPABILITY,
    reason="needs a GPU with 8-bit tensor cores",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5, 64, 257])
@pytest.mark.parametrize("outputs, inputs", [(192, 576), (1024, 14336)])
def test_a_gpu_gives_the_product_that_the_definition_gives(
    outputs: int, inputs: int, rows: int, dtype: torch.dtype
) -> None:
    """By a replay, with other rows than those captured. For few rows of many inputs cuBLAS may have no kernel."""
    device = torch.device("cuda")
    products = ScaledFp8(device)
    on_host = quantise_weight(random(outputs, inputs, spread=1.0))
    packed = pack_fp8(on_host, random(outputs, seed=3).to(dtype), device)
    x, out = random(rows, inputs, seed=1).to(device, dtype), torch.empty(rows, outputs, dtype=dtype, device=device)
    products.linear(x, packed, out, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products.linear(x, packed, out, None)
    x.copy_(random(rows, inputs, seed=2))
    graph.replay()
    wanted = ReferenceFp8().linear(x.cpu(), pack_fp8(on_host, packed.bias, torch.device("cpu")), out.cpu(), None)
    near = {torch.float32: 1e-4, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    assert_close(out.float().cpu(), wanted.float(), rtol=near, atol=1e-3 * float(wanted.abs().max()))
