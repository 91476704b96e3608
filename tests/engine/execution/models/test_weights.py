"""From files to packed weights: what is read, in which type, and what is refused by name.

Planted bugs that these tests have caught: keys and values swapped in the fused product; gate and up swapped;
missing or unexpected tensors passed over; shapes not compared (broadcast instead); an index believed without
a look into the shards; a tied head packed a second time.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from faser.engine.checkpoints.families import decoder_spec
from faser.engine.execution.models.sources import SafetensorsSource
from faser.engine.execution.models.weights import DecoderWeights, NetworkWeights, pack_weights
from faser.errors import ModelError
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import llama_shapes, random_weights, tiny_llama_config, write_checkpoint, write_json
from tests.engine.execution.models.paged import load, prompt

CONFIG = tiny_llama_config()
SHAPES = llama_shapes(CONFIG)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


class DictSource:
    """Weights from a dict; remembers what was asked for."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights
        self.asked: list[str] = []

    def names(self) -> list[str]:
        return list(self._weights)

    def get(self, name: str) -> Tensor:
        self.asked.append(name)
        return self._weights[name]


def _pack(
    weights: dict[str, Tensor], *, dtype: torch.dtype = torch.float32, **fields: Any
) -> tuple[DecoderWeights, DictSource]:
    source = DictSource(weights)
    packed = pack_weights(source, decoder_spec(CONFIG | fields), TorchBackend(), dtype, lambda *_: None)
    return packed, source


def _write_sharded(directory: Path, weights: dict[str, Tensor]) -> None:
    directory.mkdir(exist_ok=True)
    write_json(directory / "config.json", CONFIG)
    names = list(weights)
    weight_map: dict[str, str] = {}
    for number in range(3):
        file = f"model-0000{number + 1}-of-00003.safetensors"
        part = {name: weights[name] for name in names[number::3]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def test_fused_products_stack_their_parts_in_order() -> None:
    weights = random_weights(SHAPES)
    packed, _ = _pack(weights)
    attention = [weights[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    mlp = [weights[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(packed.layers[1].qkv.weight, torch.cat(attention))
    network = packed.layers[1].network
    assert isinstance(network, NetworkWeights)
    assert torch.equal(network.gate_up.weight, torch.cat(mlp))


def test_every_tensor_is_read_once_and_a_tied_head_is_the_embedding() -> None:
    packed, source = _pack(random_weights(SHAPES))
    assert sorted(source.asked) == sorted(SHAPES)
    assert packed.head is packed.embedding


def test_packed_weights_do_not_lean_on_the_source() -> None:
    weights = random_weights(SHAPES)
    packed, _ = _pack(weights)
    before = packed.layers[0].post_norm.clone(), packed.embedding.weight.clone()
    for tensor in weights.values():
        tensor.zero_()
    assert torch.equal(packed.layers[0].post_norm, before[0])
    assert torch.equal(packed.embedding.weight, before[1])


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_cast_from_the_stored_type_to_the_one_asked_for(stored: torch.dtype) -> None:
    weights = random_weights(SHAPES, dtype=stored)
    packed, _ = _pack(weights, dtype=torch.bfloat16)
    network = packed.layers[0].network
    assert isinstance(network, NetworkWeights)
    assert torch.equal(network.down.weight, weights["model.layers.0.mlp.down_proj.weight"].bfloat16())
    assert torch.equal(packed.final_norm, weights["model.norm.weight"].float())


def test_progress_counts_bytes_up_to_the_total() -> None:
    seen: list[tuple[int, int]] = []
    pack_weights(
        DictSource(random_weights(SHAPES)),
        decoder_spec(CONFIG),
        TorchBackend(),
        torch.bfloat16,
        lambda done, total: seen.append((done, total)),
    )
    total = 2 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert len(seen) == len(SHAPES)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_a_sharded_checkpoint_gives_the_logits_of_the_single_file(tiny_checkpoint: Path, tmp_path: Path) -> None:
    _write_sharded(tmp_path, load_file(tiny_checkpoint / "model.safetensors"))
    token_ids = prompt(40, CONFIG["vocab_size"])
    assert torch.equal(load(tmp_path).prefill(token_ids, ()), load(tiny_checkpoint).prefill(token_ids, ()))


def test_missing_tensors_are_named_before_anything_is_read() -> None:
    weights = random_weights(SHAPES)
    del weights[Q_PROJ]
    source = DictSource(weights)
    with pytest.raises(ModelError, match=f"lacks tensor {Q_PROJ}"):
        pack_weights(source, decoder_spec(CONFIG), TorchBackend(), torch.float32, lambda *_: None)
    assert source.asked == []


def test_a_model_that_is_not_tied_needs_its_head() -> None:
    with pytest.raises(ModelError, match=r"lacks tensor lm_head\.weight"):
        _pack(random_weights(SHAPES), tie_word_embeddings=False)


def test_many_missing_tensors_are_counted() -> None:
    with pytest.raises(ModelError, match="and 6 more"):
        _pack(random_weights(SHAPES), num_hidden_layers=3)


def test_unexpected_tensors_are_named() -> None:
    weights = random_weights(SHAPES | {"model.layers.0.self_attn.q_proj.bias": (64,)})
    with pytest.raises(ModelError, match=r"has tensor model\.layers\.0\.self_attn\.q_proj\.bias, which"):
        _pack(weights)


def test_repetitions_of_what_is_known_are_passed_over() -> None:
    extra = {"lm_head.weight": SHAPES["model.embed_tokens.weight"]}
    extra |= {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,), "model.rotary_emb.inv_freq": (8,)}
    packed, source = _pack(random_weights(SHAPES | extra))
    assert packed.head is packed.embedding
    assert not set(extra) & set(source.asked)


@pytest.mark.parametrize("shape", [(64, 63), (1, 64), (64,), (64, 64, 1)])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(shape: tuple[int, ...]) -> None:
    weights = random_weights(SHAPES | {Q_PROJ: shape})
    with pytest.raises(ModelError) as caught:
        _pack(weights)
    assert str(caught.value) == f"tensor {Q_PROJ} has shape {list(shape)}; the config asks for [64, 64]"


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_file_cut_short_is_named(keep: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, random_weights(SHAPES))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    size = path.stat().st_size
    with pytest.raises(ModelError) as caught:
        SafetensorsSource(tmp_path)
    fault = "not those that its header describes" if keep < 0 else "too few for the header of a safetensors file"
    assert str(caught.value) == f"{path} is damaged or cut short: its {size} bytes are {fault}"


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 20)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short"):
        SafetensorsSource(tmp_path)


def test_a_shard_that_is_missing_or_incomplete_is_named(tmp_path: Path) -> None:
    weights = random_weights(SHAPES)
    _write_sharded(tmp_path, weights)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    names = list(load_file(shard))
    save_file({name: weights[name] for name in names[1:]}, shard)
    with pytest.raises(ModelError, match=f"00002-of-00003.safetensors has no tensor {names[0]}"):
        SafetensorsSource(tmp_path)
    shard.unlink()
    with pytest.raises(ModelError, match=r"00002-of-00003\.safetensors is missing"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}'])
def test_a_damaged_index_is_named(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"index\.json is not a safetensors index"):
        SafetensorsSource(tmp_path)


def test_a_directory_with_other_weights_only_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="only safetensors weights are read"):
        SafetensorsSource(tmp_path)


def test_types_of_no_weights_are_refused_with_their_name(tmp_path: Path) -> None:
    weights = random_weights(SHAPES) | {Q_PROJ: torch.zeros(64, 64, dtype=torch.int16)}
    write_checkpoint(tmp_path, CONFIG, weights)
    with pytest.raises(ModelError, match="stored as int16"):
        SafetensorsSource(tmp_path).get(Q_PROJ)
