"""Products of weights with scales of blocks are those of the Triton kernel by whichever way was chosen.

A bug that these tests have been seen to catch: FlashInfer's product for blocks that it does not take.
"""

import inspect
import logging
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.flashinfer.grouped_products import GroupedProducts
from faser.kernels.cuda.flashinfer.product_kernels import load_blockscale
from faser.kernels.cuda.triton.scaled_fp8 import ScaledFp8
from faser.kernels.interface.fp8 import Fp8Linear, Fp8Rows, quantise_rows
from tests.engine.checkpoints.fp8_checkpoints import quantised_blocks
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_kernels
from tests.kernels.cuda.flashinfer.chosen import Chosen
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer

CPU = torch.device("cpu")


class FakeRunner:
    """FlashInfer's runner of blocks, on a CPU: it quantises rows by groups of 128, as the real one does."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._workspace = 0

    def get_workspace_size(self, shape_m: int, shape_n: int, shape_k: int) -> int:
        return shape_m * shape_k + shape_n

    def configure_workspace(self, workspace: Tensor) -> None:
        self._workspace = workspace.nbytes

    def run_gemm(
        self, input: Tensor, weight: Tensor, output: Tensor, scales_a: Tensor | None, scales_b: Tensor | None
    ) -> None:
        (rows, inputs), outputs = input.shape, len(weight)
        assert input.dtype is torch.bfloat16 is output.dtype
        assert scales_a is None, "rows in 16 bits have no scales"
        assert scales_b is not None
        assert inputs % 128 == 0
        assert outputs % 64 == 0
        assert scales_b.shape == (-(-outputs // 128), inputs // 128)
        assert self._workspace >= self.get_workspace_size(rows, outputs, inputs)
        self.rows.append(rows)
        wide = scales_b.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)
        output.copy_(quantise_rows(input, 128).dequantised() @ (weight.float() * wide).t())


def backend_of(chosen: Chosen | None, runner: FakeRunner | None) -> FlashInferBackend:
    accelerator = FakeAccelerator()
    return FlashInferBackend(
        accelerator,
        FakeFlashInfer(accelerator),
        fake_kernels(accelerator),
        ScaledFp8(CPU),
        chosen,
        blockscale=lambda: runner,
    )


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weight(outputs: int = 192, inputs: int = 256, block: tuple[int, int] = (128, 128)) -> Fp8Rows:
    values, scales = quantised_blocks(random(outputs, inputs, seed=1).float() / inputs**0.5, block)
    return Fp8Rows(values=values, scales=scales.repeat_interleave(block[0], 0)[:outputs], group=block[1])


@pytest.mark.parametrize("way", ["blockscale", "16 rows x 32 outputs", "tiles"])
@pytest.mark.parametrize("adds", ["nothing", "another", "what is there"])
def test_a_product_is_that_of_the_weights(way: str, adds: str) -> None:
    runner = FakeRunner()
    ours = backend_of(Chosen(way, "tiles", computes="product"), runner)
    x, packed, found = random(12, 256, seed=2), weight(), random(12, 192, seed=3)
    residual = {"nothing": None, "another": random(12, 192, seed=4), "what is there": found}[adds]
    wanted = x.double() @ packed.dequantised().double().T + (0 if residual is None else residual.double())
    assert ours.linear(x, ours.pack(packed), found, residual=residual) is found
    limit = 2.0**-4 if way == "blockscale" else 2.0**-7
    assert_close(found.double(), wanted, rtol=0, atol=limit * float(wanted.abs().max()))
    assert (runner.rows[-1:] == [12]) is (way == "blockscale")


@pytest.mark.parametrize(
    "packed, bias, dtype",
    [
        (weight(block=(64, 128)), None, torch.bfloat16),
        (weight(block=(128, 64)), None, torch.bfloat16),
        (weight(outputs=208), None, torch.bfloat16),
        (weight(inputs=192), None, torch.bfloat16),
        (weight(), random(192), torch.bfloat16),
        (weight(), None, torch.float32),
    ],
)
def test_flashinfer_has_products_of_some_sizes_only(
    packed: Fp8Rows, bias: Tensor | None, dtype: torch.dtype
) -> None:
    made = backend_of(None, None).pack(packed, bias)
    assert isinstance(made, Fp8Linear)
    outputs, inputs = packed.shape
    ways = GroupedProducts(FakeRunner).ways(random(4, inputs), made, torch.empty((4, outputs), dtype=dtype))
    assert list(ways) == ["16 rows x 32 outputs"]
    made = backend_of(None, None).pack(weight())
    assert isinstance(made, Fp8Linear)
    assert "blockscale" in GroupedProducts(FakeRunner).ways(random(4, 256), made, random(4, 192))
    assert "blockscale" not in GroupedProducts(lambda: None).ways(random(4, 256), made, random(4, 192))


def test_a_product_that_cannot_be_loaded_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def load(_name: str) -> Any:
        raise RuntimeError("no nvcc")

    with caplog.at_level(logging.WARNING):
        assert load_blockscale(load) is None
    assert "products by blockscale are not tried: no nvcc; to compile: faser env --build-kernels" in caplog.text


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")
def test_the_emulation_takes_what_flashinfers_runner_takes() -> None:
    """Oracle: the package's sources, without importing it."""
    spec = find_spec("flashinfer")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "data" / "csrc" / "fp8_blockscale_gemm_sm90_binding.cu"
    text = source.read_text("utf-8")
    for name, function in (("runGemm", FakeRunner.run_gemm), ("getWorkspaceSize", FakeRunner.get_workspace_size)):
        found = re.search(rf"\w+ {name}\(([^)]*)\)", text)
        assert found is not None, name
        given = [each.split()[-1] for each in found[1].split(",")]
        assert given == list(inspect.signature(function).parameters)[1:], name
    for name in ("run_gemm", "get_workspace_size", "configure_workspace"):
        assert f'name == "{name}"' in text
    assert "set_deepgemm_jit_include_dirs" in (source.parent / "fused_moe/cutlass_backend").joinpath(
        "deepgemm_jit_setup.cu"
    ).read_text("utf-8")
