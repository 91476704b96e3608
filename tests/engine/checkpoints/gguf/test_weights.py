"""Weights of GGUF files. Oracles: the weights that were written, and block layouts spelled out bit by bit."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES

from faser.engine.checkpoints.gguf.checkpoint import open_gguf
from faser.errors import ModelError
from tests.engine.checkpoints.gguf.gguf_files import BIASES, QK_NORMS, write_gguf

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
    write_gguf(tmp_path / "m.gguf", extra={"blk.0.ffn_gate_inp.weight": np.zeros((2, 64), np.float32)})
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        open_gguf(tmp_path / "m.gguf")
