"""Tiny checkpoints whose products are stored as 8-bit floats, in the formats that are read, and plain twins."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from faser.kernels.interface.fp8 import FP8, FP8_MAX
from tests.checkpoints import llama_shapes, random_weights, tiny_llama_config, write_checkpoint

FP8_DYNAMIC: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "ignored_layers": ["lm_head"],
}
FP8_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
}
FP8_STATIC = FP8_DYNAMIC | {"activation_scheme": "static"}


def arguments(**changes: Any) -> dict[str, Any]:
    """How weights or inputs are quantised, with every field that the library writes."""
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "channel",
        "symmetric": True,
        "type": "float",
    } | changes


def compressed_tensors(**changes: Any) -> dict[str, Any]:
    """quantization_config of a checkpoint with a scale a channel, and inputs quantised row by row."""
    group = {
        "input_activations": arguments(dynamic=True, observer=None, strategy="token"),
        "output_activations": None,
        "targets": ["Linear"],
        "weights": arguments(),
    }
    return {
        "config_groups": {"group_0": group | changes.pop("group", {})},
        "format": "float-quantized",
        "global_compression_ratio": 1.46,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    } | changes


def is_product(name: str) -> bool:
    return name.endswith(("_proj.weight", "experts.gate_up_proj", "experts.down_proj"))


def quantised(weight: Tensor, *, by_channel: bool) -> tuple[Tensor, Tensor]:
    """Values and scales, [N, 1] or [1], as other programs make them."""
    largest = weight.abs().amax(1, keepdim=True) if by_channel else weight.abs().amax().reshape(1)
    scales = largest / FP8_MAX
    return (weight / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


def quantised_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Values and scales of blocks [..., ceil(N / rows), ceil(K / columns)]; the last ones may be smaller."""
    rows, columns = weight.shape[-2:]
    down, across = -rows % block[0], -columns % block[1]
    padded = torch.nn.functional.pad(weight, (0, across, 0, down))
    down, across = (size // part for size, part in zip(padded.shape[-2:], block, strict=True))
    parts = padded.reshape(*weight.shape[:-2], down, block[0], across, block[1])
    scales = parts.abs().amax((-3, -1)) / FP8_MAX
    values = (weight / spread(scales, block)[..., :rows, :columns]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return values, scales


def spread(scales: Tensor, block: tuple[int, int]) -> Tensor:
    """The scale of each value of whole blocks."""
    return scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)


def stored_blocks(
    weights: dict[str, Tensor], block: tuple[int, int] = (128, 128), ending: str = "_scale_inv"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a checkpoint with scales of blocks, and of a plain one of what they stand for."""
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, weight in weights.items():
        stored[name] = plain[name] = weight
        if is_product(name):
            stored[name], scales = quantised_blocks(weight, block)
            stored[f"{name}{ending}"] = scales
            rows, columns = weight.shape[-2:]
            plain[name] = stored[name].float() * spread(scales, block)[..., :rows, :columns]
    return stored, plain


def stored_weights(
    weights: dict[str, Tensor], *, by_channel: bool, static: bool = False, plain: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """The tensors of a quantised checkpoint. plain: parts of names of products that stay as they are."""
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not is_product(name) or any(part in name for part in plain):
            stored[name] = weight
            continue
        values, scales = quantised(weight, by_channel=by_channel)
        stored |= {name: values, f"{name}_scale": scales}
        if static:
            stored[f"{name.removesuffix('.weight')}.input_scale"] = torch.tensor([0.05])
    return stored


def dequantised_weights(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the stored tensors stand for, in float32, under the names of a plain checkpoint."""
    return {
        name: tensor.float() * stored[f"{name}_scale"].float() if f"{name}_scale" in stored else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale")
    }


def write_pair(
    directory: Path, quantization: dict[str, Any], stored: dict[str, Tensor], **fields: Any
) -> tuple[Path, Path]:
    """A quantised checkpoint, and a plain one in float32 of what it stands for."""
    config = tiny_llama_config() | fields
    write_checkpoint(directory / "fp8", config | {"quantization_config": quantization}, stored)
    write_checkpoint(directory / "plain", config, dequantised_weights(stored))
    return directory / "fp8", directory / "plain"


def tiny_weights(**fields: Any) -> dict[str, Tensor]:
    return random_weights(llama_shapes(tiny_llama_config() | fields))
