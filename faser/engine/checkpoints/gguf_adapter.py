"""LoRA adapters in GGUF files, as convert_lora_to_gguf.py of llama.cpp writes them.

A tensor W of the model has two factors, W.lora_a [rank, in] and W.lora_b [out, rank]. adapter.lora.alpha is
divided by the rank; 0 stands for a scale of one. Rows of lora_b are in the order of the rows of W in a GGUF file.
Source: src/llama-adapter.cpp of ggml-org/llama.cpp.
"""

import math
import mmap
from pathlib import Path

import numpy as np

from faser.engine.checkpoints.adapter_parts import AdapterFile, Factors, Shape, checked_part, checked_parts
from faser.engine.checkpoints.families import gguf_architecture
from faser.engine.checkpoints.families.architecture import AttentionSpec, DecoderSpec
from faser.engine.checkpoints.gguf.file import READABLE, GgufFile
from faser.engine.checkpoints.gguf_weights import hub_name, unpermute
from faser.errors import ModelError
from faser.types.arrays import Floats32

_DOWN, _UP = ".lora_a", ".lora_b"
_TYPE, _KIND, _ALPHA = "general.type", "adapter.type", "adapter.lora.alpha"
_INVOCATION = "adapter.alora.invocation_tokens"


def open_gguf_adapter(path: Path, content: mmap.mmap, digest: str, *, max_rank: int) -> AdapterFile:
    """Return the adapter in the content of a file. Raises ModelError as open_adapter does."""
    file = GgufFile(path, content)
    _check(file)
    architecture, alpha = gguf_architecture(file), file.get(_ALPHA, float, 0.0)
    stored: dict[str, str] = {}  # names in the file, without the factor, by the modules on the hub
    for name in file.tensor_names():
        tensor, kind = name[: -len(_DOWN)], name[-len(_DOWN) :]
        if kind not in (_DOWN, _UP):
            raise ModelError(f"{path} has a tensor {name}; an adapter has {_DOWN} and {_UP} of tensors alone")
        if (stored_as := file.format(name)) not in READABLE:
            raise ModelError(f"{path}: {name} is stored as {stored_as}; supported are {', '.join(READABLE)}")
        stored[hub_name(tensor, architecture.tensors, None, path).removesuffix(".weight")] = tensor

    def shape(name: str) -> Shape | None:
        return file.shape(name) if file.has_tensor(name) else None

    def scale(rank: int) -> float:
        return alpha / rank if alpha else 1.0

    parts = {
        module: checked_part(path, name, shape(name + _DOWN), shape(name + _UP), scale, max_rank)
        for module, name in stored.items()
    }

    def factors(module: str, spec: DecoderSpec) -> Factors:
        import torch

        down, up = (file.array(stored[module] + each) for each in (_DOWN, _UP))
        up = _in_order(path, module, up, spec) if architecture.permuted else up
        return torch.from_numpy(np.require(down, np.float32, ["A", "W"])), torch.from_numpy(
            np.require(up, np.float32, ["A", "W"])
        )

    return AdapterFile(
        path=path,
        digest=digest,
        parts=checked_parts(path, parts),
        base=file.get("general.base_model.0.name", str),
        architecture=file.require("general.architecture", str),
        factors=factors,
        content=content,
    )


def _check(file: GgufFile) -> None:
    """Raise ModelError unless the file has a LoRA adapter, and all of it."""
    for key, wanted in ((_TYPE, "adapter"), (_KIND, "lora")):
        if (found := file.get(key, str)) != wanted:
            raise ModelError(f"{file.path}: {key} is {found!r}; that of a LoRA adapter is {wanted!r}")
    if file.has(_INVOCATION):
        raise ModelError(f"{file.path} has {_INVOCATION}; FASER does not support activation by tokens (aLoRA)")
    if file.get("split.count", int, 1) > 1:
        raise ModelError(f"{file.path} is one of several parts; an adapter must be one file")
    alpha = file.get(_ALPHA, float, 0.0)
    if not 0 <= alpha < math.inf:
        raise ModelError(f"{file.path}: {_ALPHA} is {alpha}; it must be 0 or more")


def _in_order(path: Path, module: str, up: Floats32, spec: DecoderSpec) -> Floats32:
    """Return the rows of queries and keys in the hub's order, others as they are."""
    number = int(module.split(".")[2])
    attention = spec.layers[number].attention if number < spec.num_layers else None
    if not isinstance(attention, AttentionSpec):
        return up
    heads = {"self_attn.q_proj": attention.num_heads, "self_attn.k_proj": attention.num_kv_heads}
    num_heads = next((count for part, count in heads.items() if part in module), None)
    if num_heads is None:
        return up
    if len(up) % (2 * num_heads):
        raise ModelError(f"{path}: {module} has {len(up)} rows, which are not {num_heads} heads")
    return unpermute(up, num_heads)
