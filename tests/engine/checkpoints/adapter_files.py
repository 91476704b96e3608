"""Small LoRA adapters on disk, as PEFT and as llama.cpp's converter write them."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints import llama_shapes, tiny_llama_config

PREFIX = "base_model.model."
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "init_lora_weights": True}


def tiny_modules(*ends: str) -> dict[str, tuple[int, int]]:
    """Return the linear modules of the layers of the tiny Llama that end so, with the shapes of their weights."""
    shapes = llama_shapes(tiny_llama_config())
    linear = {
        name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith("proj.weight")
    }
    return {name: (shape[0], shape[1]) for name, shape in linear.items() if name.endswith(ends or ("",))}


def random_factors(
    modules: Mapping[str, tuple[int, int]], rank: int, seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return lora_A [rank, in] and lora_B [out, rank] of each module, in float32."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: (0.2 * torch.randn(rank, depth, generator=rng), 0.2 * torch.randn(rows, rank, generator=rng))
        for name, (rows, depth) in modules.items()
    }


def write_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, int]] | None = None,
    *,
    rank: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write a folder in PEFT's format; returns it. config: fields of adapter_config.json over the usual ones."""
    folder.mkdir(parents=True, exist_ok=True)
    factors = random_factors(tiny_modules() if modules is None else modules, rank, seed)
    save_file(
        {
            f"{PREFIX}{name}.lora_{letter}.weight": factor.to(dtype)
            for name, pair in factors.items()
            for letter, factor in zip("AB", pair, strict=True)
        },
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {"r": rank} | config))
    return folder


def write_gguf_adapter(
    path: Path,
    factors: Mapping[str, tuple[Tensor, Tensor]],
    *,
    architecture: str = "llama",
    **metadata: Any,
) -> Path:
    """Write a GGUF adapter; returns its path. factors: by the names of tensors in GGUF files. metadata: over the
    usual one, with __ for a dot; None: the key is missing.
    """
    usual = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    writer = GGUFWriter(path, architecture)
    for key, value in (usual | {key.replace("__", "."): value for key, value in metadata.items()}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, (down, up) in factors.items():
        writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(down.numpy()))
        writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(up.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def adapt_by_peft(model: Any, folder: Path, *, seed: int, **config: Any) -> PeftModel:
    """Give a model of transformers an adapter of seeded values, and save that; config: of LoraConfig.

    lora_B is seeded as well: PEFT begins with zeros, which change nothing.
    """
    torch.manual_seed(seed)
    with warnings.catch_warnings():  # by PEFT, of what this version of transformers deprecates
        warnings.simplefilter("ignore")
        peft: PeftModel = get_peft_model(model, LoraConfig(**config))
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in peft.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=rng))
        peft.save_pretrained(str(folder))
    return peft.eval()
