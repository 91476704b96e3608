"""What config.json of a head says, in every layout: sizes, defaults, and refusals that name the value."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from faser.config.vllm_names import REFUSED_HEADS
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.families.architecture import DecoderSpec, Llama3Scaling, RopeSpec
from faser.engine.checkpoints.heads import FeatureNorm, HeadSpec, describes_head, is_head, read_head_spec
from faser.errors import ModelError

LAYERS = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
TARGET = decoder_spec(
    LAYERS | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "max_position_embeddings": 131072}
)
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.5.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
        "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": LAYERS,
    "draft_vocab_size": 32000,
    "target_hidden_size": None,
    "norm_before_residual": True,
}
FLAT: dict[str, Any] = LAYERS | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}


def read(tmp_path: Path, config: dict[str, Any], target: DecoderSpec = TARGET) -> HeadSpec:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_head_spec(tmp_path, target)


def test_a_speculators_directory_says_everything(tmp_path: Path) -> None:
    found = read(tmp_path, SPECULATORS)
    assert found == HeadSpec(
        decoder=found.decoder,
        draft_vocab_size=32000,
        target_hidden_size=4096,
        state_layers=(2, 16, 29),
        norm_before_residual=True,
        num_draft_tokens=3,
        target_name="meta-llama/Llama-3.1-8B-Instruct",
    )
    assert found.states_size == 3 * 4096
    assert (found.decoder.num_layers, found.decoder.attention.rope, found.decoder.vocab_size) == (
        1,
        RopeSpec(theta=5e5),
        128256,
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [31, 1, 32]}, {"state_layers": (1, 31, 32)}),
        ({"eagle_aux_hidden_state_layer_ids": []}, {"state_layers": (2, 16, 29)}),
        ({"fc_norm": True}, {"feature_norm": FeatureNorm.EACH}),
        ({"norm_before_fc": True}, {"feature_norm": FeatureNorm.TOGETHER}),
        ({"norm_output": True}, {"norm_output": True}),
        ({"norm_before_residual": False}, {"norm_before_residual": False}),
        ({"norm_before_residual": None}, {"norm_before_residual": True}),
        ({"draft_vocab_size": None}, {"draft_vocab_size": 128256}),
        ({"target_hidden_size": 4096}, {"target_hidden_size": 4096}),
    ],
)
def test_fields_of_speculators_and_their_defaults(
    changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    found = read(tmp_path, SPECULATORS | changes)
    assert {name: getattr(found, name) for name in expected} == expected


def test_layers_may_be_those_of_qwen3_with_a_window_and_a_rotary_embedding_of_their_own(tmp_path: Path) -> None:
    layers = LAYERS | {
        "model_type": "qwen3",
        "architectures": ["Qwen3MoeForCausalLM"],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "layer_types": ["sliding_attention"],
        "sliding_window": 512,
        "use_sliding_window": True,
    }
    found = read(tmp_path, SPECULATORS | {"transformer_layer_config": layers}).decoder
    assert (found.attention.qk_norm, found.windows) == (True, (512,))
    assert found.attention.rope is not None
    assert isinstance(found.attention.rope.scaling, Llama3Scaling)


def test_a_flat_directory_has_its_fields_next_to_the_layers_or_in_eagle_config(tmp_path: Path) -> None:
    found = read(tmp_path, FLAT)
    assert (found.state_layers, found.norm_before_residual) == ((2, 16, 29), False)
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 8], "norm_before_fc": True}}
    found = read(tmp_path, FLAT | nested | {"norm_before_fc": False, "num_aux_hidden_states": 2})
    assert (found.state_layers, found.feature_norm) == ((4, 8), FeatureNorm.TOGETHER)


@pytest.mark.parametrize(
    ("config", "is_one"),
    [
        (SPECULATORS, True),
        (FLAT, True),
        (FLAT | {"architectures": ["Eagle3LlamaForCausalLM"]}, True),
        (FLAT | {"architectures": ["LlamaForCausalLM"]}, True),
        (LAYERS | {"architectures": ["LlamaForCausalLM"]}, False),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, False),
        ({}, False),
    ],
)
def test_a_head_is_known_by_its_config(config: dict[str, Any], is_one: bool) -> None:
    assert describes_head(config) is is_one


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LAYERS | {"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"model_type": "eagle", "architectures": ["EAGLEModel"], "model": LAYERS}, "eagle"),
        ({"medusa_num_heads": 3, "medusa_num_layers": 1}, "medusa"),
        ({"architectures": ["MedusaModel"]}, "medusa"),
        ({"model_type": "medusa", "hidden_size": 2048}, "medusa"),
    ],
)
def test_an_older_kind_is_refused_with_its_reason(config: dict[str, Any], kind: str) -> None:
    with pytest.raises(ModelError, match=REFUSED_HEADS[kind]):
        describes_head(config)


@pytest.mark.parametrize(
    ("names", "is_one"),
    [
        (["model.fc.weight", "model.layers.0.hidden_norm.weight"], True),
        (["model.embed_tokens.weight", "model.layers.0.mlp.fc.weight"], False),
        ([], False),
    ],
)
def test_a_head_that_is_described_like_a_model_is_known_by_its_tensors(
    names: list[str], is_one: bool, tmp_path: Path
) -> None:
    write_like_a_model(tmp_path, names)
    assert is_head(tmp_path) is is_one
    if is_one:
        assert read_head_spec(tmp_path, TARGET).state_layers == (2, 16, 29)


def test_a_head_of_eagle_that_is_described_like_a_model_is_refused(tmp_path: Path) -> None:
    write_like_a_model(tmp_path, ["fc.weight", "layers.0.self_attn.q_proj.weight"])
    for read_it in (lambda: is_head(tmp_path), lambda: read_head_spec(tmp_path, TARGET)):
        with pytest.raises(ModelError, match="of kind eagle, which is not supported"):
            read_it()


def write_like_a_model(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LAYERS | {"architectures": ["LlamaForCausalLM"]}))
    save_file({name: np.zeros(2, np.float32) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "model-2.safetensors").write_bytes(b"cut")


def test_a_directory_without_a_config_has_no_head(tmp_path: Path) -> None:
    assert not is_head(tmp_path)


@pytest.mark.parametrize("kind", ["dflash2", "peagle"])
def test_a_kind_that_is_not_computed_is_refused_with_its_reason(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        read(tmp_path, SPECULATORS | {"speculators_model_type": kind})
    assert f"of kind {kind}, which is not supported: {REFUSED_HEADS[kind]}" in str(refused.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            SPECULATORS | {"speculators_model_type": "hydra"},
            "speculators_model_type is 'hydra'; only eagle3 is supported",
        ),
        (FLAT | {"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel .*methods dflash and dspark"),
        (
            FLAT | {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "draft_vocab_size": None},
            "Llama's or Qwen3's",
        ),
        (FLAT | {"ptd_token_id": 7}, "ptd_token_id is 7, so it drafts in parallel"),
        (FLAT | {"logit_scale": 0.5}, "logit_scale of the head is 0.5; only 1 is supported"),
        (FLAT | {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        (FLAT | {"num_aux_hidden_states": 2}, "num_aux_hidden_states is 2, but .* 2, 16, 29"),
        (FLAT | {"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc are both true"),
        (FLAT | {"vocab_size": 32000}, "vocabulary of 32000 tokens; the model has 128256"),
        (FLAT | {"hidden_size": 2048}, "states of 2048 values; those of the model have 4096"),
        (FLAT | {"draft_vocab_size": 200000}, "draft_vocab_size is 200000; .* 128256"),
        (
            FLAT | {"model_type": "gemma", "architectures": ["LlamaForCausalLM"]},
            "model_type of the head is 'gemma'",
        ),
        (FLAT | {"eagle_aux_hidden_state_layer_ids": [2, 33]}, "layer 33; the model has layers 0 to 31"),
        (FLAT | {"eagle_aux_hidden_state_layer_ids": [2, 2]}, r"\[2, 2\]; it names a layer twice"),
        (FLAT | {"eagle_aux_hidden_state_layer_ids": "2"}, "'2'; it must be a list of integers"),
        (
            {key: value for key, value in SPECULATORS.items() if key != "transformer_layer_config"},
            "transformer_layer_config is missing",
        ),
        (
            FLAT | {"architectures": ["DeepSeekMTPModel"], "draft_vocab_size": None},
            "only Qwen3.5.s MTP layers are supported",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_value_and_the_limit(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, config)


def test_a_target_of_few_layers_needs_a_head_that_names_its_layers(tmp_path: Path) -> None:
    small = dataclasses.replace(TARGET, layers=TARGET.layers[:1] * 5)
    with pytest.raises(ModelError, match=r"does not name the layers .* 5 layers are too few"):
        read(tmp_path, FLAT, small)
    assert read(tmp_path, FLAT | {"eagle_aux_hidden_state_layer_ids": [0, 5]}, small).state_layers == (0, 5)


def test_a_head_may_be_narrower_than_its_target(tmp_path: Path) -> None:
    found = read(tmp_path, FLAT | {"hidden_size": 2048, "target_hidden_size": 4096})
    assert (found.hidden_size, found.target_hidden_size, found.states_size) == (2048, 4096, 3 * 4096)


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json is missing"):
        read_head_spec(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config.json contains list; it must contain an object"):
        read_head_spec(tmp_path, TARGET)
