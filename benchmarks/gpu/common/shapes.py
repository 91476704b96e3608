"""Sizes of the models that are measured, as config.json says them; weights of these are made up.

The published sizes of Qwen3-8B, Qwen3-0.6B, Llama-3.1-8B and Llama-3.2-1B, and tiny ones for dry runs. Owns no
tensor.
"""

import json
from pathlib import Path
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.execution.models import tensors

Config = dict[str, Any]

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "torch_dtype": "bfloat16",
}
_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Heads of queries and keys have norms of their own.
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "torch_dtype": "bfloat16",
}
QWEN3_8B: Config = _QWEN3 | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
QWEN3_600M: Config = _QWEN3 | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
LLAMA_8B: Config = _LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_scaling": _ROPE | {"factor": 8.0},
    "tie_word_embeddings": False,
}
LLAMA_1B: Config = _LLAMA | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_scaling": _ROPE | {"factor": 32.0},
    "tie_word_embeddings": True,
}
_TINY_SIZES = {
    "vocab_size": 512,
    "bos_token_id": 0,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
_TINY = _LLAMA | _TINY_SIZES
TINY_NORMED: Config = _QWEN3 | _TINY_SIZES | {"num_hidden_layers": 2, "tie_word_embeddings": False}
TINY_TARGET: Config = _TINY | {"num_hidden_layers": 2, "tie_word_embeddings": False}
TINY_DRAFT: Config = _TINY | {"num_hidden_layers": 1, "tie_word_embeddings": True}


def own_head(config: Config) -> Config:
    """The same with a head of its own, which takes as many bytes as the embedding."""
    return config | {"tie_word_embeddings": False}


def write_shape(directory: Path, config: Config) -> Path:
    """A directory that counts as a checkpoint, whose tensors somebody else makes.

    The empty file stands for them: a directory without any .safetensors is refused as a draft model's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    (directory / "made-up.safetensors").touch()
    return directory


def step_bytes(spec: DecoderSpec, *, kv_tokens: int, value_bytes: int = 2) -> int:
    """What a step must read at least: every weight once, of the embedding next to nothing, and the KV cache.

    kv_tokens: positions that the rows' sequences have in the cache, all together. value_bytes: of a weight and of
    a value in the cache.
    """
    weights = tensors.num_parameters(spec)
    if not spec.tie_word_embeddings:
        weights -= spec.vocab_size * spec.hidden_size
    kv_values = 2 * spec.num_layers * spec.kv_size * kv_tokens
    return (weights + kv_values) * value_bytes


def step_flops(spec: DecoderSpec, *, rows: int) -> int:
    """Multiplications and additions of a step's products; attention's are left out."""
    return 2 * (step_bytes(spec, kv_tokens=0, value_bytes=1)) * rows


def floor_s(spec: DecoderSpec, *, rows: int, kv_tokens: int, bytes_s: float, flops_s: float) -> float:
    """The least that a step can take at these rates: the longer of moving and computing."""
    return max(step_bytes(spec, kv_tokens=kv_tokens) / bytes_s, step_flops(spec, rows=rows) / flops_s)
