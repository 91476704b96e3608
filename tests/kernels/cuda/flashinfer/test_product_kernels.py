"""The calls of FlashInfer's compiled functions have its arguments in its order, and missing modules no ways."""

import inspect
import logging
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from faser.kernels.cuda.flashinfer.build import Module, product_modules
from faser.kernels.cuda.flashinfer.product_kernels import MOST_ALGORITHMS, ProductKernels, load_products
from tests.kernels.cuda.flashinfer.fake_products import HANDLE, FakeCublasLt, FakeTinyGemm, fake_modules

CPU = torch.device("cpu")


def names_of(
    rows: int, outputs: int, inputs: int, *, dtype: torch.dtype = torch.bfloat16, count: int = 3
) -> list[str]:
    modules = fake_modules(cublaslt=FakeCublasLt(count), tinygemm=FakeTinyGemm())
    x, weight = (torch.zeros(size, dtype=torch.bfloat16) for size in ((rows, inputs), (outputs, inputs)))
    out = torch.zeros((rows, outputs), dtype=dtype)
    return list(ProductKernels(CPU, modules, lambda: HANDLE).ways(x, weight, None, out))


def test_each_size_has_the_kernels_that_take_it() -> None:
    algorithms = [f"algorithm {number}" for number in range(3)]
    assert names_of(16, 48, 128) == [*algorithms, "tinygemm"]
    for rows, outputs, inputs in ((17, 48, 128), (4, 40, 128), (4, 48, 96)):
        assert names_of(rows, outputs, inputs) == algorithms
    assert names_of(4, 48, 128, dtype=torch.float32) == algorithms
    assert len(names_of(32, 48, 128, count=50)) == MOST_ALGORITHMS
    assert names_of(32, 48, 128, count=0) == []


def test_a_module_that_cannot_be_loaded_is_named_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def load(name: str) -> object:
        if name == "cublaslt":
            raise OSError("libcublasLt.so.13: cannot open shared object file\nand more")
        return name

    with caplog.at_level(logging.WARNING):
        assert load_products(product_modules("8.0 9.0a"), load) == {"tinygemm": "tinygemm"}
    (warning,) = caplog.records
    assert warning.getMessage() == (
        "products by cublaslt are not tried: libcublasLt.so.13: cannot open shared object file; "
        "to compile: faser env --build-kernels --only cublaslt"
    )


def test_ampere_has_no_tinygemm() -> None:
    assert product_modules("8.6") == (Module(name="cublaslt"),)
    assert {each.own_name for each in product_modules("8.0 9.0a")} == {"mm_bf16_cublaslt", "tinygemm2"}


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")
@pytest.mark.parametrize(
    "source, fake, names",
    [
        ("mm_bf16_cublaslt.cu", FakeCublasLt, ("mm_bf16_cublaslt_get_algos", "mm_bf16_cublaslt_run_with_algo")),
        ("tinygemm2.cu", FakeTinyGemm, ("tinygemm2_op", "tinygemm2_nobias_op")),
    ],
)
def test_the_emulation_takes_what_flashinfers_functions_take(
    source: str, fake: type, names: tuple[str, ...]
) -> None:
    """Oracle: the package's sources, without importing it."""
    spec = find_spec("flashinfer")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "data" / "csrc" / source).read_text("utf-8")
    for name in names:
        found = re.search(rf"^\w+ {name}\(([^)]*)\)", text, re.MULTILINE)
        assert found is not None, name
        given = [each.split()[-1] for each in found[1].split(",")]
        assert given == list(inspect.signature(getattr(fake, name)).parameters)[1:]
