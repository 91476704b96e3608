"""A GGUF file as a checkpoint directory in bfloat16. Oracle: the file itself, rounded by torch."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors import safe_open

from benchmarks.models.bfloat16_checkpoint import convert, to_bfloat16
from faser.engine.checkpoints.gguf_weights import open_gguf
from faser.engine.text.tokenizer import load_tokenizer
from tests.engine.checkpoints.gguf.gguf_files import write_gguf


def test_tensors_are_those_of_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tokenizer="gpt2", quantization=GGMLQuantizationType.Q4_1)

    convert(tmp_path / "tiny.gguf", tmp_path / "tiny")

    source = open_gguf(tmp_path / "tiny.gguf")
    with safe_open(tmp_path / "tiny" / "model.safetensors", framework="pt") as tensors:
        assert sorted(tensors.keys()) == sorted(source.names())
        for name in source.names():
            assert torch.equal(tensors.get_tensor(name), source.get(name).bfloat16()), name
    assert load_tokenizer(tmp_path / "tiny").vocab_size == 512


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    """Oracle: torch, over all halfway points, extremes and many random bits."""
    halfway = (np.arange(0x10000, dtype=np.uint32) << 16) | 0x8000
    random = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32)
    values = np.concatenate([halfway, halfway - 1, halfway + 1, halfway ^ 0x8000, random]).view(np.float32)
    oracle = torch.from_numpy(values).bfloat16()
    found = torch.from_numpy(to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), oracle.isnan())
    numbers = ~oracle.isnan()
    assert torch.equal(found.view(torch.int16)[numbers], oracle.view(torch.int16)[numbers])
