"""GGUF files of every family against the checkpoints they were converted from: specs, weights, logits.

Planted bugs that these tests have caught: no row order undone, or in a family that has none; norms without one
taken off; the norms of another family; a rope base, a part of a head or a window that is not read; the weights
of OLMoE's experts divided by their sum.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from faser.engine.checkpoints.families import FAMILIES, GGUF_ARCHITECTURES
from faser.engine.checkpoints.families.qwen3_5 import DeltaNetSpec
from faser.engine.checkpoints.files import read_model_config
from faser.engine.checkpoints.gguf_config import gguf_config
from faser.engine.checkpoints.gguf_weights import open_gguf
from faser.engine.execution.models.loader import open_source
from faser.errors import ModelError
from tests.checkpoints import random_weights
from tests.engine.checkpoints.gguf.gguf_files import Array, convert, write_gguf
from tests.engine.checkpoints.mtp_models import mtp_shapes
from tests.engine.checkpoints.test_families import CASES, VOCAB_SIZE, Oracle, edited, make_oracle
from tests.engine.execution.models.paged import load, prompt

# A case of the families, the architecture of its GGUF file, and fields that a GGUF file cannot state otherwise.
_SCALE = {"query_pre_attn_scalar": 32}
FILES: list[tuple[str, str, dict[str, Any]]] = [
    ("mistral-no-window", "mistral3", {}),
    ("ministral3", "mistral3", {}),
    ("phi3", "phi3", {}),
    ("phi3-partial", "phi3", {}),
    ("phi3-longrope", "phi3", {}),
    ("granite", "granite", {}),
    ("granite-biases", "granite", {}),
    ("gemma2", "gemma2", _SCALE | {"tie_word_embeddings": True}),  # its files have no head
    ("gemma3", "gemma3", _SCALE),
    ("gemma3-tied", "gemma3", _SCALE),
    ("gemma3-linear-rope", "gemma3", _SCALE),
    ("gemma4", "gemma4", {}),
    ("gemma4-e", "gemma4", {}),
    ("gemma4-moe", "gemma4", {}),
    ("glm4", "glm4", {}),
    ("qwen3-moe-all", "qwen3moe", {}),
    ("mixtral", "llama", {}),
    ("olmoe", "olmoe", {}),
    ("granite-moe", "granitemoe", {}),
    ("granite-moe-biases", "granitemoe", {}),
    ("gpt-oss", "gpt-oss", {}),
    ("lfm2", "lfm2", {}),
    ("lfm2-moe", "lfm2moe", {"routed_scaling_factor": 1.0, "tie_word_embeddings": True}),
    ("qwen2", "qwen2vl", {}),
    ("qwen3", "qwen3vl", {}),
]


@dataclass(frozen=True)
class Pair:
    """A checkpoint directory, and what is in it."""

    directory: Path
    config: dict[str, Any]
    weights: dict[str, Array]


Pairs = Callable[[str, str], Pair]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """The checkpoint of a case, with model.gguf next to its directory's other files."""

    @cache
    def make(name: str, architecture: str) -> Pair:
        changes = next(fields for case, _, fields in FILES if case == name)
        original = make_oracle(
            next(case for case in CASES if case.name == name), tmp_path_factory.mktemp("original")
        )
        directory = edited(original.directory, tmp_path_factory.mktemp(name), changes)
        config = json.loads((directory / "config.json").read_text())
        source = open_source(directory)
        weights = {each: np.ascontiguousarray(source.get(each).numpy()) for each in source.names()}
        if config["tie_word_embeddings"]:
            weights.pop("lm_head.weight", None)
        pair = Pair(directory, config, weights)
        convert(config, pair.weights, directory / "converted.gguf", architecture)
        return pair

    return make


def test_the_list_of_families_names_the_architectures_of_files() -> None:
    assert {name for family in FAMILIES for name in family.gguf} == set(GGUF_ARCHITECTURES)


each_file = pytest.mark.parametrize("name, architecture", [(name, kind) for name, kind, _ in FILES])


@each_file
def test_a_converted_file_says_what_the_config_says(name: str, architecture: str, pairs: Pairs) -> None:
    directory = pairs(name, architecture).directory
    found, expected = read_model_config(directory / "converted.gguf"), read_model_config(directory)
    assert found.spec == expected.spec
    assert found.eos_token_ids == expected.eos_token_ids == (2,)


@each_file
def test_converted_weights_are_those_of_the_checkpoint(name: str, architecture: str, pairs: Pairs) -> None:
    """Bit for bit; norms with one added, rounded to 32 bits and taken off, within half a step of 2.0."""
    pair = pairs(name, architecture)
    source = open_gguf(pair.directory / "converted.gguf")
    assert set(source.names()) == set(pair.weights)
    for tensor, expected in pair.weights.items():
        rounded = architecture.startswith("gemma") and tensor.endswith("norm.weight")
        np.testing.assert_allclose(source.get(tensor).numpy(), expected, rtol=0, atol=1.2e-7 if rounded else 0.0)


# Cases with delta nets, and the architectures of their files.
DELTA_NETS = [("qwen3.5", "qwen35"), ("qwen3.5-moe", "qwen35moe"), ("qwen3-next", "qwen3next")]


def converted(case: str, architecture: str, folder: Path, **options: Any) -> Oracle:
    """The oracle of a case with delta nets, and model.gguf next to its files. options: of convert."""
    oracle = make_oracle(next(each for each in CASES if each.name == case), folder)
    config = json.loads((folder / "config.json").read_text())
    if architecture == "qwen35moe":
        config.pop("intermediate_size")  # the converter finds none in checkpoints
    config["num_hidden_layers"] += options.get("num_drafting", 0)
    source = open_source(folder)
    weights = {each: np.ascontiguousarray(source.get(each).numpy()) for each in source.names()}
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    convert(config, weights, folder / "model.gguf", architecture, **options)
    return oracle


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("name, architecture", DELTA_NETS)
@pytest.mark.full(but=("qwen3.5-qwen35-8", "qwen3.5-moe-qwen35moe-0", "qwen3-next-qwen3next-8"))
def test_a_file_with_delta_nets_is_the_same_model(
    name: str, architecture: str, kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    """But for the order of value heads, and of parts of a product."""
    oracle = converted(name, architecture, tmp_path, quantization=kind)
    found, expected = (read_model_config(each).spec for each in (tmp_path / "model.gguf", tmp_path))
    tiled = architecture != "qwen3next"
    layers = [
        replace(each, attention=replace(each.attention, tiled=tiled, fused_qkvz=False))
        if isinstance(each.attention, DeltaNetSpec)
        else each
        for each in expected.layers
    ]
    assert found == replace(expected, layers=tuple(layers))
    logits = load(tmp_path / "model.gguf").prefill(oracle.token_ids, (30,))
    if kind is GGMLQuantizationType.F32:
        torch.testing.assert_close(logits, oracle.logits, atol=1e-4, rtol=0)
    else:
        assert torch.corrcoef(torch.stack((logits.flatten(), oracle.logits.flatten())))[0, 1] > 0.98


@pytest.mark.parametrize(
    "name, architecture, options",
    [
        *((name, kind, {"num_drafting": 1}) for name, kind in DELTA_NETS),
        ("qwen3-next", "qwen3next", {"legacy": True}),
    ],
)
def test_other_files_with_delta_nets_are_the_same_model_too(
    name: str, architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """With a layer more, which drafts and is not read; and in the layout of older files."""
    if "num_drafting" in options:
        layer = {"blk.5.nextn.eh_proj.weight": np.zeros((64, 128), np.float32)}
        options = options | {"extra": layer}
    oracle = converted(name, architecture, tmp_path, **options)
    logits = load(tmp_path / "model.gguf").prefill(oracle.token_ids, (30,))
    torch.testing.assert_close(logits, oracle.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name, architecture", DELTA_NETS)
def test_files_with_delta_nets_would_show_value_heads_in_another_order(
    name: str, architecture: str, tmp_path: Path
) -> None:
    other = "grouped" if architecture != "qwen3next" else "tiled"
    oracle = converted(name, architecture, tmp_path, delta_heads=other)
    wrong = load(tmp_path / "model.gguf").prefill(oracle.token_ids, ())
    assert (wrong - oracle.logits).abs().max() > 1e-2


def test_the_layer_that_drafts_has_the_hubs_names_and_values(tmp_path: Path) -> None:
    """Norms with one added, rounded to 32 bits and taken off, within half a step of 2.0."""
    make_oracle(next(each for each in CASES if each.name == "qwen3.5"), tmp_path)
    config, source = json.loads((tmp_path / "config.json").read_text()), open_source(tmp_path)
    weights = {each: source.get(each).numpy() for each in source.names() if each != "lm_head.weight"}
    layer = {name: each.numpy() for name, each in random_weights(mtp_shapes(config)).items()}
    convert(config, weights | layer, tmp_path / "m.gguf", "qwen35")
    stored = open_gguf(tmp_path / "m.gguf")
    assert {name for name in stored.names() if name.startswith("mtp.")} == set(layer)
    for name, values in layer.items():
        np.testing.assert_allclose(stored.get(name).numpy(), values, rtol=0, atol=2.4e-7, err_msg=name)


@each_file
def test_the_logits_of_both_files_are_the_same(name: str, architecture: str, pairs: Pairs) -> None:
    directory, token_ids = pairs(name, architecture).directory, prompt(80, VOCAB_SIZE)
    found = load(directory / "converted.gguf").prefill(token_ids, ())
    expected = load(directory).prefill(token_ids, ())
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 if architecture.startswith("gemma") else 0.0)


@pytest.mark.parametrize(
    "name, architecture",
    [
        ("granite", "granite"),
        ("phi3", "phi3"),
        ("gemma2", "gemma2"),
        ("gemma4-moe", "gemma4"),
        ("glm4", "glm4"),
    ],
)
def test_quantised_rows_come_back_in_the_order_of_the_hub(
    name: str, architecture: str, pairs: Pairs, tmp_path: Path
) -> None:
    """A row is quantised by itself, so the order of rows does not matter to its values."""
    pair, path, kind = pairs(name, architecture), tmp_path / "m.gguf", GGMLQuantizationType.Q8_0
    convert(pair.config, pair.weights, path, architecture, quantization=kind)
    source = open_gguf(path)
    for tensor, values in pair.weights.items():
        if values.ndim == 2:
            blocks = quants.quantize(values, kind)
            np.testing.assert_array_equal(source.blocks(tensor)[1], blocks, err_msg=tensor)
            np.testing.assert_array_equal(source.get(tensor).numpy(), quants.dequantize(blocks, kind))


@pytest.mark.parametrize(
    "name, architecture", [("granite", "granite"), ("ministral3", "mistral3"), ("gemma3", "gemma3")]
)
def test_these_files_would_show_values_that_are_left_as_they_are_stored(
    name: str, architecture: str, pairs: Pairs
) -> None:
    """What the comparison of logits is worth: a file with the hub's own values, which are changed when read."""
    pair, token_ids = pairs(name, architecture), prompt(80, VOCAB_SIZE)
    wrong = pair.directory / "wrong.gguf"
    convert(pair.config, pair.weights, wrong, architecture, changed=False)
    expected = load(pair.directory).prefill(token_ids, ())
    assert (load(wrong).prefill(token_ids, ()) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("architecture, num_layers", [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_the_27b_gemmas_are_scaled_by_the_hidden_size_a_head(
    architecture: str, num_layers: int, tmp_path: Path
) -> None:
    """Of 64 channels four heads have 16 each, and 24 of their own."""
    keys = {
        f"{architecture}.attention.key_length": 24,
        f"{architecture}.attention.value_length": 24,
        f"{architecture}.attention.sliding_window": 512,
    }
    extra = {f"more.{number}": np.zeros(1, np.float32) for number in range(num_layers)}
    for layers, scalar in ((2, 24), (num_layers, 16)):
        metadata = keys | {f"{architecture}.block_count": layers}
        write_gguf(tmp_path / "m.gguf", architecture, metadata=metadata, extra=extra)
        assert gguf_config(tmp_path / "m.gguf")["query_pre_attn_scalar"] == scalar


def test_calls_of_gpt_oss_end_generation_too(tmp_path: Path) -> None:
    keys = {
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 96,
        "attention.sliding_window": 8,
    }
    tokens = {"tokenizer.ggml.tokens": ["a", "b", "<|return|>", "<|call|>"]}
    metadata = {f"gpt-oss.{key}": value for key, value in keys.items()} | tokens
    write_gguf(tmp_path / "m.gguf", "gpt-oss", metadata=metadata)
    assert gguf_config(tmp_path / "m.gguf")["eos_token_id"] == [2, 3]


def test_a_gemma_3_without_a_window_has_none_in_any_layer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "gemma3", metadata={"gemma3.rope.freq_base": 1e6})
    spec = read_model_config(tmp_path / "m.gguf").spec
    assert {layer.attention for layer in spec.layers} == {spec.attention}
    assert spec.attention.window is None
    assert spec.attention.rope is not None
    assert spec.attention.rope.theta == 1e6


def test_an_attention_factor_that_is_not_the_usual_one_is_stated(tmp_path: Path) -> None:
    factors = np.linspace(1, 2, 8, dtype=np.float32)
    extra = {"rope_factors_long.weight": factors, "rope_factors_short.weight": factors}
    keys = {"phi3.rope.scaling.original_context_length": 128, "phi3.rope.scaling.attn_factor": 1.25}
    write_gguf(tmp_path / "m.gguf", "phi3", metadata=keys, extra=extra)
    assert gguf_config(tmp_path / "m.gguf")["rope_scaling"]["attention_factor"] == 1.25


_GEMMA4 = {"attention.sliding_window_pattern": [True, False], "attention.sliding_window": 8}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}


@pytest.mark.parametrize(
    "architecture, keys, message",
    [
        ("granite", {"rope.scaling.finetuned": False}, "finetuned is false; only models with rope"),
        ("granite", {"expert_count": 4}, "mixture of 4 experts"),
        ("granite", {"rope.dimension_count": 8}, "rotates 8"),
        ("qwen2vl", {"attention.sliding_window": 32}, "sliding_window is 32; qwen2vl files may have none"),
        ("gemma2", {"attention.sliding_window": None}, "attention.sliding_window"),
        ("gemma3", {"attention.sliding_window_pattern": [1, 0], "attention.sliding_window": 8}, "a list of 2"),
        ("gemma4", {"attention.head_count_kv": [2], **_GEMMA4}, r"head_count_kv is \[2\]; it must have 2 numbers"),
        ("gemma4", {"feed_forward_length": [96, 48], **_GEMMA4}, r"feed_forward_length is \[96, 48\]; only"),
        ("gemma4", _GEMMA4 | {"attention.sliding_window_pattern": [True]}, "has 1 entries for 2 layers"),
        ("glm4", {"rope.dimension_sections": [8, 8, 0, 0]}, "the text half of GLM-4V is not supported"),
        ("phi3", {"rope.scaling.type": "longrope"}, "type is longrope; supported are"),
        ("mistral3", {"attention.temperature_scale": 0.1}, "temperature_scale is 0.1 without yarn"),
        (
            "mistral3",
            _YARN | {"attention.temperature_scale": 0.1, "attention.temperature_length": 64},
            "temperature_length is 64; only the original context length, 128",
        ),
        ("qwen3vl", _YARN | {"rope.scaling.attn_factor": 1.5}, "attn_factor is 1.5; only 1"),
        ("qwen3vl", _YARN | {"rope.scaling.yarn_ext_factor": 0.0}, "yarn_ext_factor is 0; only 1"),
    ],
)
def test_what_no_config_expresses_is_refused(
    architecture: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", architecture, metadata={f"{architecture}.{key}": keys[key] for key in keys})
    with pytest.raises(ModelError, match=message):
        gguf_config(tmp_path / "m.gguf")


def test_tensors_of_another_architecture_are_refused(tmp_path: Path) -> None:
    """A layer of phi3 has no gate of its own."""
    write_gguf(tmp_path / "m.gguf", "phi3")
    with pytest.raises(ModelError, match=r"a tensor blk\.0\.attn_q\.weight, which no supported model of its"):
        open_gguf(tmp_path / "m.gguf")
