"""Families that are published in 8-bit floats with scales of blocks.

Oracle: transformers, with the numbers that values and scales stand for.

Bugs these tests have been seen to catch: gate's scales for up, those of the next expert.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.interface.backend import Backend
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import write_json
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.checkpoints.fp8_checkpoints import FP8_BLOCKS, quantised_blocks, spread
from tests.engine.checkpoints.test_families import CASES, logits_of, native, stacked
from tests.engine.execution.models.paged import load, prompt
from tests.engine.execution.models.test_stored_fp8 import WithoutFp8, distance

__all__ = ["native"]

BLOCK = (32, 32)
PROMPT = prompt(24, 97)
PRODUCTS = ("_proj.weight", ".in_proj_qkv.weight", ".in_proj_z.weight", ".in_proj_qkvz.weight")


def publish(directory: Path, name: str, *, stack: bool, **changes: Any) -> tuple[Path, Path]:
    """Write a family's seeded model in blocks of 8-bit floats, and a plain one of what they stand for.

    stack: all experts of a layer in one tensor, of the first. changes: of the family's fields.
    """
    case = next(case for case in CASES if case.name == name)
    fields = case.fields | {"hidden_size": 160, "intermediate_size": 96} | changes
    plain, fp8 = directory / "plain", directory / "fp8"
    write_family_model(plain, case.model_type, fields)
    config = json.loads((plain / "config.json").read_text())
    weights = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for each, weight in weights.items():
        if each.endswith(PRODUCTS):
            stored[each], stored[f"{each}_scale_inv"] = quantised_blocks(weight, BLOCK)
            scales = spread(stored[f"{each}_scale_inv"], BLOCK)[: len(weight), : weight.shape[1]]
            weights[each] = stored[each].float() * scales
        else:
            stored[each] = weight
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    if stack:
        of_experts = stacked(stored, 7, "weight_scale_inv")
        stored = stacked(stored, 7)
        stored |= {f"{each}_scale_inv": of_experts[each] for each in of_experts if each.endswith("_proj")}
    fp8.mkdir()
    save_file(stored, fp8 / "model.safetensors")
    config["quantization_config"] = FP8_BLOCKS | {"weight_block_size": list(BLOCK)}
    write_json(fp8 / "config.json", config)
    return fp8, plain


def found(directory: Path, backend: Backend, **options: Any) -> Tensor:
    return load(directory, backend=backend, **options).prefill(PROMPT, (1, 13, 5))


@pytest.mark.parametrize(
    "name, stack",
    [("qwen3", False), ("qwen3-moe", False), ("qwen3.5-moe", True), ("qwen3.5-moe", False), ("qwen3-next", False)],
)
def test_a_published_checkpoint_says_what_it_says_in_transformers(
    name: str, stack: bool, tmp_path: Path, native: NativeBackend
) -> None:
    """Dequantised, but for the order of sums; as integers it is nearer than in the checkpoint's own arithmetic."""
    fp8, plain = publish(tmp_path, name, stack=stack)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    wanted = logits_of(model, PROMPT)
    torch.testing.assert_close(found(fp8, WithoutFp8()), wanted, atol=2e-4, rtol=0)
    by_integers, own = (distance(found(fp8, each), wanted) for each in (native, TorchBackend()))
    assert 0.001 < by_integers < own, (by_integers, own)
