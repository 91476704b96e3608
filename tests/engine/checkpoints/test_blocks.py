"""Block drafters as their config.json describes them, in each layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faser.engine.checkpoints.blocks import BlockSpec, block_method, read_block_spec
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.files import read_model_config
from faser.engine.checkpoints.heads import is_head
from faser.errors import ModelError
from tests.checkpoints import VOCAB_SIZE, tiny_llama_config, write_checkpoint
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
    """target_layer_ids counts outputs and -1 is the embedding; the other two count inputs."""
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


@pytest.mark.parametrize("layout", ["dflash", "gguf"])
def test_dflash_2_has_convolutions_a_selector_and_scales(tmp_path: Path, layout: str) -> None:
    """Its method is dflash, as in vLLM."""
    shape = replace(BARE, selector_rank=12, top_k=4, taps=3, group=8, embedding_scale=3.0, multiplier=0.4, cap=2.0)
    found, plain = read(tmp_path, layout, shape), read(tmp_path, layout, BARE)
    assert (found.method, found.selector, found.markov_rank, found.num_candidates) == ("dflash", True, 12, 4)
    assert (found.conv_kernel_size, found.conv_group_size) == (3, 8)
    scales = (found.decoder.embedding_scale, found.decoder.logit_scale, found.decoder.logit_cap)
    assert scales == (3.0, 0.4, 2.0)
    assert (plain.selector, plain.conv_kernel_size, plain.num_candidates) == (False, 0, 16)
    assert (plain.decoder.embedding_scale, plain.decoder.logit_scale, plain.decoder.logit_cap) == (1.0, 1.0, None)


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
        (
            "dflash",
            {"projector_type": "domino"},
            "projector_type is 'domino', which is not supported: it corrects",
        ),
        (
            "dspark",
            {"architectures": ["Gemma4DSparkModel"], "hidden_activation": "gelu_pytorch_tanh"},
            "model_type of the head is 'qwen3'; only gemma4_text, gemma4_unified_text are read",
        ),
        ("dspark", {"num_target_layers": 36}, "made for a model of 36 layers .*; the model has 6"),
        ("dspark", {"markov_head_type": "rnn"}, "markov_head_type is 'rnn'; only vanilla is supported"),
        ("dspark", {"markov_rank": 0}, "confidence_head_with_markov is true, but markov_rank is 0"),
        ("dspark", {"mask_token_id": 512}, "mask_token_id is 512; the model has tokens 0 to 511"),
        ("dspark", {"is_causal": 1}, "is_causal is 1; it must be true or false"),
        (
            "dflash",
            {"architectures": ["DFlash2DraftModel"], "markov_rank": 0, "confidence_head_with_markov": False},
            "conv_\\w+_size is missing|selector_rank is missing",
        ),
        ("dspark", {"selector_rank": 8}, "markov_rank is 8; a drafter with a candidate selector has none"),
        ("dspark", {"conv_kernel_size": 2, "conv_group_size": 24}, "conv_group_size is 24; it must divide .*, 64"),
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
    """Without keys DSpark predicts from the anchor, DFlash does not, and no layer is causal."""
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorrDraftModel .* not supported: it corrects"),
        ({"architectures": ["DominoDraftModel"]}, "DominoDraftModel .* not supported: it corrects"),
        ({"architectures": ["XPressDraftModel"]}, "XPressDraftModel .* not supported: of drafters of blocks only"),
        ({"architectures": ["DSparkDraftModel"]}, "DSparkDraftModel .* not supported: its slots may follow"),
        ({"architectures": ["KVNativeDFlashDraftModel"]}, "KVNative.* not supported: it reads the model's keys"),
        (
            {"speculators_model_type": "kv_native_dflash"},
            "kv_native_dflash, .* not supported: it reads the model's",
        ),
        ({"speculators_model_type": "domino"}, "domino, .* not supported: it corrects"),
        (
            {"architectures": ["MuseGlimmerAssistantModel"]},
            "MuseGlimmer.* not supported: the model .* is not served",
        ),
        ({"architectures": ["DSparkDeepseekV4ForCausalLM"]}, "DeepseekV4.* not supported: .* hyper-connections"),
    ],
)
def test_drafters_of_blocks_that_are_not_computed_are_refused_with_the_reason(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, config, {})
    assert block_method(tmp_path) is None
    with pytest.raises(ModelError, match=message):
        is_head(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
        {"num_kv_shared_layers": 1},
    ],
)
def test_gemma_4_s_drafters_have_dense_layers_of_full_attention(tmp_path: Path, config: dict[str, Any]) -> None:
    shape = replace(SHAPE, gemma=True)
    assert read(tmp_path, "dspark", shape).decoder.embedding_scale == 8.0
    with pytest.raises(ModelError, match=r"num_kv_shared_layers, enable_moe_block, .* only dense layers"):
        read(tmp_path, "dspark", shape, **config)


def test_a_model_is_no_block_drafter(tmp_path: Path) -> None:
    assert block_method(tmp_path) is None
    write_block(tmp_path, SHAPE, "dspark", architectures=["Qwen3ForCausalLM"])
    assert block_method(tmp_path) is None
