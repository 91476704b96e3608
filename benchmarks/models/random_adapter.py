"""Writes a LoRA adapter with random weights for all linear layers of a model: in PEFT's format, or as a GGUF file.

    python -m benchmarks models.random_adapter OUT MODEL [--rank 16] [--seed 0]

OUT is a folder, or a .gguf file. MODEL is a directory, a .gguf file, or the name of the default model. What the
adapter says means nothing; its products take as long as those of a real one.
"""

import json
import re
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file

from benchmarks.runner import command_line
from faser.config.environment import cache_dir
from faser.engine.checkpoints.files import gguf_file, read_model_config
from faser.engine.checkpoints.gguf.file import GgufFile
from faser.engine.checkpoints.source import resolve
from faser.engine.execution.models.tensors import iter_shapes

_LINEAR = re.compile(r"model\.layers\.(\d+)\.(\w+\.(\w+_proj))\.weight")
_GGUF = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_SIZE = 0.02  # standard deviation of a weight: answers remain text


def random_adapter(out: Path, model: Path, *, rank: int, seed: int) -> None:
    """Write an adapter. model: a directory or a GGUF file. Scale: 1."""
    rng = torch.Generator().manual_seed(seed)
    factors = {
        match: (
            _SIZE * torch.randn(rank, shape[1], generator=rng),
            _SIZE * torch.randn(shape[0], rank, generator=rng),
        )
        for name, shape in iter_shapes(read_model_config(model).spec)
        if (match := _LINEAR.fullmatch(name)) is not None
    }
    if out.suffix != ".gguf":
        out.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"base_model.model.{match[0].removesuffix('.weight')}.lora_{letter}.weight": factor
            for match, pair in factors.items()
            for letter, factor in zip("AB", pair, strict=True)
        }
        save_file(tensors, out / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,
            "bias": "none",
            "target_modules": sorted({match[3] for match in factors}),
        }
        (out / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        return
    writer = GGUFWriter(out, _architecture(model))
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for match, pair in factors.items():
        for letter, factor in zip("ab", pair, strict=True):
            name = f"blk.{match[1]}.{_GGUF[match[3]]}.weight.lora_{letter}"
            writer.add_tensor(name, np.ascontiguousarray(factor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _architecture(model: Path) -> str:
    """Return the name that llama.cpp has for the architecture of a model."""
    file = gguf_file(model)
    return "llama" if file is None else str(GgufFile(file).get("general.architecture", str))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("OUT", type=Path)
    parser.add_argument("MODEL")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    model = resolve(given.MODEL, cache_dir(), progress=lambda *_: None)
    random_adapter(given.OUT, model, rank=given.rank, seed=given.seed)
