"""Integers out of 32-bit words. Oracles: words written down by hand, and shifts of Python's integers.

Checkpoints of AWQ, GPTQ and compressed-tensors, computed as they are stored.

Oracle: tests/engine/checkpoints/low_bit_checkpoints.py, which packs by arithmetic, and a plain checkpoint of what
the integers stand for.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from faser.engine.checkpoints.files import read_model_config
from faser.engine.checkpoints.quantized import StoredLowBit
from faser.engine.execution.models.loader import checkpoint_form
from faser.engine.execution.models.stored_codes import CodeSource, awq_codes, codes_of_bytes, codes_of_words
from faser.engine.execution.models.tensors import tensor_shapes
from faser.errors import ConfigError, ModelError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.backend import Backend
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config
from tests.engine.checkpoints.fp8_checkpoints import is_product
from tests.engine.checkpoints.low_bit_checkpoints import KINDS, Kind, write_pair
from tests.engine.execution.models.paged import PagedModel, decoder, prompt
from tests.engine.execution.models.test_stored_blocks import RoundingInputs, WithoutLowBit
from tests.engine.execution.models.test_weights import DictSource


def int32(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.uint32).view(np.int32))


def test_words_of_four_and_of_eight_bits_are_read_from_the_lowest_bits_on() -> None:
    words = int32(0x76543210, 0xFEDCBA98).reshape(1, 2)
    assert codes_of_words(words, 4).tolist() == [list(range(16))]
    words = int32(0xFF00807F, 0x04030201).reshape(2, 1)
    assert codes_of_words(words, 8).tolist() == [[0x7F, 0x80, 0x00, 0xFF], [1, 2, 3, 4]]


def test_words_of_awq_hold_even_columns_first() -> None:
    """WQLinear_GEMM packs columns 0 2 4 6 1 3 5 7."""
    found = awq_codes(int32(0x76543210, 0x0000000F).reshape(1, 2))
    assert found[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 15, 0, 0, 0, 0, 0, 0, 0]


def test_inputs_of_awq_are_rows_of_words() -> None:
    words = int32(0x00000001, 0x00000002, 0xF0000003).reshape(3, 1)
    found = awq_codes(words)
    assert found.shape == (8, 3)
    assert found[0].tolist() == [1, 2, 3]
    assert found[7].tolist() == [0, 0, 15]


def test_signed_bytes_become_codes_128_higher() -> None:
    assert codes_of_bytes(torch.tensor([[-128, -1, 0, 127]], dtype=torch.int8)).tolist() == [[0, 127, 128, 255]]


PRODUCT = "model.layers.1.mlp.up_proj"


def logits(path: Path, backend: Backend, **options: Any) -> torch.Tensor:
    return PagedModel(decoder(path, backend, **options), backend).prefill(prompt(20, VOCAB_SIZE), ())


def opened(directory: Path, **changes: torch.Tensor | None) -> CodeSource:
    """The stored tensors of a checkpoint; changes: other tensors for PRODUCT, or None to leave one out."""
    config = read_model_config(directory)
    assert isinstance(config.quantization, StoredLowBit)
    tensors = load_file(directory / "model.safetensors")
    for ending, tensor in changes.items():
        if tensor is None:
            del tensors[f"{PRODUCT}.{ending}"]
        else:
            tensors[f"{PRODUCT}.{ending}"] = tensor
    return CodeSource(DictSource(tensors), config.quantization, tensor_shapes(config.spec))


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_what_its_integers_stand_for(tmp_path: Path, kind: str) -> None:
    """Bugs seen to be caught: AWQ's columns in the order of the words, GPTQ's zero points without their one."""
    low_bit, plain = write_pair(tmp_path, KINDS[kind])
    source, wanted = opened(low_bit), load_file(plain / "model.safetensors")
    assert sorted(source.names()) == sorted(wanted)
    for name, tensor in wanted.items():
        found = source.get(name)
        assert torch.equal(found, tensor), name
        rows = source.rows(name)
        assert (rows is not None) == is_product(name)
        if rows is not None:
            assert len(rows.parts) == 1
            assert (rows.order is not None) == KINDS[kind].shuffled


@pytest.mark.parametrize("kind", ["awq", "gptq-desc-act", "w4a16-asymmetric", "w8a8"])
def test_only_inputs_are_rounded(tmp_path: Path, kind: str) -> None:
    """Oracle: the plain checkpoint, the layers' products with rounded inputs.

    Where a value lies between two steps, the last bit of a float decides, and this model's large weights make it
    another row: few rows may differ.
    """
    low_bit, plain = write_pair(tmp_path, KINDS[kind])
    found, exact = logits(low_bit, TorchBackend()), logits(plain, TorchBackend())
    assert not torch.equal(found, exact)
    if KINDS[kind].shuffled:  # stretches of inputs with one scale are of the columns' order
        assert (found - exact).abs().mean() < 0.05 * exact.abs().mean()
        return
    near = torch.isclose(found, logits(plain, RoundingLayers()), rtol=1e-3, atol=1e-3).all(1)
    assert near.float().mean() >= 0.75, near


class RoundingLayers(RoundingInputs):
    """Leaves the head's inputs alone, which such a checkpoint keeps in floats."""

    def linear(self, x: torch.Tensor, packed: Any, out: torch.Tensor, **more: Any) -> torch.Tensor:
        return (TorchBackend if len(packed.weight) == VOCAB_SIZE else RoundingInputs).linear(
            self, x, packed, out, **more
        )


@pytest.mark.parametrize("kind", ["gptq-desc-act", "w8a8-asymmetric"])
def test_the_native_model_is_the_defined_one(tmp_path: Path, kernel_cache: Path, kind: str) -> None:
    """Oracle: the torch backend. Bug seen to be caught: a unit of a layer that forgets the order of its inputs."""
    low_bit, _ = write_pair(tmp_path, KINDS[kind])
    native = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)
    token_ids = prompt(20, VOCAB_SIZE)
    found = PagedModel(decoder(low_bit, native), native, block_size=16).prefill(token_ids, ())
    wanted = logits(low_bit, TorchBackend())
    assert (found - wanted).abs().mean() < 1e-4 * wanted.abs().mean()


def test_a_backend_without_low_bit_products_dequantises_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    low_bit, plain = write_pair(tmp_path, KINDS["awq"])
    found = logits(low_bit, WithoutLowBit())
    assert "quantised (awq) and the torch backend has no low-bit products on cpu: weights are dequ" in caplog.text
    assert torch.equal(found, logits(plain, TorchBackend()))


def test_what_is_multiplied_is_logged_and_takes_less_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    low_bit, plain = write_pair(tmp_path, KINDS["w4a16"])
    with caplog.at_level(logging.INFO, "faser"):
        found = decoder(low_bit, TorchBackend())
    assert "using weights (compressed-tensors pack-quantized, 4 bits) as stored" in caplog.text
    assert found.weight_bytes < decoder(plain, TorchBackend()).weight_bytes * 0.75


def test_products_that_stayed_floats_are_dequantised_together(tmp_path: Path) -> None:
    low_bit, plain = write_pair(tmp_path, KINDS["awq"], plain=("layers.0", "layers.1.mlp.gate"))
    source, wanted = opened(low_bit), load_file(plain / "model.safetensors")
    assert source.rows("model.layers.0.mlp.up_proj.weight") is None
    assert all(torch.equal(source.get(name), tensor) for name, tensor in wanted.items())
    assert logits(low_bit, TorchBackend()).isfinite().all()


def test_parts_with_inputs_in_several_orders_are_dequantised_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    low_bit, _ = write_pair(tmp_path, KINDS["gptq-desc-act"])
    tensors = load_file(low_bit / "model.safetensors")
    config = read_model_config(low_bit)
    assert isinstance(config.quantization, StoredLowBit)
    tensors[f"{PRODUCT}.g_idx"] = tensors[f"{PRODUCT}.g_idx"].flip(0)
    assert decoder(low_bit, TorchBackend(), source=DictSource(tensors)).weight_bytes
    assert (
        "gate_proj.weight, model.layers.1.mlp.up_proj.weight use different act-order permutations" in caplog.text
    )


def test_old_gptq_biases_of_zeros_are_left_out_and_others_are_not(tmp_path: Path) -> None:
    low_bit, _ = write_pair(tmp_path, KINDS["gptq"])
    assert f"{PRODUCT}.bias" not in opened(low_bit, bias=torch.zeros(128)).names()
    assert f"{PRODUCT}.bias" in opened(low_bit, bias=torch.ones(128)).names()


def test_a_tied_group_index_of_minus_one_is_none(tmp_path: Path) -> None:
    low_bit, _ = write_pair(tmp_path, KINDS["w4a16"])
    source = opened(low_bit, weight_g_idx=torch.full((64,), -1, dtype=torch.int32))
    rows = source.rows(f"{PRODUCT}.weight")
    assert rows is not None
    assert rows.order is None


def test_zero_points_of_a_byte_each_are_read(tmp_path: Path) -> None:
    low_bit, plain = write_pair(tmp_path, KINDS["w4a16-asymmetric"])
    words = load_file(low_bit / "model.safetensors")[f"{PRODUCT}.weight_zero_point"].numpy().view(np.uint32)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
    zeros = np.concatenate([word[None] >> shifts & 15 for word in words]).astype(np.int8) - 8
    source = opened(low_bit, weight_zero_point=torch.from_numpy(zeros))
    wanted = load_file(plain / "model.safetensors")[f"{PRODUCT}.weight"]
    assert torch.equal(source.get(f"{PRODUCT}.weight"), wanted)


@pytest.mark.parametrize(
    "kind, changes, named",
    [
        (
            "awq",
            {"qweight": torch.zeros(64, 16)},
            r"up_proj.qweight is float32 \[64, 16\]; it must be a matrix of",
        ),
        ("awq", {"scales": torch.full((2, 128), torch.inf)}, "up_proj.scales has scales that are not finite"),
        ("awq", {"scales": torch.zeros(2, 128, dtype=torch.int32)}, r"up_proj.scales is int32 \[2, 128\]; scales"),
        ("awq", {"scales": torch.zeros(3, 128)}, r"up_proj has integers of \[128, 64\] and scales of \[128, 3\]"),
        ("awq", {"scales": torch.zeros(4, 128), "qzeros": None}, "up_proj: a group has 16 values; low-bit"),
        ("awq", {"qzeros": torch.zeros(1, 16, dtype=torch.int32)}, "128 rows of 2 groups"),
        ("gptq", {"g_idx": torch.zeros(64, dtype=torch.int32)}, "g_idx must give each of 2 groups 32 of the 64"),
        ("gptq", {"g_idx": torch.zeros(4, dtype=torch.int32)}, "g_idx must give each of 2 groups 32 of the 64"),
        ("w4a16", {"weight_shape": torch.tensor([128, 32])}, r"\[128, 8\] words for \[128, 32\] integers"),
        ("w8a8", {"weight": torch.zeros(128, 64)}, "up_proj.weight is float32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, kind: str, changes: dict[str, Any], named: str
) -> None:
    low_bit, _ = write_pair(tmp_path, KINDS[kind])
    with pytest.raises(ModelError, match=named):
        opened(low_bit, **changes).rows(f"{PRODUCT}.weight")


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path, quantization: str) -> None:
    low_bit, _ = write_pair(tmp_path, KINDS["awq"])
    with pytest.raises(ConfigError, match=rf"--quantization is {quantization}; .* is quantised already \(awq\)"):
        decoder(low_bit, TorchBackend(), quantization=quantization)


@pytest.mark.parametrize("kind", ["awq", "gptq", "w4a16"])
def test_the_name_of_what_the_checkpoint_is_changes_nothing(tmp_path: Path, kind: str) -> None:
    low_bit, plain = write_pair(tmp_path, KINDS[kind])
    name = "compressed-tensors" if kind == "w4a16" else kind
    loaded = [checkpoint_form(low_bit, TorchBackend(), torch.float32, quantization=each) for each in (name, None)]
    assert [type(each.source) for each in loaded] == [CodeSource, CodeSource]
    for wrong, stored in ((low_bit, "awq" if kind == "gptq" else "gptq"), (plain, name)):
        with pytest.raises(
            ConfigError, match=rf"--quantization is {stored}; {wrong} is stored in .*; leave it out"
        ):
            checkpoint_form(wrong, TorchBackend(), torch.float32, quantization=stored)


def test_integers_that_the_config_does_not_speak_of_are_refused(tmp_path: Path) -> None:
    weights: dict[str, torch.Tensor] = random_weights(llama_shapes(tiny_llama_config()))
    weights[f"{PRODUCT}.weight"] = torch.ones(128, 64, dtype=torch.int8)
    _, plain = write_pair(tmp_path, Kind(layout="awq"))
    with pytest.raises(ModelError, match=r"up_proj\.weight is int8; it has no scales, or the config does not say"):
        decoder(plain, TorchBackend(), source=DictSource(weights))
