"""GGUF metadata as a Hugging Face config. Oracle of the rope scaling: transformers' own.

Weights of GGUF files. Oracles: the weights that were written, and block layouts spelled out bit by bit.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from faser.engine.checkpoints.gguf_config import gguf_config
from faser.engine.checkpoints.gguf_weights import open_gguf
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
        ("gemma5", {}, "architecture gemma5; supported are "),
        ("qwen2", {"metadata": {"qwen2.expert_count": 8}}, "mixture of 8 experts; qwen2 files may be none"),
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


Block = npt.NDArray[np.uint8]


@pytest.mark.parametrize(
    "quantization, tolerance",
    [
        (Type.F32, 0.0),
        (Type.F16, 2**-11),
        (Type.BF16, 2**-8),
        (Type.Q8_0, 1 / 127),
        (Type.Q5_1, 2 / 31),
        (Type.Q5_0, 1 / 15),
        (Type.Q4_1, 2 / 15),
        (Type.Q4_0, 1 / 7),
    ],
)
def test_weights_come_back_within_a_step_of_their_type(
    tmp_path: Path, quantization: Type, tolerance: float
) -> None:
    """tolerance: of the largest value of a block of 32."""
    expected = write_gguf(tmp_path / "m.gguf", quantization=quantization, untied=True)
    source = open_gguf(tmp_path / "m.gguf")
    assert set(source.names()) == set(expected)
    for name, values in expected.items():
        tensor = source.get(name)
        assert tensor.dtype == torch.float32
        assert tensor.shape == values.shape == source.shape(name)
        found = tensor.numpy().reshape(-1, 32 if values.ndim > 1 else values.size)
        wanted = values.reshape(found.shape)
        allowed = (tolerance if values.ndim > 1 else 0.0) * np.abs(wanted).max(axis=1, keepdims=True)
        assert (np.abs(found - wanted) <= allowed + 1e-7).all(), name


@pytest.mark.parametrize("architecture", ["llama", "smollm3", "qwen2", "qwen3"])
def test_q_and_k_rows_come_back_in_the_order_of_the_hub(tmp_path: Path, architecture: str) -> None:
    expected = write_gguf(tmp_path / "m.gguf", architecture, more=BIASES | QK_NORMS)
    source = open_gguf(tmp_path / "m.gguf")
    for name, values in expected.items():
        np.testing.assert_array_equal(source.get(name).numpy(), values, err_msg=name)


def half(block: Block, at: int) -> float:
    return float(block[at : at + 2].view(np.float16)[0])


def scale_and_min(scales: Block, j: int) -> tuple[int, int]:
    """Sub-block j's 6-bit scale and minimum, out of 12 bytes that hold eight of each."""
    q = [int(byte) for byte in scales]
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, (q[j + 4] >> 4) | (q[j] >> 6) << 4


def reference_q4_k(block: Block) -> list[float]:
    """d, dmin, 12 bytes of scales, 128 bytes of nibbles: per 64 values first all low nibbles, then all high."""
    d, dmin, scales, nibbles = half(block, 0), half(block, 2), block[4:16], block[16:144]
    values = []
    for j in range(8):
        scale, minimum = scale_and_min(scales, j)
        for byte in nibbles[32 * (j // 2) : 32 * (j // 2) + 32]:
            quant = int(byte) >> 4 if j % 2 else int(byte) & 15
            values.append(d * scale * quant - dmin * minimum)
    return values


def reference_q5_k(block: Block) -> list[float]:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit j of byte l belongs to sub-block j."""
    d, dmin, scales, fifth, nibbles = half(block, 0), half(block, 2), block[4:16], block[16:48], block[48:176]
    values = []
    for j in range(8):
        scale, minimum = scale_and_min(scales, j)
        for at, byte in enumerate(nibbles[32 * (j // 2) : 32 * (j // 2) + 32]):
            quant = (int(byte) >> 4 if j % 2 else int(byte) & 15) + 16 * (int(fifth[at]) >> j & 1)
            values.append(d * scale * quant - dmin * minimum)
    return values


def reference_q6_k(block: Block) -> list[float]:
    """128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 signed scales, d; in two halves of 128 values."""
    low, high, scales, d = block[:128], block[128:192], block[192:208].view(np.int8), half(block, 208)
    values = []
    for n in range(2):
        for quarter in range(4):
            for at in range(32):
                byte = int(low[64 * n + 32 * (quarter % 2) + at])
                nibble = byte >> 4 if quarter >= 2 else byte & 15
                pair = int(high[32 * n + at]) >> 2 * quarter & 3
                scale = int(scales[8 * n + 2 * quarter + at // 16])
                values.append(d * scale * ((nibble | pair << 4) - 32))
    return values


@pytest.mark.parametrize(
    "quantization, reference, halves",
    [
        (Type.Q4_K, reference_q4_k, (0, 2)),
        (Type.Q5_K, reference_q5_k, (0, 2)),
        (Type.Q6_K, reference_q6_k, (208,)),
    ],
)
def test_k_quants_are_read_as_their_layout_says(
    tmp_path: Path, quantization: Type, reference: Any, halves: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    blocks = rng.integers(0, 256, (512, block_bytes), np.uint8)
    for at in halves:
        blocks[:, at : at + 2] = rng.uniform(0.001, 0.01, (512, 1)).astype(np.float16).view(np.uint8)
    stored = blocks.reshape(512, -1)
    write_gguf(tmp_path / "m.gguf", raw={"token_embd.weight": (stored, quantization)})
    found = open_gguf(tmp_path / "m.gguf").get("model.embed_tokens.weight")
    assert found.shape == (512, block_size)
    np.testing.assert_allclose(
        found[:40].numpy(), [reference(block) for block in blocks[:40]], rtol=1e-5, atol=1e-6
    )


def test_a_tensor_that_was_read_owns_its_memory(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "m.gguf")["model.norm.weight"]
    open_gguf(tmp_path / "m.gguf").get("model.norm.weight").zero_()
    np.testing.assert_array_equal(open_gguf(tmp_path / "m.gguf").get("model.norm.weight").numpy(), expected)


def test_a_tensor_without_a_hugging_face_name_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", extra={"blk.0.ssm_a.weight": np.zeros((2, 64), np.float32)})
    with pytest.raises(ModelError, match=r"blk\.0\.ssm_a\.weight"):
        open_gguf(tmp_path / "m.gguf")
