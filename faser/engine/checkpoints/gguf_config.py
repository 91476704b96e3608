"""A GGUF file's metadata as a config.json.

Knows the keys that architectures share; families/*.py have those of each, gguf/rope.py those of the rotary
embedding.
Refuses metadata without a counterpart in config.json; the model families check everything else.
"""

from pathlib import Path
from typing import Any

from faser.engine.checkpoints.families import gguf_architecture
from faser.engine.checkpoints.families.family import GgufArchitecture
from faser.engine.checkpoints.gguf.file import GgufFile, shortest
from faser.engine.checkpoints.gguf.rope import rope_fields
from faser.errors import ModelError

_ENDS = ("eos", "eot", "eom")


def gguf_config(path: Path) -> dict[str, Any]:
    """Config dict of a GGUF file. eos_token_id is a list: end of sequence, of turn, of message.

    Raises ModelError that names the key and the value if they cannot be expressed or are not supported.
    """
    return config_of(GgufFile(path))


def config_of(file: GgufFile) -> dict[str, Any]:
    """Config dict of an open GGUF file; see gguf_config."""
    architecture, name = gguf_architecture(file), file.require("general.architecture", str)
    experts = file.get(f"{name}.expert_count", int, 0)
    if experts and not architecture.experts:
        raise ModelError(f"{file.path} is a mixture of {experts} experts; {name} files may be none")
    window = file.get(f"{name}.attention.sliding_window", int)
    if window and not architecture.windows:
        raise ModelError(f"{file.path}: {name}.attention.sliding_window is {window}; {name} files may have none")
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_act": "silu",
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": not file.has_tensor("output.weight"),
        "attention_bias": file.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": file.has_tensor("blk.0.ffn_gate.bias"),
        "torch_dtype": "bfloat16",
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": eos_token_ids(file),
    }
    config |= _sizes(file, name, architecture) | rope_fields(file, name)
    return config | architecture.own_fields(file, config)


def eos_token_ids(file: GgufFile) -> list[int]:
    """The tokens that end generation, without duplicates; the end of sequence first.

    Raises ModelError for one that is no token of the file.
    """
    ids: dict[int, None] = {}
    for end in _ENDS:
        key = f"tokenizer.ggml.{end}_token_id"
        if (token_id := file.get(key, int)) is None:
            continue
        vocab_size = _vocab_size(file)
        if not 0 <= token_id < vocab_size:
            raise ModelError(f"{file.path}: {key} is {token_id}, of {vocab_size} tokens")
        ids[token_id] = None
    return list(ids)


def _vocab_size(file: GgufFile) -> int:
    if gguf_architecture(file).drafter:
        return len(file.require_list("tokenizer.ggml.tokens", str))
    if not file.has_tensor("token_embd.weight"):
        raise ModelError(f"{file.path} has no tensor token_embd.weight")
    return file.shape("token_embd.weight")[0]


def _sizes(file: GgufFile, architecture: str, family: GgufArchitecture) -> dict[str, Any]:
    """A list, where layers differ, is refused, unless the family has sizes_by_layer."""
    num_heads, partial_rotary = file.size(f"{architecture}.attention.head_count"), family.partial_rotary
    hidden_size = file.size(f"{architecture}.embedding_length")
    by_layer = family.sizes_by_layer
    num_kv_heads = None if by_layer else file.size(f"{architecture}.attention.head_count_kv", num_heads)
    num_layers, num_tensors = file.size(f"{architecture}.block_count"), len(file.tensor_names())
    if num_layers > num_tensors:
        raise ModelError(f"{file.path}: {architecture}.block_count is {num_layers}, with {num_tensors} tensors")
    head_dim = file.size(f"{architecture}.attention.key_length", hidden_size // num_heads)
    value_dim = file.size(f"{architecture}.attention.value_length", head_dim)
    rotated = file.size(f"{architecture}.rope.dimension_count", head_dim)
    if value_dim != head_dim or (rotated != head_dim and not partial_rotary):
        raise ModelError(
            f"{file.path}: a head has {head_dim} key channels, rotates {rotated}, and has {value_dim} for values; "
            "all three must be equal"
        )
    eps = file.require(f"{architecture}.attention.layer_norm_rms_epsilon", float)
    sizes: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": shortest(eps),
        "max_position_embeddings": file.size(f"{architecture}.context_length"),
    }
    inner = f"{architecture}.feed_forward_length"  # of dense networks, which a mixture may have none of
    if not by_layer and (file.has(inner) or not file.has(f"{architecture}.expert_feed_forward_length")):
        sizes["intermediate_size"] = file.size(inner)
    return sizes | {"partial_rotary_factor": rotated / head_dim} if partial_rotary else sizes
