"""The text halves of vision-language models against transformers: the same logits, the same greedy tokens.

Planted bugs that these tests have caught: a level of the config that is not read; a name of one version of
transformers that is not known; the vision half's tensors taken for the text's.
"""

import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.families.wrappers import text_half
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models.loader import open_source
from faser.errors import ModelError
from tests.checkpoints import tiny_llama_config, write_json
from tests.engine.checkpoints.family_models import shake_norms
from tests.engine.checkpoints.gguf.gguf_files import convert
from tests.engine.checkpoints.test_families import (
    NUM_GREEDY,
    VOCAB_SIZE,
    Oracle,
    edited,
    greedy_of,
    logits_of,
)
from tests.engine.execution.models.paged import MAX_POSITIONS, load, prompt

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
_MIXED = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 13,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 2,
}
_EARS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 64}
_PIXTRAL = _TOWER | {"model_type": "pixtral", "head_dim": 16}
_QWEN3_5 = {
    "num_hidden_layers": 5,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rms_norm_eps": 0.05,  # a smaller one makes float32 differ from float64 by more than is allowed here
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
_EXPERTS = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
# The class, and its text and vision configs. Tokens of images are the last of the vocabulary.
WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2.5-vl": ("Qwen2_5_VL", {"rope_parameters": _SECTIONS}, _QWEN_VISION | {"fullatt_block_indexes": [0]}),
    "qwen3.5": ("Qwen3_5", _QWEN3_5, _QWEN_VISION | {"num_position_embeddings": 16}),
    "qwen3.5-moe": ("Qwen3_5Moe", _QWEN3_5 | _EXPERTS, _QWEN_VISION | {"num_position_embeddings": 16}),
    "qwen3-vl": (
        "Qwen3VL",
        {"head_dim": 32, "rope_parameters": _MIXED},
        _QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "gemma3": ("Gemma3", {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 13}, _TOWER),
    "gemma4": ("Gemma4", _GEMMA4, _TOWER | {"head_dim": 16, "num_key_value_heads": 2}),
    "muse-glimmer": (
        "MuseGlimmer",
        {
            "head_dim": 32,
            "num_hidden_layers": 8,
            "sliding_window": 13,
            "rms_norm_eps": 0.05,
            "post_norm_eps": 1e-8,
            "output_multiplier": 0.4,
            "final_logit_softcapping": 5.0,
            "qk_scale_factor": 3.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
            "pad_token_id": 0,
        },
        {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
    ),
    "mistral3": ("Mistral3", {"model_type": "mistral", "head_dim": 32, "sliding_window": None}, _PIXTRAL),
    "ministral3": (
        "Mistral3",
        {"model_type": "ministral3", "head_dim": 32, "rope_parameters": _GROWING},
        _PIXTRAL,
    ),
}
_OF_QWEN = {
    "image_token_id": 127,
    "video_token_id": 126,
    "vision_start_token_id": 125,
    "vision_end_token_id": 124,
}
_IMAGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Qwen2_5_VL", "Qwen3VL", "Qwen3_5", "Qwen3_5Moe"), _OF_QWEN),
    "Gemma3": {"image_token_index": 127, "mm_tokens_per_image": 1},
    "Gemma4": {
        "image_token_id": 127,
        "video_token_id": 126,
        "audio_token_id": 125,
        "audio_config": _EARS,
    },
    "MuseGlimmer": {
        "image_token_id": 127,
        "video_token_id": 126,
        "out_hidden_size": 128,
        "projector_hidden_size": 32,
    },
    "Mistral3": {"image_token_index": 127},
}
PROMPT = [token % 120 for token in prompt(80, VOCAB_SIZE)]


def write_wrapper(name: str, directory: Path, fields: dict[str, Any] | None = None) -> Any:
    """Returns the model, in float32. fields: of its text config, over those of WRAPPERS."""
    class_name, text, vision = WRAPPERS[name]
    tied = {"tie_word_embeddings": False}
    config = getattr(transformers, f"{class_name}Config")(
        text_config=_SIZES | tied | text | (fields or {}), vision_config=vision, **_IMAGES[class_name], **tied
    )
    torch.manual_seed(11)
    model = getattr(transformers, f"{class_name}ForConditionalGeneration")(config).float().eval()
    shake_norms(model)
    model.save_pretrained(directory)
    return model


def make_oracle(name: str, directory: Path) -> Oracle:
    model = write_wrapper(name, directory)
    return Oracle(directory, PROMPT, logits_of(model, PROMPT), greedy_of(model, PROMPT))


Oracles = Callable[[str], Oracle]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    """The oracle of a wrapper by its name, made when first asked for."""

    @cache
    def make(name: str) -> Oracle:
        return make_oracle(name, tmp_path_factory.mktemp(name))

    return make


each_wrapper = pytest.mark.parametrize("name", list(WRAPPERS))


@each_wrapper
def test_the_logits_of_every_position_are_those_of_transformers(name: str, oracles: Oracles) -> None:
    oracle = oracles(name)
    ours = load(oracle.directory).prefill(oracle.token_ids, ())
    torch.testing.assert_close(ours, oracle.logits, atol=1e-4, rtol=0)


def test_greedy_decoding_gives_the_tokens_of_transformers(oracles: Oracles) -> None:
    oracle = oracles("qwen3-vl")
    assert len(set(oracle.greedy)) > 8  # no loop that any model would fall into
    assert load(oracle.directory).greedy(oracle.token_ids, NUM_GREEDY) == oracle.greedy


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("qwen2.5-vl", "rope_parameters", {"rope_theta": 1_000_000.0}),
        ("qwen3-vl", "rms_norm_eps", 0.1),
        ("gemma3", "query_pre_attn_scalar", 32),
        ("gemma4", "sliding_window", 12),
        ("mistral3", "sliding_window", 12),
        ("ministral3", "rope_parameters", _GROWING | {"llama_4_scaling_beta": 0.0}),
    ],
)
def test_these_models_would_show_a_wrong_option(
    name: str, field: str, value: Any, oracles: Oracles, tmp_path: Path
) -> None:
    oracle = oracles(name)
    text = json.loads((oracle.directory / "config.json").read_text())["text_config"]
    wrong = edited(oracle.directory, tmp_path, {"text_config": text | {field: value}})
    assert (load(wrong).prefill(oracle.token_ids, ()) - oracle.logits).abs().max() > 1e-2


_LAYOUTS = {
    "transformers 5": {"model.": "model.language_model.", "lm_head.": "lm_head."},
    "transformers 4": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "first Qwen-VL": {"model.": "model.", "lm_head.": "lm_head."},
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_every_version_of_the_names_gives_the_same_tensors(layout: str, oracles: Oracles, tmp_path: Path) -> None:
    directory = oracles("mistral3").directory
    source = open_source(directory)
    stored = {name: source.get(name) for name in source.names()}
    assert {name.split(".")[0] for name in stored} == {"model", "lm_head"}
    prefixes = _LAYOUTS[layout]
    renamed = {prefixes[f"{name.split('.')[0]}."] + name.split(".", 1)[1]: stored[name] for name in stored}
    half = "model." if layout == "transformers 5" else ""
    others = {f"{half}{part}.weight": torch.zeros(2) for part in ("vision_tower.a", "multi_modal_projector.b")}
    save_file(renamed | others | {f"{half}visual.c.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", json.loads((directory / "config.json").read_text()))
    found = open_source(tmp_path)
    assert set(found.names()) == set(stored)
    assert all(torch.equal(found.get(name), stored[name]) for name in stored)


def test_a_tensor_of_neither_half_is_an_error(oracles: Oracles, tmp_path: Path) -> None:
    directory = oracles("mistral3").directory
    stored = load_file(directory / "model.safetensors")
    save_file(stored | {"depth_tower.a.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", json.loads((directory / "config.json").read_text()))
    with pytest.raises(ModelError, match=r"depth_tower\.a\.weight, which its config does not describe"):
        load(tmp_path)


def test_the_vision_half_of_a_text_model_is_an_error(tmp_path: Path, tiny_checkpoint: Path) -> None:
    stored = load_file(tiny_checkpoint / "model.safetensors")
    save_file(stored | {"visual.a.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", tiny_llama_config())
    with pytest.raises(ModelError, match=r"visual\.a\.weight, which its config does not describe"):
        load(tmp_path)


def test_the_log_says_once_that_images_are_not_served(oracles: Oracles, caplog: pytest.LogCaptureFixture) -> None:
    directory = oracles("gemma3").directory
    with caplog.at_level(logging.INFO, "faser"):
        load(directory)
    assert [record.getMessage() for record in caplog.records] == [
        f"{directory} is a Gemma3ForConditionalGeneration: its text half is loaded, images are not served"
    ]


_QWEN = {name: value for name, value in _SIZES.items() if name not in ("initializer_range", "pad_token_id")}


def test_a_config_without_text_config_has_the_fields_at_the_top_level() -> None:
    """As the first files of Qwen2.5-VL, which call their rope mrope."""
    nested = {"model_type": "qwen2_5_vl_text", "rope_parameters": _SECTIONS, **_QWEN}
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    flat = {"model_type": "qwen2_5_vl", "rope_theta": 1000.0, "rope_scaling": scaling, **_QWEN}
    named = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    assert decoder_spec(named | flat) == decoder_spec(named | {"text_config": nested}) == decoder_spec(flat)


def test_fields_may_stand_at_either_level_and_those_of_the_text_half_win() -> None:
    top = {"model_type": "qwen3_vl", "torch_dtype": "float16", "eos_token_id": [7], "tie_word_embeddings": True}
    text = {"model_type": "qwen3_vl_text", "eos_token_id": None}
    half = text_half(top | {"text_config": text})
    assert half is not None
    assert [half.config[name] for name in ("torch_dtype", "eos_token_id")] == ["float16", [7]]
    assert half.config["tie_word_embeddings"] is True
    stated = {"dtype": "bfloat16", "eos_token_id": 5, "tie_word_embeddings": False}
    half = text_half(top | {"text_config": text | stated})
    assert half is not None
    assert {name: half.config[name] for name in stated} == stated
    assert "torch_dtype" not in half.config


@pytest.mark.parametrize("has_head", [True, False])
def test_where_the_levels_differ_the_files_say_whether_embedding_and_head_are_one(
    has_head: bool, oracles: Oracles, tmp_path: Path
) -> None:
    directory = oracles("mistral3").directory
    config = json.loads((directory / "config.json").read_text())
    stored = load_file(directory / "model.safetensors")
    if not has_head:
        stored.pop("language_model.lm_head.weight")
    save_file(stored, tmp_path / "model.safetensors")
    for top in (True, False):
        text = config["text_config"] | {"tie_word_embeddings": not top}
        write_json(tmp_path / "config.json", config | {"tie_word_embeddings": top, "text_config": text})
        assert read_model_config(tmp_path).spec.tie_word_embeddings is not has_head


@pytest.mark.parametrize("model_type", ["qwen2_5_vl_text", "qwen3_vl_text", "gemma3_text", "gemma4_text"])
def test_a_field_that_is_not_stated_has_the_value_it_has_in_transformers(model_type: str) -> None:
    stated = {
        "hidden_size": 512,
        "intermediate_size": 96,
        "num_hidden_layers": 12,
        "num_attention_heads": 32 if model_type == "qwen3_vl_text" else 8,
        "model_type": model_type,
    }
    if not model_type.startswith("gemma"):
        stated |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 64}
    wrapper = {"model_type": model_type.removesuffix("_text")}
    completed = transformers.AutoConfig.for_model(**stated).to_dict()
    assert decoder_spec(wrapper | {"text_config": stated}) == decoder_spec(wrapper | {"text_config": completed})


@pytest.mark.parametrize(
    "config, message",
    [
        (
            {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "llama"}},
            "LlavaForConditionalGeneration with the text half llama is not supported",
        ),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral4"}},
            "the text half of Mistral3ForConditionalGeneration is mistral4; supported are mistral, ministral3",
        ),
        ({"model_type": "gemma3", "text_config": 3}, "text_config is 3; it must be an object"),
    ],
)
def test_another_wrapper_or_text_half_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        decoder_spec(config)


@pytest.mark.parametrize("name, architecture", [("qwen2.5-vl", "qwen2vl"), ("qwen3-vl", "qwen3vl")])
def test_a_gguf_file_of_the_text_half_is_the_same_model(
    name: str, architecture: str, oracles: Oracles, tmp_path: Path
) -> None:
    oracle = oracles(name)
    config = json.loads((oracle.directory / "config.json").read_text())["text_config"]
    source = open_source(oracle.directory)
    weights = {tensor: source.get(tensor).numpy() for tensor in source.names()}
    convert(config, weights, tmp_path / "m.gguf", architecture)
    assert read_model_config(tmp_path / "m.gguf").spec == read_model_config(oracle.directory).spec
    found = load(tmp_path / "m.gguf").prefill(oracle.token_ids, ())
    torch.testing.assert_close(found, oracle.logits, atol=1e-4, rtol=0)
