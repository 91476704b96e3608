"""A whole Gemma 4 on FASER's own kernels, in Triton's interpreter: what the backend hands them fits, and is right.

Attention itself is FlashInfer's, and emulated. Oracle: the reference backend in float32; the bound is what float16
costs it. Planted: experts without their scales, of the model that has any.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.flashinfer.device_kernels import triton_kernels
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer
from tests.kernels.cuda.flashinfer.test_model import GEMMA4_KINDS, logits, write_gemma4
from tests.kernels.cuda.triton.rows import DEVICE


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(DEVICE == "cuda", reason="the attention is emulated on a CPU")
@pytest.mark.parametrize("kind", GEMMA4_KINDS)
def test_gemma_4_says_what_it_says_on_the_reference_backend(kind: str, tmp_path: Path) -> None:
    write_gemma4(tmp_path, kind)
    wanted = logits(TorchBackend(), tmp_path, torch.float32)

    def error(found: Tensor) -> float:
        return float((found - wanted).square().mean().sqrt())

    bound = 1.2 * error(logits(TorchBackend(), tmp_path, torch.float16))
    device = FakeAccelerator()
    backend = FlashInferBackend(device, FakeFlashInfer(device), triton_kernels(device.device))
    assert error(logits(backend, tmp_path, torch.float16)) <= bound
