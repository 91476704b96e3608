"""Tiny checkpoints whose products are integers with scales, in every layout that is read, and what they stand for.

Written from the formats' documents by arithmetic on words; the package unpacks bytes.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.checkpoints.fp8_checkpoints import is_product

Integers = npt.NDArray[np.int64]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of checkpoint. groups: [K], the group of every column; order: whether they are shuffled."""

    layout: str
    bits: int = 4
    group_size: int = 32
    symmetric: bool = False
    version: int = 1
    shuffled: bool = False
    scales: torch.dtype = torch.float16

    @property
    def config(self) -> dict[str, Any]:
        if self.layout == "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.group_size,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": None,
            }
        if self.layout == "gptq":
            return {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": self.group_size,
                "damp_percent": 0.01,
                "desc_act": self.shuffled,
                "sym": self.symmetric,
                "true_sequential": True,
                "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
            }
        return compressed_integers(
            self.layout,
            num_bits=self.bits,
            symmetric=self.symmetric,
            strategy="channel" if self.group_size == -1 else "group",
            group_size=None if self.group_size == -1 else self.group_size,
            actorder="group" if self.shuffled else None,
        )


def compressed_integers(layout: str, *, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """quantization_config of compressed-tensors, with every field that the library writes."""
    group = {
        "input_activations": inputs,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {
            "actorder": None,
            "block_structure": None,
            "dynamic": False,
            "group_size": None,
            "num_bits": 8,
            "observer": "minmax",
            "observer_kwargs": {},
            "strategy": "channel",
            "symmetric": True,
            "type": "int",
        }
        | weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": layout,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


DYNAMIC_BYTES = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}


def words(integers: Integers, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [..., C bits / 32]: integers of the last axis, the first in the lowest bits."""
    each = 32 // bits
    places = np.arange(each) if order is None else np.array(order)
    parts = integers.reshape(*integers.shape[:-1], -1, each)[..., places]
    packed = (parts << (bits * np.arange(each))).sum(-1)
    return torch.from_numpy(np.ascontiguousarray(packed.astype(np.uint32)).view(np.int32)).contiguous()


def stored_product(kind: Kind, name: str, shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a product called name, and the float32 weight [N, K] that they stand for."""
    rng = np.random.default_rng(seed)
    rows, depth = shape
    size = depth if kind.group_size == -1 else kind.group_size
    middle = 1 << kind.bits - 1
    codes = rng.integers(0, 2 * middle, shape)
    num_groups = depth // size
    zeros = rng.integers(0, 2 * middle, (rows, num_groups))
    if kind.symmetric:
        zeros[:] = middle
    sizes = torch.from_numpy(rng.uniform(0.2, 1.8, (rows, num_groups)) * 0.2 / middle)
    scales = sizes.to(kind.scales)
    groups = np.arange(depth) // size
    if kind.shuffled:
        groups = np.random.default_rng(depth).permutation(groups)  # one order for products of the same input
    dense = (codes - zeros[:, groups]) * scales.double().numpy()[:, groups]
    return _tensors(kind, name, codes, zeros, scales, groups), torch.from_numpy(dense).float()


def _tensors(
    kind: Kind, name: str, codes: Integers, zeros: Integers, scales: Tensor, groups: Integers
) -> dict[str, Tensor]:
    if kind.layout == "awq":
        return {
            f"{name}.qweight": words(codes.T, 4, _AWQ_ORDER),
            f"{name}.qzeros": words(zeros.T, 4, _AWQ_ORDER),
            f"{name}.scales": scales.t().contiguous(),
        }
    if kind.layout == "gptq":
        shown = (zeros - 1) % (1 << kind.bits) if kind.version == 1 else zeros
        return {
            f"{name}.qweight": words(codes, kind.bits).t().contiguous(),
            f"{name}.qzeros": words(shown.T, kind.bits),
            f"{name}.scales": scales.t().contiguous(),
            f"{name}.g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
    middle = 1 << kind.bits - 1
    found = {f"{name}.weight_scale": scales}
    if kind.layout == "int-quantized":
        found[f"{name}.weight"] = torch.from_numpy((codes - middle).astype(np.int8))
        if not kind.symmetric:
            found[f"{name}.weight_zero_point"] = torch.from_numpy((zeros - middle).astype(np.int8))
        return found
    found[f"{name}.weight_packed"] = words(codes, kind.bits)
    found[f"{name}.weight_shape"] = torch.tensor(codes.shape)
    if not kind.symmetric:
        found[f"{name}.weight_zero_point"] = words(zeros.T, kind.bits).t().contiguous()
    if kind.shuffled:
        found[f"{name}.weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return found


KINDS = {
    "awq": Kind(layout="awq"),
    "awq-64": Kind(layout="awq", group_size=64),
    "gptq": Kind(layout="gptq", symmetric=True),
    "gptq-asymmetric": Kind(layout="gptq"),
    "gptq-v2": Kind(layout="gptq", version=2),
    "gptq-8-bits": Kind(layout="gptq", bits=8, group_size=-1, symmetric=True),
    "gptq-8-bits-asymmetric": Kind(layout="gptq", bits=8),
    "gptq-desc-act": Kind(layout="gptq", shuffled=True),
    "w4a16": Kind(layout="pack-quantized", symmetric=True, scales=torch.bfloat16),
    "w4a16-asymmetric": Kind(layout="pack-quantized", group_size=64, scales=torch.bfloat16),
    "w4a16-channel": Kind(layout="pack-quantized", group_size=-1, symmetric=True, scales=torch.float32),
    "w4a16-actorder": Kind(layout="pack-quantized", symmetric=True, shuffled=True),
    "w8a16": Kind(layout="pack-quantized", bits=8, symmetric=True, scales=torch.bfloat16),
    "w8a8": Kind(layout="int-quantized", bits=8, group_size=-1, symmetric=True, scales=torch.bfloat16),
    "w8a8-asymmetric": Kind(layout="int-quantized", bits=8, group_size=-1, scales=torch.bfloat16),
}


def write_pair(
    directory: Path,
    kind: Kind,
    *,
    plain: tuple[str, ...] = (),
    more: dict[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> tuple[Path, Path]:
    """A quantised checkpoint, and one in float32 of what it stands for. plain: parts of names that stay floats."""
    config = tiny_llama_config() | {"torch_dtype": str(dtype).removeprefix("torch.")} | fields
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for seed, (name, weight) in enumerate(random_weights(llama_shapes(config)).items()):
        if not is_product(name) or any(part in name for part in plain):
            stored[name] = dense[name] = weight
            continue
        rows, depth = weight.shape
        found, wanted = stored_product(kind, name.removesuffix(".weight"), (rows, depth), seed)
        stored |= found
        dense[name] = wanted
    write_checkpoint(directory / "low_bit", config | {"quantization_config": kind.config}, stored | (more or {}))
    write_checkpoint(directory / "plain", config, dense)
    return directory / "low_bit", directory / "plain"


def write_mixture(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a mixture of four experts in float32. Returns its config and tensors."""
    fields = {"vocab_size": 97, "head_dim": 64, "num_hidden_layers": 2, "num_experts": 4}
    fields |= {"num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
    write_family_model(directory, "qwen3_moe", fields)
    return json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")


def write_mixture_pair(directory: Path, kind: Kind) -> tuple[Path, Path]:
    """The mixture with experts of this kind, and in float32 of what they stand for."""
    config, dense = write_mixture(directory / "plain")
    stored: dict[str, Tensor] = {}
    for seed, (name, weight) in enumerate(dense.items()):
        if ".experts." not in name:
            stored[name] = weight
            continue
        rows, depth = weight.shape
        found, dense[name] = stored_product(kind, name.removesuffix(".weight"), (rows, depth), seed)
        stored |= found
    save_file(dense, directory / "plain" / "model.safetensors", {"format": "pt"})
    write_checkpoint(directory / "low_bit", config | {"quantization_config": kind.config}, stored)
    return directory / "low_bit", directory / "plain"
