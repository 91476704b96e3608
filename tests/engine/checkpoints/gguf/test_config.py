"""GGUF metadata as a Hugging Face config. Oracle of the rope scaling: transformers' own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from faser.engine.checkpoints.gguf.checkpoint import gguf_config
from faser.errors import ModelError
from tests.engine.checkpoints.gguf.gguf_files import BIASES, QK_NORMS, write_gguf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": [2],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rope_scaling": None,
}


@pytest.mark.parametrize(
    "architecture, options, changes",
    [
        ("llama", {}, {}),
        ("llama", {"untied": True}, {"tie_word_embeddings": False}),
        ("llama", {"more": BIASES}, {"attention_bias": True}),
        (
            "llama",
            {"metadata": {"llama.attention.sliding_window": 64}},
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64},
        ),
        (
            "llama",
            {"metadata": {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}},
            {"eos_token_id": [2, 7]},
        ),
        (
            "llama",
            {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}},
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
        (
            "qwen2",
            {
                "more": BIASES,
                "metadata": {
                    "qwen2.rope.scaling.type": "yarn",
                    "qwen2.rope.scaling.factor": 4.0,
                    "qwen2.rope.scaling.original_context_length": 128,
                },
            },
            {
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
                "attention_bias": True,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            },
        ),
        (
            "qwen3",
            {"more": QK_NORMS, "metadata": {"qwen3.attention.key_length": 32, "qwen3.attention.value_length": 32}},
            {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
        ),
        (
            "smollm3",
            {"metadata": {"smollm3.block_count": 5, "smollm3.rope.freq_base": 5e6}},
            {
                "architectures": ["SmolLM3ForCausalLM"],
                "model_type": "smollm3",
                "num_hidden_layers": 5,
                "no_rope_layers": [1, 1, 1, 0, 1],
                "rope_theta": 5e6,
            },
        ),
    ],
)
def test_metadata_becomes_the_config_of_the_hub(
    tmp_path: Path, architecture: str, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    write_gguf(tmp_path / "m.gguf", architecture, **options)
    assert gguf_config(tmp_path / "m.gguf") == LLAMA | changes


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_rope_factors_become_its_scaling(tmp_path: Path, factor: float) -> None:
    """Oracle: transformers' frequencies, with and without the scaling that is to be found."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_parameters=scaling | {"rope_theta": 500000.0}
    )
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    metadata = {"llama.rope.freq_base": 500000.0, "llama.attention.key_length": 64}
    write_gguf(tmp_path / "m.gguf", metadata=metadata, extra={"rope_freqs.weight": (plain / scaled).numpy()})
    assert gguf_config(tmp_path / "m.gguf")["rope_scaling"] == scaling


@pytest.mark.parametrize(
    "architecture, options, message",
    [
        ("gemma2", {}, "architecture gemma2; supported are llama, qwen2, qwen3, smollm3"),
        ("llama", {"metadata": {"llama.expert_count": 8}}, "mixture of 8 experts"),
        ("llama", {"metadata": {"llama.rope.dimension_count": 8}}, "rotates 8"),
        ("llama", {"metadata": {"llama.attention.value_length": 8}}, "has 8 for values"),
        ("llama", {"metadata": {"llama.block_count": None}}, r"no llama\.block_count"),
        ("llama", {"metadata": {"llama.rope.scaling.type": "longrope"}}, "is longrope; supported are"),
        (
            "llama",
            {"extra": {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}},
            "not Llama 3's scaling",
        ),
        ("qwen2", {"metadata": {"qwen2.attention.sliding_window": 64}}, "sliding_window is 64"),
        (
            "llama",
            {"metadata": {"llama.attention.head_count_kv": [2, 1]}},
            "head_count_kv is a list of 2; it must be an integer",
        ),
    ],
)
def test_what_a_config_cannot_express_is_refused(
    tmp_path: Path, architecture: str, options: dict[str, Any], message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", architecture, **options)
    with pytest.raises(ModelError, match=message):
        gguf_config(tmp_path / "m.gguf")
