"""GGUF files that are computed as they are stored.

Oracle: the same file dequantised, in float32, with activations rounded to 8 bits.
"""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from torch import Tensor

from faser.engine.checkpoints.files import GGUF_WEIGHTS
from faser.engine.checkpoints.gguf_config import gguf_config
from faser.engine.checkpoints.gguf_weights import open_gguf
from faser.engine.execution.models.sources import block_formats, gguf_rows
from faser.errors import ConfigError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.low_bit.product import STRETCH, quantise_activations
from faser.kernels.torch_backend import TorchBackend
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.checkpoints.gguf.gguf_files import BIASES, VOCAB_SIZE, hf_weights, write_gguf
from tests.engine.execution.models.paged import PagedModel, decoder, prompt


def logits(path: Path, backend: Backend, **options: Any) -> torch.Tensor:
    return PagedModel(decoder(path, backend, **options), backend).prefill(prompt(20, VOCAB_SIZE), ())


def mixed(name: str, quantization: Type) -> dict[str, tuple[Any, Type]]:
    """Blocks of one tensor in a format of its own, in the order of a file that permutes nothing."""
    weights, stored = hf_weights()
    hf_name = next(each for each, found in stored.items() if found == name)
    return {name: (quants.quantize(weights[hf_name], quantization), quantization)}


class RoundingInputs(TorchBackend):
    """Rounds what goes into every product as low-bit products do, and multiplies by dequantised weights."""

    def linear(self, x: Tensor, packed: Any, out: Tensor, *, residual: Tensor | None = None) -> Tensor:
        found = quantise_activations(x.numpy())
        scales = found.scales.repeat(STRETCH, 1)[:, : x.shape[1]]
        return super().linear(torch.from_numpy(found.values * scales), packed, out, residual=residual)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("quantization", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0])
def test_only_inputs_are_rounded(tmp_path: Path, architecture: str, quantization: Type) -> None:
    """Oracle: the same file dequantised, every product with rounded inputs.

    Where a value lies between two steps, the last bit of a float decides, and this model's large weights make it
    another row: few rows may differ.
    """
    path = tmp_path / "m.gguf"
    raw = mixed("blk.1.ffn_gate.weight", Type.Q8_0) | mixed("blk.0.attn_v.weight", Type.Q5_1)
    more = BIASES if architecture == "qwen2" else None
    write_gguf(path, architecture, quantization=quantization, raw=raw, more=more)
    found, wanted = logits(path, TorchBackend(), quantization="gguf"), logits(path, RoundingInputs())
    assert not torch.equal(wanted, logits(path, TorchBackend()))
    near = torch.isclose(found, wanted, rtol=1e-3, atol=1e-3).all(1)
    assert near.float().mean() >= 0.75, near


def test_queries_and_keys_have_the_hubs_order(tmp_path: Path) -> None:
    """Oracle: the dequantised rows, which have been put in order."""
    write_gguf(tmp_path / "m.gguf", quantization=Type.Q8_0)
    source = open_gguf(tmp_path / "m.gguf")
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        name = f"model.layers.1.self_attn.{part}.weight"
        found = gguf_rows(source, name)
        assert found is not None
        assert np.array_equal(found.dequantised(), source.get(name).numpy())
    assert gguf_rows(source, "model.norm.weight") is None
    assert block_formats(source) == "Q8_0 (8-bit codes)"


def test_a_product_with_a_part_in_16_bits_is_dequantised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m.gguf"
    raw = mixed("blk.0.ffn_gate.weight", Type.F32) | mixed("blk.1.ffn_up.weight", Type.Q4_1)
    write_gguf(path, quantization=Type.Q8_0, raw=raw)
    with caplog.at_level(logging.INFO, "faser"):
        found = decoder(path, TorchBackend(), quantization="gguf")
    assert "using weights in Q4_1 (4-bit codes), Q8_0 (8-bit codes) as stored" in caplog.text
    whole = decoder(path, TorchBackend())
    assert found.weight_bytes < whole.weight_bytes / 2


def test_weights_are_counted_as_they_lie_in_memory(tmp_path: Path, kernel_cache: Path) -> None:
    """Codes of five bits take six: 32 values have 26 bytes, in Q4_0 and Q8_0 18 and 34."""
    backend = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1)
    found = {}
    for quantization in (Type.Q5_0, Type.Q8_0, Type.Q4_0):
        path = tmp_path / f"{quantization.name}.gguf"
        write_gguf(path, quantization=quantization)
        found[quantization] = decoder(path, backend, quantization="gguf").weight_bytes
    assert found[Type.Q4_0] < found[Type.Q5_0] < 0.8 * found[Type.Q8_0]


@pytest.mark.parametrize("in_folder", [False, True])
def test_without_a_flag_blocks_are_multiplied_where_that_is_faster(
    tmp_path: Path, kernel_cache: Path, in_folder: bool
) -> None:
    """On the native backend, and not on torch's; `none` dequantises on either."""
    path = tmp_path / GGUF_WEIGHTS
    write_gguf(path, quantization=Type.Q8_0)
    if in_folder:
        (tmp_path / "config.json").write_text(json.dumps(gguf_config(path)))
    model = tmp_path if in_folder else path
    native = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1)

    size = {
        (backend.name, quantization): decoder(model, backend, quantization=quantization).weight_bytes
        for backend in (native, TorchBackend())
        for quantization in (None, "gguf", "none")
    }

    assert size["native", None] == size["native", "gguf"] < size["native", "none"]
    assert size["torch", "gguf"] < size["torch", None] == size["torch", "none"]


def test_what_has_no_blocks_is_refused_with_the_path(tmp_path: Path) -> None:
    write_family_model(tmp_path / "folder", "llama", {})
    with pytest.raises(ConfigError, match=r"--quantization is gguf; the weights of .*folder are in no GGUF file"):
        decoder(tmp_path / "folder", TorchBackend(), quantization="gguf")


class WithoutLowBit(TorchBackend):
    """The reference backend, as one that has no low-bit products."""

    def __init__(self) -> None:
        super().__init__()
        self.has_low_bit = False
        self.prefers_low_bit = False


def test_a_backend_without_low_bit_products_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="the torch backend has no low-bit products on cpu"):
        decoder(tmp_path / "m.gguf", WithoutLowBit(), quantization="gguf")
