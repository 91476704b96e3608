"""Products are torch's results by whichever kernel was chosen for the class of their rows.

Bugs these tests have been seen to catch are at the end of each docstring.
"""

import logging

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.flashinfer.device_kernels import CudaLinear
from faser.kernels.cuda.flashinfer.product_kernels import ProductKernels
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_kernels
from tests.kernels.cuda.flashinfer.chosen import Chosen
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer
from tests.kernels.cuda.flashinfer.fake_products import HANDLE, FakeCublasLt, FakeTinyGemm

OUTPUTS, INPUTS = 48, 128
CPU = torch.device("cpu")


def backend_of(chosen: Chosen | None, *modules: FakeCublasLt | FakeTinyGemm) -> FlashInferBackend:
    """With FlashInfer's products as modules have them."""
    names = {FakeCublasLt: "cublaslt", FakeTinyGemm: "tinygemm"}
    accelerator = FakeAccelerator()

    def products() -> ProductKernels:
        return ProductKernels(CPU, {names[type(each)]: each for each in modules}, lambda: HANDLE)

    return FlashInferBackend(
        accelerator, FakeFlashInfer(accelerator), fake_kernels(accelerator), None, chosen, products
    )


def random(*size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(backend: FlashInferBackend, *, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> CudaLinear:
    found = backend.pack(
        random(OUTPUTS, INPUTS, dtype=dtype) / INPUTS**0.5, random(OUTPUTS, dtype=dtype, seed=1) if bias else None
    )
    assert isinstance(found, CudaLinear)
    return found


@pytest.mark.parametrize("way", ["algorithm 0", "algorithm 2", "tinygemm"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 13, 64])
@pytest.mark.parametrize("adds", ["nothing", "another", "what is there"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_is_torchs(way: str, bias: bool, rows: int, adds: str, dtype: torch.dtype) -> None:
    """All ways agree on the measured rows too. Caught: a residual overwritten before it is added; a bias lost."""
    lt, tiny = FakeCublasLt(), FakeTinyGemm()
    ours, plain = backend_of(Chosen(way, "torch", computes="product"), lt, tiny), backend_of(None)
    x = random(rows, INPUTS, seed=2)
    found = []
    for backend in (ours, plain):
        out = random(rows, OUTPUTS, dtype=dtype, seed=3)
        residual = {"nothing": None, "another": random(rows, OUTPUTS, dtype=dtype, seed=4), "what is there": out}
        assert backend.linear(x, packed(backend, bias=bias), out, residual=residual[adds]) is out
        found.append(out)
    assert_close(*(each.float() for each in found), rtol=0, atol=2.0**-6 * float(found[1].abs().max()))
    by_tiny = rows <= 16 and dtype is torch.bfloat16
    by_lt = not bias or dtype is torch.bfloat16
    if way == "tinygemm":
        assert (tiny.runs[-1:] == [rows]) is by_tiny
    else:
        assert (lt.runs[-1:] == [(int(way[-1]), rows)]) is by_lt


def test_one_way_is_chosen_for_each_class_of_rows() -> None:
    """Caught: a choice for another shape or residual taken; measured again for each number of rows."""
    chosen, lt = Chosen("algorithm 1"), FakeCublasLt()
    backend = backend_of(chosen, lt)
    product = packed(backend)
    for rows in (9, 16, 12, 17, 32, 33, 65, 129, 257, 512, 1, 8):
        backend.linear(random(rows, INPUTS), product, random(rows, OUTPUTS))
        assert lt.runs[-1] == (1, rows)
    assert chosen.keys == [
        f"product, up to {most} rows, 48 x 128, bfloat16 to bfloat16" for most in (16, 32, 64, 128, 256, 512, 8)
    ]
    out = random(9, OUTPUTS)
    backend.linear(random(9, INPUTS), product, out, residual=out)
    assert chosen.keys[-1] == "product, up to 16 rows, 48 x 128, bfloat16 to bfloat16, residual"


def test_what_flashinfer_does_not_compute_stays_torchs() -> None:
    """Caught: rows apart in memory read as if they were dense."""
    chosen, lt = Chosen("algorithm 0"), FakeCublasLt()
    backend = backend_of(chosen, lt)
    apart = random(4, 2 * INPUTS)[:, :INPUTS]
    for x, dtype in (
        (random(513, INPUTS), torch.bfloat16),
        (random(4, INPUTS, dtype=torch.float16), torch.float16),
        (apart, torch.bfloat16),
        (random(0, INPUTS), torch.bfloat16),
    ):
        product = packed(backend, dtype=dtype)
        found = backend.linear(x, product, x.new_empty((len(x), OUTPUTS)))
        assert torch.equal(found, torch.mm(x, product.weight.t()))
    assert lt.runs == []
    assert chosen.keys == []


def test_a_result_too_large_to_measure_stays_torchs() -> None:
    """Just over 64 MiB of it are those of 512 rows by 32,769 tokens, in float32."""
    lt = FakeCublasLt()
    backend = backend_of(Chosen("algorithm 0"), lt)
    head = CudaLinear(torch.zeros(((1 << 15) + 1, 1), dtype=torch.bfloat16), None)
    for rows in (512, 256, 257):
        backend.linear(random(rows, 1), head, torch.empty((rows, (1 << 15) + 1), dtype=torch.float32))
    assert {rows for _, rows in lt.runs} == {256}


def test_rows_that_an_algorithm_refuses_are_left_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    """Caught: refused in each step anew."""
    lt = FakeCublasLt(refused=24)
    backend = backend_of(Chosen("algorithm 0"), lt)
    product = packed(backend)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            for rows in (20, 24):
                x = random(rows, INPUTS)
                found = backend.linear(x, product, x.new_empty((rows, OUTPUTS)))
                assert_close(found, torch.mm(x, product.weight.t()), rtol=2.0**-6, atol=2.0**-6)
    assert lt.runs[-3:] == [(0, 20)] * 3
    assert [each.getMessage().partition(":")[0] for each in caplog.records] == [
        "products of 24 rows are left to torch"
    ]


def test_products_of_a_lane_are_torchs_and_other_instances_have_their_own() -> None:
    made: list[ProductKernels] = []
    lt, accelerator = FakeCublasLt(), FakeAccelerator()

    def products() -> ProductKernels:
        made.append(ProductKernels(CPU, {"cublaslt": lt}, lambda: HANDLE))
        return made[-1]

    backend = FlashInferBackend(
        accelerator, FakeFlashInfer(accelerator), fake_kernels(accelerator), None, Chosen("algorithm 0"), products
    )

    def run(backend: FlashInferBackend) -> None:
        backend.linear(random(4, INPUTS), packed(backend), random(4, OUTPUTS))

    assert made == []
    torch._C._set_sm_carveout_experimental(120)
    try:
        run(backend)
    finally:
        torch._C._set_sm_carveout_experimental(None)
    assert (made, lt.runs) == ([], [])
    for _ in range(2):
        run(backend)
    assert (len(made), lt.runs[-2:]) == (1, [(0, 4)] * 2)
    run(backend.concurrent_instance())
    assert len(made) == 2
