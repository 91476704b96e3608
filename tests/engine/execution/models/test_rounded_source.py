"""Checkpoints in floats whose weights are rounded while they are loaded.

Oracle: a checkpoint of the rounded weights, whose products have rounded inputs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from faser.engine.execution.models.sources import rounded_rows, rounding_scheme
from faser.engine.execution.models.tensors import EMBEDDING, HEAD
from faser.errors import ConfigError, ModelError
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.low_bit.rows import INT4, INT8
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.checkpoints.gguf.gguf_files import write_gguf
from tests.engine.execution.models.paged import PagedModel, decoder, prompt
from tests.engine.execution.models.test_stored_blocks import RoundingInputs, WithoutLowBit
from tests.engine.execution.models.test_weights import DictSource

VALUES = "model.layers.1.self_attn.v_proj.weight"
PRODUCT = "model.layers.0.mlp.down_proj.weight"


def weights(**fields: Any) -> dict[str, Tensor]:
    return random_weights(llama_shapes(tiny_llama_config() | fields))


def logits(path: Path, backend: Backend, **options: Any) -> Tensor:
    return PagedModel(decoder(path, backend, **options), backend).prefill(prompt(20, VOCAB_SIZE), ())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_every_matrix_is_rounded_and_norms_are_not(tmp_path: Path, quantization: str, tied: bool) -> None:
    fields = {"tie_word_embeddings": tied}
    plain = weights(**fields)
    source = DictSource(plain)
    dense = {}
    for name, tensor in plain.items():
        rows = rounded_rows(source, quantization, name)
        dense[name] = tensor if rows is None else torch.from_numpy(rows.dequantised())
        assert (rows is None) == ("norm" in name)
    write_checkpoint(tmp_path / "plain", tiny_llama_config() | fields, plain)
    write_checkpoint(tmp_path / "dense", tiny_llama_config() | fields, dense)
    found = logits(tmp_path / "plain", TorchBackend(), quantization=quantization)
    wanted = logits(tmp_path / "dense", RoundingInputs())
    assert not torch.equal(found, logits(tmp_path / "plain", TorchBackend()))
    assert torch.isclose(found, wanted, rtol=1e-3, atol=1e-3).all(1).float().mean() >= 0.75


def test_embedding_head_and_values_have_8_bits_under_int4() -> None:
    assert {rounding_scheme("int4", name) for name in (EMBEDDING, HEAD, VALUES)} == {INT8}
    assert rounding_scheme("int4", PRODUCT) is INT4
    assert rounding_scheme("int8", PRODUCT) is INT8


@pytest.mark.parametrize("quantization, bits", [("int8", 8.5), ("int4", 5)])
def test_weights_take_what_the_scheme_says(quantization: str, bits: float) -> None:
    plain = weights()
    source = DictSource(plain)
    found = sum(rows.num_bytes for name in plain if (rows := rounded_rows(source, quantization, name)) is not None)
    shapes = llama_shapes(tiny_llama_config())
    numbers = {name: shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2}
    eight = sum(number for name, number in numbers.items() if name == EMBEDDING or "v_proj" in name)
    inner = sum(numbers.values()) - eight
    assert found == inner * bits / 8 + eight * 8.5 / 8


def test_a_gguf_file_is_rounded_too(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    found = decoder(path, TorchBackend(), quantization="int8")
    assert found.weight_bytes < decoder(path, TorchBackend()).weight_bytes / 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -4e4])
def test_weights_that_no_scale_can_hold_are_refused_with_their_tensor(value: float) -> None:
    tensors = weights()
    tensors[PRODUCT][3, 5] = value
    with pytest.raises(ModelError, match=r"down_proj.weight has values from .* rounds those between -32768 and"):
        rounded_rows(DictSource(tensors), "int4", PRODUCT)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_backend_without_low_bit_products_is_refused_by_name(tmp_path: Path, quantization: str) -> None:
    write_checkpoint(tmp_path, tiny_llama_config(), weights())
    with pytest.raises(ConfigError, match=f"is {quantization}; the torch backend has no low-bit products on cpu"):
        decoder(tmp_path, WithoutLowBit(), quantization=quantization)
