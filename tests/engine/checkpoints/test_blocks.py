"""Block drafters as their config.json describes them, in each layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faser.engine.checkpoints.blocks import BlockSpec, block_method, read_block_spec
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.files import read_model_config
from faser.errors import ModelError
from tests.checkpoints import VOCAB_SIZE, tiny_llama_config
from tests.engine.execution.drafting.seeded_blocks import BlockShape, block_path, write_block

TARGET = decoder_spec(tiny_llama_config() | {"num_hidden_layers": 6})
SHAPE = BlockShape(vocab_size=VOCAB_SIZE, state_layers=(0, 3, 6), block_size=7)
BARE = BlockShape(
    vocab_size=VOCAB_SIZE, state_layers=(0, 3, 6), markov_rank=0, confidence=False, from_anchor=False
)


def read(folder: Path, layout: str, shape: BlockShape = SHAPE, **config: Any) -> BlockSpec:
    write_block(folder, shape, layout, **config)
    path = block_path(folder, layout)
    method = block_method(path)
    assert method is not None
    return read_block_spec(path, TARGET, method)


@pytest.mark.parametrize("layout", ["dspark", "dflash", "speculators", "gguf"])
def test_the_layers_that_are_read_are_counted_as_each_layout_counts_them(tmp_path: Path, layout: str) -> None:
    """target_layer_ids counts outputs and -1 is the embedding; aux_hidden_state_layer_ids counts inputs, as files do."""
    assert read(tmp_path, layout).state_layers == (0, 3, 6)
    named = {
        "dspark": "target_layer_ids",
        "speculators": "aux_hidden_state_layer_ids",
        "gguf": "dflash__target_layers",
    }
    if layout in named:
        wanted = (2, 5) if layout == "dspark" else (1, 4)
        listed: dict[str, Any] = {named[layout]: [1, 4]}
        assert read(tmp_path, layout, **listed).state_layers == wanted


def test_slots_follow_the_convention_of_the_layout(tmp_path: Path) -> None:
    dspark, dflash = read(tmp_path, "dspark"), read(tmp_path, "dflash", BARE)
    assert (dspark.method, dspark.predicts_from_anchor, dspark.most_tokens, dspark.rows(3)) == (
        "dspark",
        True,
        7,
        3,
    )
    assert (dflash.method, dflash.predicts_from_anchor, dflash.most_tokens, dflash.rows(3)) == (
        "dflash",
        False,
        3,
        4,
    )
    assert read(tmp_path, "speculators", BARE).predicts_from_anchor is False
    assert read(tmp_path, "speculators").markov_rank == SHAPE.markov_rank


@pytest.mark.parametrize(
    ("config", "causal"),
    [
        ({}, (False, True)),
        ({"is_causal": True}, (True, True)),
        ({"is_causal": False}, (False, False)),
        ({"dflash_config": {"causal": False}}, (False, False)),
    ],
)
def test_layers_with_windows_are_causal_unless_the_config_says_otherwise(
    tmp_path: Path, config: dict[str, Any], causal: tuple[bool, ...]
) -> None:
    shape = BlockShape(vocab_size=VOCAB_SIZE, window=8, windowed=(False, True))
    assert read(tmp_path, "dspark", shape, **config).causal == causal


def test_speculators_say_that_windows_are_not_causal(tmp_path: Path) -> None:
    shape = BlockShape(vocab_size=VOCAB_SIZE)
    layers = shape.layers() | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    found = read(tmp_path, "speculators", shape, transformer_layer_config=layers)
    assert (found.causal, found.decoder.windows) == ((True, False), (8, None))
    found = read(tmp_path, "speculators", shape, transformer_layer_config=layers, sliding_window_non_causal=True)
    assert found.causal == (False, False)


def test_one_window_for_all_layers(tmp_path: Path) -> None:
    inner = {"target_layer_ids": [1, 2], "block_size": 4, "mask_token_id": 5}
    config = {"dflash_config": inner | {"use_swa": True, "swa_window_size": 9}}
    assert read(tmp_path, "dflash", BARE, **config).decoder.windows == (9, 9)


@pytest.mark.parametrize(
    ("layout", "config", "message"),
    [
        ("speculators", {"sample_from_anchor": None}, "sample_from_anchor is missing; .* of kind dspark must say"),
        ("speculators", {"transformer_layer_config": None}, "transformer_layer_config is missing"),
        ("speculators", {"aux_hidden_state_layer_ids": [7]}, "aux_.* names layer 7; the model has layers 0 to 5"),
        ("speculators", {"draft_vocab_size": 600}, "draft_vocab_size is 600; the target's vocabulary has 512"),
        ("dspark", {"target_layer_ids": [6]}, "target_layer_ids names layer 6; the model has layers 0 to 5$"),
        ("dspark", {"target_layer_ids": None}, "target_layer_ids is None; it must be a list"),
        ("dspark", {"target_layer_ids": [4, 1]}, "in falling order"),
        ("dspark", {"num_target_layers": 36}, "made for a model of 36 layers .*; the model has 6"),
        ("dspark", {"markov_head_type": "rnn"}, "markov_head_type is 'rnn'; only vanilla is computed"),
        ("dspark", {"markov_rank": 0}, "confidence_head_with_markov is true, but markov_rank is 0"),
        ("dspark", {"mask_token_id": 512}, "mask_token_id is 512; the model has tokens 0 to 511"),
        ("dspark", {"is_causal": 1}, "is_causal is 1; it must be true or false"),
        (
            "dspark",
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping of the drafter is 30.0, which is not",
        ),
        ("dspark", {"sample_from_anchor": False, "block_size": 1}, "block_size is 1; .* at least 2"),
        ("dspark", {"hidden_size": 32}, "hidden states of 32 values; those of the model have 64"),
        (
            "dspark",
            {"sliding_window": 6, "layer_types": ["sliding_attention"] * 2, "is_causal": False},
            "window is 6; it must be at least its block_size, 7",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_value_and_the_limit(
    layout: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, layout, **config)


@pytest.mark.parametrize(("shape", "method", "from_anchor"), [(SHAPE, "dspark", True), (BARE, "dflash", False)])
def test_a_gguf_file_is_dspark_if_it_has_a_markov_head(
    tmp_path: Path, shape: BlockShape, method: str, from_anchor: bool
) -> None:
    """Without a key DSpark predicts from the anchor and DFlash does not; no layer is causal unless the file says so."""
    shape = replace(shape, window=8, windowed=(False, True))
    found = read(tmp_path, "gguf", shape, dflash__sample_from_anchor=None)
    assert (found.method, found.predicts_from_anchor) == (method, from_anchor)
    assert (found.causal, found.decoder.windows) == ((False, False), (None, 8))
    found = read(
        tmp_path, "gguf", shape, dflash__sample_from_anchor=not from_anchor, dflash__attention__causal=True
    )
    assert (found.predicts_from_anchor, found.causal) == (not from_anchor, (True, True))
    assert (found.markov_rank, found.confidence, found.confidence_reads_markov) == (
        shape.markov_rank,
        shape.confidence,
        shape.confidence,
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architecture": "dspark"},
            "architecture dspark, which is not supported: .* number layers .* of their own",
        ),
        ({"dflash__hyper_connection__count": 4}, "DSpark with the layers of DeepSeek-V4; only those of Qwen3"),
        ({"dflash__attention__value_scale": 0.5}, "has dflash.attention.value_scale, which is not computed"),
        (
            {"dflash__target_layers": [7]},
            "target_layers names layer 7; the model has layers 0 to 5, and 6 stands for",
        ),
        ({"dflash__target_layers": None}, "has no dflash.target_layers"),
        ({"tokenizer__ggml__mask_token_id": None}, "has no tokenizer.ggml.mask_token_id"),
        ({"tokenizer__ggml__tokens": ["a", "b"]}, "made for a vocabulary of 2 tokens; the model has 512"),
    ],
)
def test_gguf_files_that_do_not_fit_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, "gguf", **config)


def test_a_drafter_in_a_gguf_file_is_no_model(tmp_path: Path) -> None:
    write_block(tmp_path, BARE, "gguf")
    with pytest.raises(ModelError, match="architecture DFlashDraftModel is not supported"):
        read_model_config(block_path(tmp_path, "gguf"))


def test_a_model_is_no_block_drafter(tmp_path: Path) -> None:
    assert block_method(tmp_path) is None
    write_block(tmp_path, SHAPE, "dspark", architectures=["Qwen3ForCausalLM"])
    assert block_method(tmp_path) is None
