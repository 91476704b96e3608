"""Every family against transformers: the same logits, and the same greedy tokens through the paged cache.

Planted bugs that these tests have caught: no window; window one too wide; no rope scaling of any kind; no
attention factor; a ramp that is not rounded; rotation of a layer that must not rotate; q and k norms swapped or
with another epsilon; keys of all layers in one place; a bias or a residual dropped; defaults of another family
(rope base, tied embedding, interval, window); no norm of what attention adds; weights of Gemma's norms without the
1; one rope base for layers with and without a window; a pair too many that rotates; the short factors of longrope
in a long context; Granite's epsilon not divided. Of gpt-oss: no sinks, or sinks with a value; no bias of the
router; gate or up not clamped; up without the 1; gate and up swapped, or as halves of their tensor. Of OLMoE and
Granite-MoE: weights of experts divided by their sum, or not; norms of queries and keys head by head, or of the
first key head alone; a multiplier left out; gate and up of a tensor of all experts alternating. Of Gemma 4: pairs
of global heads counted, or their frequencies spaced, by the size of local ones; values normalised by the weight of
keys, or not at all; shared keys of the first layer of a kind; a scale, a root or an epsilon of what tokens give
left out, or that of a layer, the router or the experts; the experts' inputs given to the router. Of LFM2: a
convolution a column late; x in place of b x kept of it; a bias that counts in the weights of experts, or not in
their choice; a softmax in place of sigmoids; the factor of the weights left out.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from faser.engine.checkpoints.families import FAMILIES, decoder_spec, find_family
from faser.engine.checkpoints.files import read_model_config
from faser.errors import ModelError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from tests.checkpoints import tiny_llama_config, write_json
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.execution.models.paged import MAX_POSITIONS, load, prompt

PROMPT_LEN = 80
NUM_GREEDY = 64
VOCAB_SIZE = 128


@dataclass(frozen=True)
class Case:
    """A tiny model. fields: see write_family_model."""

    name: str
    model_type: str
    fields: dict[str, Any] = field(default_factory=dict)


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1000.0}
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}

_GROWING = {  # as in Ministral 3, whose queries grow from position 64 on
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "max_position_embeddings": MAX_POSITIONS,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
_PAD = {"pad_token_id": 0}
_PARTIAL = {"rope_theta": 1000.0, "partial_rotary_factor": 0.75}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 6.0,
}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 13, "tie_word_embeddings": False}
_TWO_ROPES = {
    "num_hidden_layers": 7,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}

_NEAR, _FAR = "sliding_attention", "full_attention"
_GPT_OSS = {
    "head_dim": 32,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "sliding_window": 13,
    "rope_parameters": _YARN | {"beta_fast": 8.0, "truncate": False},
}
_OLMOE = {
    "pad_token_id": None,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "intermediate_size": 96,
    "rms_norm_eps": 0.05,
    "rope_parameters": _LINEAR,
}
_GRANITE_MOE = _GRANITE | {
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "rms_norm_eps": 0.05,
    "rope_parameters": _LINEAR,
}
_GRANITE_4 = _GRANITE | {
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
    "layer_types": ["attention"] * 3,
    "mamba_n_heads": 8,
    "rms_norm_eps": 0.05,
}
_MIXTURE = {"head_dim": 32, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 32}

_QWEN3_5 = {
    "num_hidden_layers": 5,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rms_norm_eps": 0.05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
}
_GEMMA4_ROPES = {
    _NEAR: {"rope_type": "default", "rope_theta": 100.0},
    _FAR: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
}
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 13,
    "rms_norm_eps": 0.05,
    "final_logit_softcapping": 20.0,
    "pad_token_id": 0,
    "num_hidden_layers": 5,
    "layer_types": [_NEAR, _FAR, _NEAR, _NEAR, _FAR],
    "rope_parameters": _GEMMA4_ROPES,
}
_GEMMA4_E = _GEMMA4 | {  # as E2B and E4B; of each kind two layers have keys and values of their own
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_hidden_layers": 7,
    "layer_types": [_NEAR, _FAR, _NEAR, _FAR, _NEAR, _NEAR, _FAR],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
_GEMMA4_MOE = _GEMMA4 | {
    "enable_moe_block": True,
    "num_experts": 7,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
_QWEN3_5_MOE = _QWEN3_5 | {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
_LFM2 = {
    "num_hidden_layers": 5,
    "layer_types": ["conv", "conv", _FAR, "conv", _FAR],
    "block_multiple_of": 16,
    "norm_eps": 0.05,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
_LFM2_MOE = _LFM2 | {
    "num_dense_layers": 2,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
}
CASES = [
    Case("llama-tied", "llama", {"tie_word_embeddings": True}),
    Case("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    Case("llama-head-dim", "llama", {"head_dim": 24, "num_key_value_heads": 1}),
    Case("llama3-rope", "llama", {"rope_parameters": _LLAMA3}),
    Case("llama-linear-rope", "llama", {"rope_parameters": _LINEAR}),
    Case("llama-yarn-rope", "llama", {"rope_parameters": _YARN}),
    Case("smollm3", "smollm3", {"num_hidden_layers": 5, "pad_token_id": 0}),
    Case(
        "smollm3-window",
        "smollm3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 12, "pad_token_id": 0},
    ),
    Case("qwen2", "qwen2", {"tie_word_embeddings": True}),
    Case("qwen2-window", "qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    Case("qwen2-yarn", "qwen2", {"rope_parameters": _YARN | {"beta_fast": 8.0, "truncate": False}}),
    Case("qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 0.05}),
    Case("qwen3-biases", "qwen3", {"head_dim": 16, "attention_bias": True}),
    Case("qwen3-window", "qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}),
    Case("qwen3.5", "qwen3_5_text", _QWEN3_5 | {"tie_word_embeddings": True}),
    Case(
        "qwen3.5-other",
        "qwen3_5_text",
        _QWEN3_5 | {"attention_bias": True, "linear_conv_kernel_dim": 3, "full_attention_interval": 2},
    ),
    Case("qwen3.5-moe", "qwen3_5_moe_text", _QWEN3_5_MOE),
    Case("qwen3-next", "qwen3_next", _QWEN3_5_MOE | {"num_experts_per_tok": 2}),
    Case(
        "qwen3-next-other",
        "qwen3_next",
        _QWEN3_5_MOE | {"norm_topk_prob": False, "mlp_only_layers": [1], "linear_num_value_heads": 2},
    ),
    Case("mistral-window", "mistral", {"head_dim": 24, "sliding_window": 11}),
    Case("mistral-no-window", "mistral", {"sliding_window": None}),
    Case("ministral3", "ministral3", {"head_dim": 32, "rope_parameters": _GROWING}),
    Case("phi3", "phi3", {"sliding_window": 40, "pad_token_id": 0}),
    Case(
        "phi3-partial", "phi3", {"rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 0.75}} | _PAD
    ),
    Case("phi3-longrope", "phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 64} | _PAD),
    Case("granite", "granite", _GRANITE | {"rms_norm_eps": 0.05}),
    Case("granite-biases", "granite", {"attention_bias": True, "mlp_bias": True} | _GRANITE),
    Case("gemma2", "gemma2", _GEMMA | {"num_hidden_layers": 4}),
    Case("gemma2-uncapped", "gemma2", _GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    Case("gemma3", "gemma3_text", _GEMMA | {"num_hidden_layers": 7}),
    Case("gemma3-tied", "gemma3_text", _GEMMA | {"tie_word_embeddings": True}),
    Case("gemma3-linear-rope", "gemma3_text", _GEMMA | _TWO_ROPES),
    Case("gemma4", "gemma4_text", _GEMMA4),
    Case("gemma4-e", "gemma4_text", _GEMMA4_E),
    Case("gemma4-moe", "gemma4_text", _GEMMA4_MOE),
    Case(
        "gemma4-all", "gemma4_text", _GEMMA4_MOE | _GEMMA4_E | {"attention_k_eq_v": True, "attention_bias": True}
    ),
    Case("gemma4-unified", "gemma4_unified_text", _GEMMA4),
    Case("qwen3-moe", "qwen3_moe", _MIXTURE | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    Case("qwen3-moe-all", "qwen3_moe", _MIXTURE | {"norm_topk_prob": True, "tie_word_embeddings": True}),
    Case("qwen3-moe-other", "qwen3_moe", _MIXTURE | {"decoder_sparse_step": 2, "attention_bias": True}),
    Case("mixtral", "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 30}),
    Case("olmoe", "olmoe", _OLMOE),
    Case(
        "olmoe-other",
        "olmoe",
        _OLMOE | {"norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True},
    ),
    Case("granite-moe", "granitemoe", _GRANITE_MOE),
    Case("granite-moe-biases", "granitemoe", _GRANITE_MOE | {"attention_bias": True, "tie_word_embeddings": True}),
    Case(
        "granite-4", "granitemoehybrid", _GRANITE_4 | {"attention_bias": True, "position_embedding_type": "rope"}
    ),
    Case("granite-4-nope", "granitemoehybrid", _GRANITE_4),
    Case("gpt-oss", "gpt_oss", _GPT_OSS),
    Case("lfm2", "lfm2", _LFM2),
    Case("lfm2-other", "lfm2", _LFM2 | {"block_auto_adjust_ff_dim": False, "conv_L_cache": 4}),
    Case("lfm2-moe", "lfm2_moe", _LFM2_MOE),
    Case(
        "lfm2-moe-other",
        "lfm2_moe",
        _LFM2_MOE | {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    ),
    Case("glm4", "glm4", {"attention_bias": True, "head_dim": 32, "pad_token_id": 0}),
]


@dataclass(frozen=True)
class Oracle:
    """What transformers made of a case, and the checkpoint that it saved."""

    directory: Path
    token_ids: list[int]
    logits: Tensor  # [PROMPT_LEN, V]
    greedy: list[int]


def make_oracle(case: Case, directory: Path) -> Oracle:
    """The seeded model of a case, saved into the directory."""
    model = write_family_model(directory, case.model_type, case.fields)
    token_ids = prompt(PROMPT_LEN, VOCAB_SIZE)
    return Oracle(directory, token_ids, logits_of(model, token_ids), greedy_of(model, token_ids))


@torch.inference_mode()
def logits_of(model: Any, token_ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def greedy_of(model: Any, token_ids: list[int]) -> list[int]:
    known, past = list(token_ids), None
    fed = torch.tensor([known])
    while len(known) < len(token_ids) + NUM_GREEDY:
        out = model(fed, past_key_values=past, use_cache=True)
        past = out.past_key_values
        known.append(int(out.logits[0, -1].argmax()))
        fed = torch.tensor([known[-1:]])
    return known[len(token_ids) :]


Oracles = Callable[[str], Oracle]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    """The oracle of a case by its name, made when first asked for."""

    @cache
    def make(name: str) -> Oracle:
        return make_oracle(next(case for case in CASES if case.name == name), tmp_path_factory.mktemp(name))

    return make


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_the_logits_of_every_position_are_those_of_transformers(
    name: str, oracles: Oracles, native: NativeBackend
) -> None:
    """On the reference backend; where heads have a size that it takes, on the native one too, in steps."""
    oracle = oracles(name)
    ours = load(oracle.directory).prefill(oracle.token_ids, ())
    torch.testing.assert_close(ours, oracle.logits, atol=1e-4, rtol=0)
    if read_model_config(oracle.directory).spec.head_dim % 16 == 0:
        found = load(oracle.directory, backend=native).prefill(oracle.token_ids, (1, 13, 5))
        torch.testing.assert_close(found, oracle.logits, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def native(kernel_cache: Path) -> NativeBackend:
    return NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)


# Whose cache is read otherwise: windows, and no rotation in some layers. The others with --full.
@pytest.mark.parametrize(
    "name",
    [
        case.name
        if "window" in case.name
        or case.name
        in (
            "smollm3",
            "gemma3",
            "ministral3",
            "phi3-longrope",
            "qwen3-moe",
            "gpt-oss",
            "olmoe",
            "granite-moe",
            "qwen3.5",
            "gemma4",
            "gemma4-e",
            "gemma4-moe",
            "qwen3.5-moe",
            "lfm2",
            "lfm2-moe",
        )
        else pytest.param(case.name, marks=pytest.mark.full)
        for case in CASES
        if case.name != "gemma3-tied"  # with its embeddings that large it repeats its last token
    ],
)
def test_greedy_decoding_through_the_paged_cache_gives_the_tokens_of_transformers(
    name: str, oracles: Oracles
) -> None:
    oracle = oracles(name)
    assert len(set(oracle.greedy)) > 8  # no loop that any model would fall into
    assert load(oracle.directory).greedy(oracle.token_ids, NUM_GREEDY) == oracle.greedy


@pytest.mark.parametrize("name", [case.name for case in CASES if not case.name.startswith(("gemma4", "lfm2"))])
def test_the_spelling_of_transformers_4_means_the_same(name: str, oracles: Oracles, tmp_path: Path) -> None:
    """rope_theta and rope_scaling as separate fields, torch_dtype, no layer_types."""
    directory = oracles(name).directory
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    of_windows = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    changes = {
        "rope_local_base_freq": of_windows and of_windows["rope_theta"],
        "sliding_window_pattern": of_windows and 6,
        "partial_rotary_factor": rope.pop("partial_rotary_factor", None),
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        "rope_parameters": None,
        "dtype": None,
        "torch_dtype": config["dtype"],
        "layer_types": ["attention"] * 3 if name.startswith("granite-4") else None,
        "full_attention_interval": 2 if name == "qwen3.5-other" else None,
    }
    same = edited(directory, tmp_path, changes)
    assert read_model_config(same) == read_model_config(directory)


@pytest.mark.parametrize("name", ["gemma4", "gemma4-e", "gemma4-all"])
def test_heads_of_global_layers_may_be_spelled_as_on_the_hub(name: str, oracles: Oracles, tmp_path: Path) -> None:
    """Not layer by layer; and images, if there were any, would not be read causally."""
    directory = oracles(name).directory
    assert json.loads((directory / "config.json").read_text())["per_layer_config"]
    changes = {
        "per_layer_config": None,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "use_bidirectional_attention": "vision",
    }
    assert read_model_config(edited(directory, tmp_path, changes)) == read_model_config(directory)


def test_lfm2_may_be_spelled_as_in_its_first_files(oracles: Oracles, tmp_path: Path) -> None:
    directory = oracles("lfm2").directory
    changes = {
        "full_attn_idxs": [2, 4],
        "block_ff_dim": 96,
        "tie_embedding": False,
        "rope_theta": 1000.0,
        "conv_dim": 64,
        **dict.fromkeys(("layer_types", "intermediate_size", "tie_word_embeddings", "rope_parameters")),
    }
    assert read_model_config(edited(directory, tmp_path, changes)) == read_model_config(directory)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        (
            "gemma4",
            {"num_kv_shared_layers": 4},
            "num_kv_shared_layers is 4; of 5 layers no full_attention is left",
        ),
        ("gemma4", {"per_layer_config": {"1": {"skip": ["mlp"]}}}, "per_layer_config has '1'"),
        ("gemma4", {"layer_types": ["chunked_attention"] * 5}, r"layer_types\[0\] is 'chunked_attention'"),
        ("granite-4", {"layer_types": ["attention", "mamba", "attention"]}, r"layer_types\[1\] is 'mamba'"),
        ("granite-4", {"layer_types": None}, r"layer_types\[0\] is 'mamba'"),
        ("granite-4", {"num_local_experts": 4}, "num_local_experts is 4"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("qwen3.5", {"layer_types": ["linear_attention"] * 5}, "no full_attention"),
        ("qwen3.5", {"layer_types": ["mamba"] * 5}, r"layer_types\[0\] is 'mamba'"),
        ("qwen3.5", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3.5-moe", {"norm_topk_prob": False}, "norm_topk_prob is False; the weights of these experts are"),
        ("qwen3.5-moe", {"num_experts_per_tok": 8}, "8 experts are chosen for a token; the model has 7"),
        ("lfm2", {"conv_bias": True}, "conv_bias is True"),
        ("lfm2", {"conv_L_cache": 1}, "a convolution of 1 tokens"),
        ("lfm2", {"layer_types": ["conv"] * 5}, "no full_attention"),
        ("lfm2", {"layer_types": ["mamba"] * 5}, r"layer_types\[0\] is 'mamba'"),
        ("qwen3.5", {"linear_num_key_heads": 3}, "4 value heads of linear attention do not share 3"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(
    name: str, changes: dict[str, Any], words: str, oracles: Oracles, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        read_model_config(edited(oracles(name).directory, tmp_path, changes))


def test_tensors_of_a_layer_that_drafts_are_left_out(oracles: Oracles, tmp_path: Path) -> None:
    oracle = oracles("qwen3.5")
    more = {"mtp.fc.weight": torch.zeros(64, 128), "mtp.layers.0.input_layernorm.weight": torch.zeros(64)}
    write_json(tmp_path / "config.json", json.loads((oracle.directory / "config.json").read_text()))
    save_file(load_file(oracle.directory / "model.safetensors") | more, tmp_path / "model.safetensors")
    torch.testing.assert_close(load(tmp_path).prefill(oracle.token_ids, ()), oracle.logits, atol=1e-4, rtol=0)


def test_every_family_has_a_case_and_the_class_that_transformers_gives_it(oracles: Oracles) -> None:
    alone = [each for each in FAMILIES if each.model_type != "muse_glimmer_text"]  # see test_text_halves.py
    assert {each.model_type for each in alone} == {case.model_type for case in CASES}
    for family in alone:
        case = next(case for case in CASES if case.model_type == family.model_type)
        config = json.loads((oracles(case.name).directory / "config.json").read_text())
        assert config["architectures"] == [family.architecture]
        assert find_family(config) is family


@pytest.mark.parametrize("order", ["rows of each expert", "all experts in one tensor"])
def test_experts_of_qwen3_5_are_read_as_the_hub_and_as_transformers_stores_them(
    order: str, oracles: Oracles, tmp_path: Path
) -> None:
    oracle = oracles("qwen3.5-moe")
    stored = load_file(oracle.directory / "model.safetensors")
    alone = [name for name in stored if ".experts.0." in name]
    assert len(alone) == 3 * 5, "transformers stores the tensors of each expert"
    if order == "all experts in one tensor":
        stored = stacked(stored, count=7)
    write_json(tmp_path / "config.json", json.loads((oracle.directory / "config.json").read_text()))
    save_file(stored, tmp_path / "model.safetensors")
    torch.testing.assert_close(load(tmp_path).prefill(oracle.token_ids, ()), oracle.logits, atol=1e-4, rtol=0)


def stacked(stored: dict[str, Tensor], count: int, ending: str = "weight") -> dict[str, Tensor]:
    """As the hub has Qwen3.5's experts: gate_up_proj [E, 2 F, H], gate first, and down_proj [E, H, F]."""
    found = {name: each for name, each in stored.items() if ".mlp.experts." not in name}
    for prefix in {name.split("experts.")[0] for name in stored if ".mlp.experts." in name}:

        def part(name: str, expert: int, prefix: str = prefix) -> Tensor:
            return stored[f"{prefix}experts.{expert}.{name}.{ending}"]

        both = [torch.cat((part("gate_proj", each), part("up_proj", each))) for each in range(count)]
        found[f"{prefix}experts.gate_up_proj"] = torch.stack(both)
        found[f"{prefix}experts.down_proj"] = torch.stack([part("down_proj", each) for each in range(count)])
    return found


@pytest.mark.parametrize("model_type", [each.model_type for each in FAMILIES])
def test_a_field_that_is_not_stated_has_the_value_it_has_in_transformers(model_type: str) -> None:
    stated: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 512,
        "intermediate_size": 96,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    if model_type == "granitemoehybrid":  # what it leaves out would be layers of Mamba, and experts
        stated |= {"layer_types": ["attention"] * 30, "num_local_experts": 0}
    completed = AutoConfig.for_model(model_type, **stated).to_dict()
    assert decoder_spec(stated | {"model_type": model_type}) == decoder_spec(completed)


def test_a_window_of_null_is_no_window() -> None:
    config = tiny_llama_config() | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert decoder_spec(config).windows == (None, None)


@pytest.mark.parametrize(
    "from_layer, windows", [(0, (9, 9)), (1, (None, 9)), (2, (None, None)), (28, (None, None))]
)
def test_a_qwen_window_starts_at_its_layer(from_layer: int, windows: tuple[int | None, ...]) -> None:
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": from_layer}
    config = tiny_llama_config() | {"architectures": ["Qwen2ForCausalLM"]} | window
    assert decoder_spec(config).windows == windows


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama3-rope", {"rope_parameters": {"rope_theta": 500.0}}),
        ("llama3-rope", {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 64}}),
        ("llama-linear-rope", {"rope_parameters": {"rope_theta": 10000.0}}),
        ("llama-yarn-rope", {"rope_parameters": {"rope_theta": 1000.0}}),
        ("llama-yarn-rope", {"rope_parameters": _YARN | {"attention_factor": 1.0}}),
        ("qwen2-yarn", {"rope_parameters": _YARN | {"beta_fast": 8.0, "truncate": True}}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1, 1]}),
        ("smollm3-window", {"layer_types": None, "use_sliding_window": False}),
        ("qwen2-window", {"layer_types": None, "max_window_layers": 2}),
        ("qwen3-window", {"sliding_window": 10}),
        ("mistral-window", {"sliding_window": None}),
        ("mistral-window", {"sliding_window": 12}),
        ("qwen3", {"rms_norm_eps": 1e-6}),
        ("ministral3", {"rope_parameters": _GROWING | {"llama_4_scaling_beta": 0.0}}),
        ("qwen3.5", {"rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5}}),
        ("qwen3.5-moe", {"num_experts_per_tok": 2}),
        ("qwen3-next", {"norm_topk_prob": False}),
        ("qwen3-next-other", {"norm_topk_prob": True}),
        ("phi3-partial", {"rope_parameters": {"rope_theta": 1000.0}}),
        ("phi3-longrope", {"rope_parameters": _LONG | {"long_factor": _LONG["short_factor"]}}),
        ("phi3-longrope", {"rope_parameters": _LONG | {"attention_factor": 1.0}}),
        *(("granite", {name: 1.0}) for name in _GRANITE),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 24}),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}, "rope_local_base_freq": 1e6}),
        ("gemma3", {"sliding_window": None, "layer_types": ["full_attention"] * 7}),
        ("gemma3", {"hidden_activation": "silu"}),
        ("gemma4", {"sliding_window": 12}),
        ("gemma4", {"final_logit_softcapping": None}),
        ("gemma4", {"rope_parameters": {_NEAR: {"rope_theta": 100.0}, _FAR: {"rope_theta": 1000.0}}}),
        ("gemma4", {"rope_parameters": {**_GEMMA4_ROPES, _NEAR: _GEMMA4_ROPES[_FAR]}}),
        ("gemma4-moe", {"top_k_experts": 2}),
        ("qwen3-moe", {"norm_topk_prob": False}),
        ("qwen3-moe", {"num_experts_per_tok": 2}),
        ("qwen3-moe-other", {"norm_topk_prob": True}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("gpt-oss", {"num_experts_per_tok": 2}),
        ("gpt-oss", {"sliding_window": 12}),
        ("gpt-oss", {"layer_types": ["full_attention", "sliding_attention"] * 3}),
        ("gpt-oss", {"rope_parameters": _YARN | {"beta_fast": 8.0, "truncate": True}}),
        ("glm4", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}}),
    ],
)
def test_these_models_would_show_a_wrong_option(
    name: str, changes: dict[str, Any], oracles: Oracles, tmp_path: Path
) -> None:
    """What the comparisons above are worth: the nearest wrong reading of a config moves the logits visibly."""
    oracle = oracles(name)
    wrong = load(edited(oracle.directory, tmp_path, changes)).prefill(oracle.token_ids, ())
    assert (wrong - oracle.logits).abs().max() > 1e-2


def edited(directory: Path, target: Path, changes: dict[str, Any]) -> Path:
    """The same checkpoint with other fields in its config.json."""
    write_json(target / "config.json", json.loads((directory / "config.json").read_text()) | changes)
    for name in ("model.safetensors", "generation_config.json"):
        (target / name).symlink_to(directory / name)
    return target
