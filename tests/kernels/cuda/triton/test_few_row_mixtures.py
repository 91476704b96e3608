"""Models whose mixtures are computed in three launches up to 8 rows, where that was measured to be faster.

Oracle: the separate launches, whose error is measured against the reference backend in float32. Planted: the
measured rows as results, no norm of the router's, experts counted while ways are measured.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from faser.engine.execution.models.loader import load_decoder
from faser.kernels.cuda.choices import Choices
from faser.kernels.cuda.device import CudaDevice
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.flashinfer.device_kernels import triton_kernels
from faser.kernels.cuda.flashinfer.few_row_mixtures import MOST_ROWS
from faser.kernels.cuda.triton.experts import FEW_ROWS
from faser.kernels.cuda.triton.few_row_experts import FEW_ROW_TILES
from faser.kernels.interface.backend import Backend
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.execution.models.paged import MAX_POSITIONS, PagedModel, Rows, prompt
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer
from tests.kernels.cuda.flashinfer.test_model import write_gemma4
from tests.kernels.cuda.triton.rows import DEVICE

KINDS = ("qwen3_5_moe_text", "qwen3_moe", "gpt_oss", "gemma4")
_FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "layer_types": ["full_attention"] * 2,
}


class Measured:
    """A clock by which the way that is timed after all the others is the fastest."""

    def __init__(self) -> None:
        self.now = 1.0

    def seconds(self, work: Callable[[], Tensor]) -> float:
        work()
        self.now *= 0.9
        return self.now


def backend_of(choices: Choices | None) -> FlashInferBackend:
    """With FASER's own kernels as on a GPU, but those of other units of few rows."""
    emulated = FakeAccelerator()
    device = CudaDevice(torch.device(DEVICE, 0)) if DEVICE == "cuda" else emulated
    kernels = replace(triton_kernels(device.device), few_rows=None, few_row_attention=None)
    return FlashInferBackend(device, FakeFlashInfer(emulated), kernels, None, choices)


def steps() -> list[list[Rows]]:
    """Read in one step of many rows, verify drafts, decode."""
    first, second = prompt(40, VOCAB_SIZE, seed=1), prompt(40, VOCAB_SIZE, seed=2)
    return [
        [Rows(0, 0, first[:9]), Rows(1, 0, second[:3])],
        [Rows(0, 9, first[9:14], num_drafts=4), Rows(1, 3, second[3:5])],
        [Rows(1, 5, second[5:6])],
    ]


def logits(backend: Backend, checkpoint: Path, dtype: torch.dtype) -> Tensor:
    decoder = load_decoder(
        checkpoint, backend, dtype, max_model_len=MAX_POSITIONS, max_rows=MAX_POSITIONS, progress=lambda *_: None
    )
    model = PagedModel(decoder, backend, num_sequences=2)
    return torch.cat([model.step(batch) for batch in steps()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full(but=KINDS[:1])
def test_a_model_says_the_same_with_fewer_launches(kind: str, tmp_path: Path) -> None:
    assert MOST_ROWS == FEW_ROWS
    if kind == "gemma4":
        write_gemma4(tmp_path, "as 26B-A4B")
    else:
        write_family_model(tmp_path, kind, _FIELDS)
    wanted = logits(TorchBackend(), tmp_path, torch.float32)

    def error(backend: Backend) -> float:
        return float((logits(backend, tmp_path, torch.float16) - wanted).square().mean().sqrt())

    separate = backend_of(None)
    kept = tmp_path / "choices.json"
    fewer = backend_of(Choices(Measured(), kept))
    assert error(fewer) <= 1.3 * error(separate) < 0.05 * float(wanted.std())
    assert fewer.experts_read == separate.experts_read > 0
    chosen = json.loads(kept.read_text())["chosen"]
    assert set(chosen.values()) == {list(FEW_ROW_TILES)[-1]}
    assert {key.split(", ")[1] for key in chosen} == {"7 rows", "1 rows"}


def test_a_shared_expert_of_another_size_leaves_the_separate_launches(tmp_path: Path) -> None:
    write_family_model(tmp_path, "qwen3_5_moe_text", _FIELDS | {"shared_expert_intermediate_size": 48})
    kept = tmp_path / "choices.json"
    logits(backend_of(Choices(Measured(), kept)), tmp_path, torch.float16)
    assert not kept.exists()
