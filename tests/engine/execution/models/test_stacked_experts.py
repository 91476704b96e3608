"""Checkpoints of gpt-oss whose experts are stored in MXFP4. Oracle: what transformers makes of the same tensors.

Bugs these tests have been seen to catch: a scale off by one; neighbours of a byte as values i and i + 16; gate and
up as halves.
"""

import json
import logging
import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from faser.engine.checkpoints.families.architecture import StackedExperts
from faser.engine.checkpoints.files import read_model_config
from faser.engine.checkpoints.stored import stored_weights
from faser.engine.execution.models.loader import open_source
from faser.engine.execution.models.sources import SafetensorsSource
from faser.engine.execution.models.stacked_experts import StackedSource
from faser.errors import ConfigError, ModelError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.torch_backend import TorchBackend
from tests.engine.checkpoints.family_models import store_in_mxfp4, write_family_model
from tests.engine.checkpoints.gguf.gguf_files import convert
from tests.engine.checkpoints.test_families import CASES, VOCAB_SIZE, logits_of
from tests.engine.execution.models.paged import load, prompt

FIELDS = next(case.fields for case in CASES if case.name == "gpt-oss")
TOKENS = prompt(40, VOCAB_SIZE)
EXPERTS = "model.layers.1.mlp.experts."


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("floats")
    write_family_model(directory, "gpt_oss", FIELDS)
    return directory


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mxfp4")
    write_family_model(directory, "gpt_oss", FIELDS)
    store_in_mxfp4(directory)
    return directory


@cache
def dequantised(stored: Path) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint as transformers dequantises them."""
    tensors = load_file(stored / "model.safetensors")
    for name in [each for each in tensors if each.endswith("_blocks")]:
        blocks, whole = tensors.pop(name), name.removesuffix("_blocks")
        scales = tensors.pop(f"{whole}_scales")
        tensors[whole] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return tensors


def test_experts_are_those_of_transformers(stored: Path) -> None:
    source, whole = open_source(stored), dequantised(stored)
    for expert in range(FIELDS["num_local_experts"]):
        for part, of, first, step in (
            ("gate_proj", "gate_up_proj", 0, 2),
            ("up_proj", "gate_up_proj", 1, 2),
            ("down_proj", "down_proj", 0, 1),
        ):
            weight = source.get(f"{EXPERTS}{expert}.{part}.weight")
            assert torch.equal(weight, whole[EXPERTS + of][expert].T[first::step])
            bias = source.get(f"{EXPERTS}{expert}.{part}.bias")
            assert torch.equal(bias, whole[f"{EXPERTS}{of}_bias"][expert][first::step])


def test_the_logits_are_those_of_transformers(stored: Path, floats: Path, kernel_cache: Path) -> None:
    """Dequantised, to the last digits; multiplied as stored, but for activations in 8 bits."""
    model = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32, attn_implementation="eager").eval()
    model.load_state_dict(dequantised(stored))
    wanted = logits_of(model, TOKENS)
    found = load(stored, quantization="none").prefill(TOKENS, ())
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    native = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)
    for backend in (TorchBackend(), native):
        misses = (load(stored, backend=backend).prefill(TOKENS, (1, 13)) - wanted).square().mean().sqrt()
        assert 0 < misses < 0.03 * wanted.std()


def test_a_gguf_file_of_the_same_blocks_gives_the_same_bits(stored: Path, tmp_path: Path) -> None:
    source, config = open_source(stored), json.loads((stored / "config.json").read_text())
    weights = {name: source.get(name).contiguous().numpy() for name in source.names()}
    path = tmp_path / "m.gguf"
    convert(config, weights, path, "gpt-oss", experts=GGMLQuantizationType.MXFP4)
    assert read_model_config(path).spec == read_model_config(stored).spec
    found = load(path, quantization="gguf").prefill(TOKENS, ())
    assert torch.equal(found, load(stored).prefill(TOKENS, ()))


def test_a_backend_without_low_bit_products_dequantises(stored: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = TorchBackend()
    backend.has_low_bit = backend.has_low_bit_experts = False
    with caplog.at_level(logging.WARNING, "faser"):
        found = load(stored, backend=backend).prefill(TOKENS, ())
    assert "is quantised (mxfp4) and the torch backend has no low-bit products" in caplog.text
    assert torch.equal(found, load(stored, quantization="none").prefill(TOKENS, ()))
    assert stored_weights(stored, read_model_config(stored)).form == "mxfp4 experts"


def changed(stored: Path, folder: Path, tensors: dict[str, torch.Tensor | None], **config: Any) -> Path:
    """The checkpoint with other tensors, or without those that are None."""
    given = load_file(stored / "model.safetensors") | tensors
    save_file({name: each for name, each in given.items() if each is not None}, folder / "model.safetensors")
    written = json.loads((stored / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(written))
    return folder


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"gate_up_proj_scales": None}, r"gate_up_proj_blocks but no .*gate_up_proj_scales"),
        ({"down_proj_blocks": None}, r"lacks tensors .*experts\.0\.down_proj\.weight"),
        ({"down_proj_scales": torch.zeros(7, 64, 2, dtype=torch.uint8)}, "bytes, 16 for each scale"),
        ({"down_proj_scales": torch.zeros(7, 64, 3)}, r"torch\.float32 \[7, 64, 3\]; they must be bytes"),
        ({"down_proj_bias": torch.zeros(6, 64)}, r"lacks tensor .*experts\.6\.down_proj\.bias"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tensors: dict[str, Any], message: str, stored: Path, tmp_path: Path
) -> None:
    path = changed(stored, tmp_path, {EXPERTS + name: each for name, each in tensors.items()})
    with pytest.raises(ModelError, match=message):
        load(path)


def test_mxfp4_is_not_quantised_again_nor_read_of_another_family(
    stored: Path, floats: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"--quantization is int8; .* is quantised already \(mxfp4\)"):
        load(stored, quantization="int8")
    assert isinstance(open_source(floats), StackedSource)
    write_family_model(tmp_path, "llama", {})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"quantised \(mxfp4\), which is supported for gpt-oss only"):
        load(tmp_path)


def test_an_empty_tensor_of_experts_without_number_is_refused(tmp_path: Path) -> None:
    """It takes no byte of the file, and naming its experts would never end."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    header = json.dumps({name: {"dtype": "F32", "shape": [1 << 40, 2, 0], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelError, match=r"has shape \[1099511627776, 2, 0\]; at most 4096 experts"):
        StackedSource(SafetensorsSource(tmp_path), StackedExperts.HALVES)
