"""Sizes of a config.json against the headers of the weights, before anything is allocated or counted by them.

A config may state any number, a tensor has as many values as its file has room for. Of products that are stored
quantised, or for all experts together, only the room is compared here; weights.py compares their shapes when they
are read.
"""

import math
from pathlib import Path

from faser.engine.checkpoints.families.wrappers import text_half
from faser.engine.checkpoints.files import ModelConfig, gguf_file, read_config
from faser.engine.checkpoints.gguf.file import GgufFile
from faser.engine.checkpoints.gguf_weights import GgufSource, open_gguf
from faser.engine.execution.models.sources import (
    RenamedSource,
    SafetensorsSource,
    with_model_prefix,
    with_text_names,
)
from faser.engine.execution.models.tensors import iter_shapes
from faser.errors import ModelError

StoredTensors = SafetensorsSource | RenamedSource | GgufSource

_MOST_VALUES_PER_BYTE = 8  # of any format
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim")
_EXPERTS = ("num_experts", "num_local_experts")
_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_DELTA_NETS = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
# Parts of names of tensors, and the fields that their shapes follow from besides hidden_size; the first that fits.
_FIELDS = (
    ("per_layer", ("vocab_size_per_layer_input", "hidden_size_per_layer_input", "num_hidden_layers")),
    ("embed_tokens", ("vocab_size",)),
    ("lm_head", ("vocab_size",)),
    ("self_attn", _HEADS),
    ("linear_attn", _DELTA_NETS),
    ("shared_expert_gate", ()),
    ("_proj", _INNER),
    ("experts.", _INNER),
    ("gate", _EXPERTS),
    ("router", _EXPERTS),
)


def open_tensors(path: Path, config: ModelConfig) -> StoredTensors:
    """Open the files with the weights of a checkpoint; of a vision-language model, those of its text half.

    Raises ModelError for files that are missing or damaged.
    """
    if (weights := gguf_file(path)) is not None:
        return open_gguf(weights)
    source = SafetensorsSource(path)
    return with_model_prefix(source) if config.wrapper is None else with_text_names(source)


def check_sizes(path: Path, config: ModelConfig) -> None:
    """Raise ModelError unless the tensors of a checkpoint have the sizes that its config states.

    The error names the tensor, and the fields that its shape follows from.
    """
    stored = open_tensors(path, config)
    names, room = set(stored.names()), _MOST_VALUES_PER_BYTE * _weight_bytes(path)
    for name, shape in iter_shapes(config.spec):
        if name in names:
            if (found := stored.shape(name)) != shape:
                asked = f"the config asks for {list(shape)}{_stated(path, name)}"
                raise ModelError(f"tensor {name} has shape {list(found)}; {asked}")
            continue
        if len(shape) == 1 and not name.endswith(".bias"):
            raise ModelError(f"the checkpoint lacks tensor {name}, which the config asks for{_stated(path, name)}")
        room -= math.prod(shape)
        if room < 0:
            raise ModelError(
                f"the config asks for tensor {name} of shape {list(shape)}; the files of {path} have no room for "
                f"it{_stated(path, name)}"
            )


def _weight_bytes(path: Path) -> int:
    weights = gguf_file(path)
    if weights is not None:
        return GgufFile(weights).num_bytes
    return sum(each.stat().st_size for each in path.glob("*.safetensors"))


def _stated(path: Path, name: str) -> str:
    """The fields that the shape of a tensor follows from, as the config states them, in brackets."""
    config = read_config(path)
    half = text_half(config)
    stated = config if half is None else half.config
    fields = ("hidden_size", *next((each for part, each in _FIELDS if part in name), ("num_hidden_layers",)))
    listed = ", ".join(f"{field} is {stated[field]}" for field in fields if stated.get(field) is not None)
    return f" ({listed})" if listed else ""
