"""From quantised checkpoints to logits, and from unquantised checkpoints to quantised products.

Oracles: a checkpoint of the dequantised numbers; where activations are quantised too, the same checkpoint on a
backend that rounds the inputs of the layers' products and multiplies in float32.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from faser.engine.checkpoints.families import decoder_spec
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.models.sources import Fp8Source
from faser.engine.execution.models.weights import DecoderWeights, NetworkWeights, pack_weights
from faser.errors import ConfigError, ModelError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.fp8 import FP8, quantise_rows, quantise_weight
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE, tiny_llama_config, write_checkpoint
from tests.engine.checkpoints.fp8_checkpoints import (
    FP8_DYNAMIC,
    FP8_STATIC,
    arguments,
    compressed_tensors,
    dequantised_weights,
    quantised,
    stored_weights,
    tiny_weights,
    write_pair,
)
from tests.engine.execution.models.paged import MAX_POSITIONS, PagedModel, prompt
from tests.engine.execution.models.test_weights import DictSource

PROMPT = prompt(40, VOCAB_SIZE)
Q_PROJ, K_PROJ = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")
FORMATS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (FP8_DYNAMIC, {"by_channel": False}),
    (FP8_STATIC, {"by_channel": False, "static": True}),
    (compressed_tensors(), {"by_channel": True}),
    (compressed_tensors(group={"weights": arguments(strategy="tensor")}), {"by_channel": False}),
    (compressed_tensors(ignore=["re:.*down_proj"]), {"by_channel": True, "plain": ("down_proj",)}),
]


class WithoutFp8(TorchBackend):
    """The reference backend, as one that has no products of 8-bit floats."""

    def __init__(self) -> None:
        super().__init__()
        self.has_fp8 = False


class RoundingInputs(TorchBackend):
    """Rounds what goes into the layers' products as quantising does, and multiplies by dequantised weights."""

    def linear(self, x: Tensor, packed: Any, out: Tensor, *, residual: Tensor | None = None) -> Tensor:
        is_head = len(packed.weight) == VOCAB_SIZE
        rounded = x if is_head else quantise_rows(x).dequantised().to(x.dtype)
        return super().linear(rounded, packed, out, residual=residual)


def decoder(directory: Path, backend: Backend, **options: Any) -> Decoder:
    return load_decoder(
        directory,
        backend,
        torch.float32,
        max_model_len=MAX_POSITIONS,
        max_rows=MAX_POSITIONS,
        progress=lambda *_: None,
        **options,
    )


def logits(directory: Path, backend: Backend, **options: Any) -> Tensor:
    return PagedModel(decoder(directory, backend, **options), backend, block_size=16).prefill(PROMPT, (1, 20))


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("quantization, how", FORMATS)
def test_a_backend_without_the_products_computes_what_the_stored_numbers_stand_for(
    quantization: dict[str, Any], how: dict[str, Any], tmp_path: Path
) -> None:
    fp8, dequantised = write_pair(tmp_path, quantization, stored_weights(tiny_weights(), **how))
    assert torch.equal(logits(fp8, WithoutFp8()), logits(dequantised, WithoutFp8()))


@pytest.mark.parametrize("quantization, how", [each for each in FORMATS if "plain" not in each[1]])
def test_quantised_products_round_their_inputs_and_nothing_else(
    quantization: dict[str, Any], how: dict[str, Any], tmp_path: Path
) -> None:
    """Sums differ in the last bits, and now and then so much that an input is rounded to the next number."""
    fp8, dequantised = write_pair(tmp_path, quantization, stored_weights(tiny_weights(), **how))
    found = logits(fp8, TorchBackend())
    assert distance(found, logits(dequantised, RoundingInputs())) < 0.01
    exact = distance(found, logits(dequantised, TorchBackend()))
    assert 0.01 < exact < 0.2, "what quantising the inputs costs this model"


def test_parts_of_a_fused_product_keep_their_scales() -> None:
    stored = stored_weights(tiny_weights(), by_channel=False)
    packed = pack(stored).layers[0].qkv.weight
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    values = torch.cat([stored[name] for name in names])
    scales = torch.cat([stored[f"{name}_scale"].expand(len(stored[name])) for name in names])
    assert torch.equal(packed.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(packed.scales, scales)
    assert len(set(scales.tolist())) == 3


def pack(stored: dict[str, Tensor], **fields: Any) -> DecoderWeights:
    source = Fp8Source(DictSource(stored))
    spec = decoder_spec(tiny_llama_config() | fields)
    return pack_weights(source, spec, TorchBackend(), torch.float32, lambda *_: None, stored=source.fp8)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_may_have_any_shape(shape: tuple[int, ...]) -> None:
    stored = stored_weights(tiny_weights(), by_channel=False)
    stored[f"{Q_PROJ}_scale"] = stored[f"{Q_PROJ}_scale"].reshape(shape)
    assert len(pack(stored).layers[0].qkv.weight.scales) == 64 + 32 + 32


def test_scales_of_16_bits_are_widened() -> None:
    stored = stored_weights(tiny_weights(), by_channel=True)
    scales = stored[f"{Q_PROJ}_scale"].bfloat16()
    packed = pack(stored | {f"{Q_PROJ}_scale": scales.flatten()}).layers[0].qkv.weight
    assert torch.equal(packed.scales[:64], scales[:, 0].float())


def test_a_quantised_head_is_dequantised_for_it_is_read_by_rows_too() -> None:
    weights = tiny_weights(tie_word_embeddings=False)
    values, scales = quantised(weights["lm_head.weight"], by_channel=True)
    stored = stored_weights(weights, by_channel=True) | {"lm_head.weight": values, "lm_head.weight_scale": scales}
    assert torch.equal(pack(stored, tie_word_embeddings=False).head.weight, values.float() * scales)


def test_scales_of_keys_and_values_are_passed_over() -> None:
    extra = {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in ("k", "v")}
    extra |= {f"model.layers.1.self_attn.{name}_proj.output_scale": torch.ones(1) for name in ("k", "v")}
    stored = stored_weights(tiny_weights(), by_channel=True)
    assert pack(stored | extra).num_bytes == pack(stored).num_bytes


@pytest.mark.parametrize("shape", [(63,), (1, 64), (64, 64), (64, 1, 1), (0,)])
def test_scales_that_do_not_go_with_their_tensor_are_named(shape: tuple[int, ...]) -> None:
    stored = stored_weights(tiny_weights(), by_channel=True) | {f"{Q_PROJ}_scale": torch.ones(shape)}
    with pytest.raises(ModelError, match=rf"{Q_PROJ}_scale has shape .*\[1\], or one a row, \[64\] or \[64, 1\]"):
        pack(stored)


def test_scales_without_their_tensor_are_unexpected() -> None:
    stored = stored_weights(tiny_weights(), by_channel=True) | {"model.norm.other_scale": torch.ones(1)}
    with pytest.raises(ModelError, match=r"has tensor model\.norm\.other_scale"):
        pack(stored)


def test_a_tensor_with_scales_that_is_not_quantised_is_named() -> None:
    stored = stored_weights(tiny_weights(), by_channel=True) | {Q_PROJ: torch.zeros(64, 64)}
    with pytest.raises(ModelError, match=rf"{Q_PROJ} has scales but is float32 \[64, 64\]"):
        pack(stored)


def test_a_quantised_tensor_without_scales_is_named() -> None:
    stored = stored_weights(tiny_weights(), by_channel=True)
    for part in "qkv":
        del stored[f"model.layers.0.self_attn.{part}_proj.weight_scale"]
    with pytest.raises(ModelError, match=rf"{Q_PROJ} is float8_e4m3fn; it has no scales"):
        pack(stored)


def test_a_part_of_a_product_that_is_not_quantised_is_named() -> None:
    stored = stored_weights(tiny_weights(), by_channel=True, plain=("layers.0.self_attn.k_proj",))
    with pytest.raises(ModelError, match=f"{K_PROJ} is not quantised, and of one product with {Q_PROJ}"):
        pack(stored)


def test_a_quantised_tensor_of_another_shape_is_named() -> None:
    stored = stored_weights(tiny_weights(), by_channel=False) | {Q_PROJ: torch.zeros(64, 32).to(FP8)}
    with pytest.raises(ModelError, match=rf"{Q_PROJ} has shape \[64, 32\]; the config asks for \[64, 64\]"):
        pack(stored)


def test_a_quantised_checkpoint_whose_config_does_not_say_so_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_llama_config(), stored_weights(tiny_weights(), by_channel=True))
    with pytest.raises(ModelError, match="weight_scale and 11 more, which its config does not describe"):
        decoder(tmp_path, TorchBackend())


def test_dequantising_is_said_once_with_what_it_costs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fp8, _ = write_pair(tmp_path, compressed_tensors(), stored_weights(tiny_weights(), by_channel=True))
    with caplog.at_level(logging.WARNING, "faser"):
        decoder(fp8, TorchBackend())
        assert caplog.messages == []
        decoder(fp8, WithoutFp8())
    (message,) = caplog.messages
    assert "is quantised (compressed-tensors) and the torch backend has no fp8 products on cpu" in message
    assert "dequantised to float32" in message


def test_fixed_scales_of_inputs_are_said_not_to_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = stored_weights(tiny_weights(), by_channel=False, static=True)
    fp8, _ = write_pair(tmp_path, FP8_STATIC, stored)
    with caplog.at_level(logging.INFO, "faser"):
        decoder(fp8, TorchBackend())
    assert "ignoring static activation scales" in caplog.text


def test_scales_of_keys_and_values_are_said_not_to_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = stored_weights(tiny_weights(), by_channel=False)
    stored["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    fp8, _ = write_pair(tmp_path, FP8_DYNAMIC, stored)
    with caplog.at_level(logging.INFO, "faser"):
        decoder(fp8, TorchBackend())
    (message,) = caplog.messages
    assert message.endswith("ignoring the scales of keys and values; --kv-cache-dtype fp8 uses a scale of one")


def test_the_native_backend_computes_in_integers_and_refuses_to_quantise_in_8_bit_floats(
    tmp_path: Path, kernel_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    native = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1)
    fp8, dequantised = write_pair(tmp_path, FP8_DYNAMIC, stored_weights(tiny_weights(), by_channel=False))
    with caplog.at_level(logging.INFO, "faser"):
        found = logits(fp8, native)
    assert "using weights (fp8) as int8, one scale for 32 values, with 8-bit activations; --quant" in caplog.text
    wanted = logits(dequantised, native)
    assert 0.001 < distance(found, wanted) < distance(logits(fp8, TorchBackend()), wanted) / 2
    assert torch.equal(logits(fp8, native, quantization="none"), wanted)
    for directory in (fp8, dequantised):
        with pytest.raises(
            ConfigError, match=r"^--quantization is fp8; the native backend has no fp8 products on cpu"
        ):
            decoder(directory, native, quantization="fp8")


def test_a_quantization_that_is_not_known_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="quantization is int3; only none, fp8, gguf, int8, int4 are known"):
        decoder(tiny_checkpoint, TorchBackend(), quantization="int3")


def test_quantising_while_loading_is_quantising_the_layers_products(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Oracle: a checkpoint of the rounded weights, on the backend that rounds the inputs."""
    weights = load_file(tiny_checkpoint / "model.safetensors")
    rounded = dequantised_weights(stored_weights(weights, by_channel=True))
    write_checkpoint(tmp_path, tiny_llama_config(), rounded)
    found = logits(tiny_checkpoint, TorchBackend(), quantization="fp8")
    assert distance(found, logits(tmp_path, RoundingInputs())) < 0.01
    assert 0.01 < distance(found, logits(tiny_checkpoint, TorchBackend())) < 0.3


def test_embedding_head_and_norms_are_never_quantised() -> None:
    weights = tiny_weights(tie_word_embeddings=False)
    spec = decoder_spec(tiny_llama_config() | {"tie_word_embeddings": False})
    packed = pack_weights(
        DictSource(weights), spec, TorchBackend(), torch.bfloat16, lambda *_: None, quantise=quantise_weight
    )
    assert torch.equal(packed.head.weight, weights["lm_head.weight"].bfloat16())
    assert torch.equal(packed.embedding.weight, weights["model.embed_tokens.weight"].bfloat16())
    layer, network = packed.layers[1], packed.layers[1].network
    assert isinstance(network, NetworkWeights)
    products = (layer.qkv, layer.attention_out, network.gate_up, network.down)
    assert all(product.weight.values.dtype is FP8 for product in products)
    norms = (packed.final_norm, layer.input_norm, layer.post_norm)
    assert all(norm is not None and norm.dtype is torch.float32 for norm in norms)


def test_a_checkpoint_that_is_quantised_stays_as_it_is_when_asked_to_be_quantised(tmp_path: Path) -> None:
    stored = stored_weights(tiny_weights(), by_channel=True, plain=("down_proj",))
    fp8, _ = write_pair(tmp_path, compressed_tensors(), stored)
    assert torch.equal(logits(fp8, TorchBackend(), quantization="fp8"), logits(fp8, TorchBackend()))


def test_a_quantised_product_keeps_its_bias(tmp_path: Path) -> None:
    config = tiny_llama_config() | {"architectures": ["Qwen2ForCausalLM"]}
    weights = tiny_weights()
    for layer in range(2):
        for part, width in (("q", 64), ("k", 32), ("v", 32)):
            weights[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = torch.linspace(-2, 2, width)
    stored = stored_weights(weights, by_channel=True)
    write_checkpoint(tmp_path / "fp8", config | {"quantization_config": FP8_DYNAMIC}, stored)
    write_checkpoint(tmp_path / "plain", config, dequantised_weights(stored))
    found = logits(tmp_path / "fp8", TorchBackend())
    assert distance(found, logits(tmp_path / "plain", RoundingInputs())) < 0.01
    wanted = torch.cat([torch.linspace(-2, 2, width) for width in (64, 32, 32)])
    assert torch.equal(pack(stored, architectures=config["architectures"]).layers[1].qkv.bias, wanted)


def test_bytes_of_weights_are_those_of_the_types_they_are_packed_in(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Counted by hand: two layers of 64 channels, 128 within, four heads over two."""
    products = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128)
    channels = 2 * ((64 + 2 * 32) + 64 + 2 * 128 + 64)
    others = VOCAB_SIZE * 64 + 5 * 64
    assert decoder(tiny_checkpoint, TorchBackend()).weight_bytes == 4 * (products + others)
    expected = products + 4 * channels + 4 * others
    assert decoder(tiny_checkpoint, TorchBackend(), quantization="fp8").weight_bytes == expected
    fp8, dequantised = write_pair(tmp_path, FP8_DYNAMIC, stored_weights(tiny_weights(), by_channel=False))
    assert decoder(fp8, TorchBackend()).weight_bytes == expected
    assert decoder(fp8, WithoutFp8()).weight_bytes == decoder(dequantised, WithoutFp8()).weight_bytes


def test_progress_ends_at_its_total_for_a_quantised_checkpoint() -> None:
    seen: list[tuple[int, int]] = []
    source = Fp8Source(DictSource(stored_weights(tiny_weights(), by_channel=True)))
    pack_weights(
        source,
        decoder_spec(tiny_llama_config()),
        TorchBackend(),
        torch.bfloat16,
        lambda done, total: seen.append((done, total)),
        stored=source.fp8,
    )
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
