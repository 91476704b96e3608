"""Tiny models of any family, made by transformers from a seed and saved as it saves them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM


def write_family_model(directory: Path, model_type: str, fields: dict[str, Any]) -> Any:
    """Returns the model, in float32. fields: of its config, over the common ones."""
    common = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = AutoConfig.for_model(model_type, **(common | fields))
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    shake_norms(model)
    model.save_pretrained(directory)
    return model


@torch.no_grad()
def shake_norms(model: torch.nn.Module) -> None:
    """Norms, scales, biases, made as ones and zeros, would hide mistakes; so would gates that no clamp reaches."""
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj_bias", "sinks")):
            parameter.add_(3 * torch.randn_like(parameter))
        elif "norm" in name or name.endswith(("bias", "router.scale", "per_expert_scale")):
            parameter.add_(0.3 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.mul_(0.6 + 0.6 * torch.rand_like(buffer))
        elif name.endswith("expert_bias"):
            buffer.add_(0.3 * torch.randn_like(buffer))


def store_in_mxfp4(directory: Path) -> None:
    """Round the experts of a gpt-oss in this directory to MXFP4, and store them as the hub has them."""
    path = directory / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, values in load_file(path).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors |= {f"{name}_{part}": each for part, each in _mxfp4(values.mT.contiguous()).items()}
        else:
            tensors[name] = values
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn"],
    }
    (directory / "config.json").write_text(json.dumps(config))


def _mxfp4(weight: Tensor) -> dict[str, Tensor]:
    """blocks [E, N, K / 32, 16], two neighbours a byte, and scales [E, N, K / 32], of [E, N, K].

    Rounded by the package gguf, whose blocks have a scale, then values i and i + 16 in a byte.
    """
    found = quants.quantize(weight.float().numpy(), GGMLQuantizationType.MXFP4)
    scales, halves = np.split(found.reshape(*weight.shape[:2], -1, 17), [1], axis=-1)
    codes = np.concatenate((halves & 15, halves >> 4), -1)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return {"blocks": torch.from_numpy(pairs), "scales": torch.from_numpy(scales[..., 0].copy())}
