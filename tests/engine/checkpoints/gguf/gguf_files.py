"""GGUF files for tests, written with the gguf library the way llama.cpp's converter writes them."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import (
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    get_tensor_name_map,
    quants,
)
from gguf.constants import MODEL_ARCH_NAMES

from tests.checkpoints import tiny_tokenizer
from tests.engine.text.vocabularies import sentencepiece_pieces

Array = npt.NDArray[np.float32]
Names = dict[str, tuple[str, tuple[int, ...]]]

SIZES = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}
HEAD_DIM = 16
VOCAB_SIZE = 512

_LAYER: Names = {
    "attn_norm.weight": ("input_layernorm.weight", (64,)),
    "ffn_norm.weight": ("post_attention_layernorm.weight", (64,)),
    "attn_q.weight": ("self_attn.q_proj.weight", (64, 64)),
    "attn_k.weight": ("self_attn.k_proj.weight", (32, 64)),
    "attn_v.weight": ("self_attn.v_proj.weight", (32, 64)),
    "attn_output.weight": ("self_attn.o_proj.weight", (64, 64)),
    "ffn_gate.weight": ("mlp.gate_proj.weight", (96, 64)),
    "ffn_up.weight": ("mlp.up_proj.weight", (96, 64)),
    "ffn_down.weight": ("mlp.down_proj.weight", (64, 96)),
}
BIASES: Names = {
    "attn_q.bias": ("self_attn.q_proj.bias", (64,)),
    "attn_k.bias": ("self_attn.k_proj.bias", (32,)),
    "attn_v.bias": ("self_attn.v_proj.bias", (32,)),
}
QK_NORMS: Names = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", (16,)),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", (16,)),
}


def hf_weights(
    *, seed: int = 0, untied: bool = False, more: Names | None = None
) -> tuple[dict[str, Array], dict[str, str]]:
    """Seeded weights under Hugging Face names, and the name of each in a GGUF file."""
    names: Names = {"token_embd.weight": ("model.embed_tokens.weight", (VOCAB_SIZE, 64))}
    for layer in range(SIZES["block_count"]):
        for stored, (name, shape) in (_LAYER | (more or {})).items():
            names[f"blk.{layer}.{stored}"] = (f"model.layers.{layer}.{name}", shape)
    names["output_norm.weight"] = ("model.norm.weight", (64,))
    if untied:
        names["output.weight"] = ("lm_head.weight", (VOCAB_SIZE, 64))
    rng = np.random.default_rng(seed)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in names.values()}
    return weights, {name: stored for stored, (name, _) in names.items()}


def permute(rows: Array, num_heads: int) -> Array:
    """llama.cpp's row order, spelled out: row d and row d + D/2 of a head become neighbours."""
    stored = np.empty_like(rows)
    head_dim = len(rows) // num_heads
    for head in range(num_heads):
        for d in range(head_dim // 2):
            first = head * head_dim
            stored[first + 2 * d] = rows[first + d]
            stored[first + 2 * d + 1] = rows[first + d + head_dim // 2]
    return stored


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    tokenizer: str | None = None,
    raw: dict[str, tuple[npt.NDArray[np.uint8], GGMLQuantizationType]] | None = None,
    extra: dict[str, Array] | None = None,
    untied: bool = False,
    more: Names | None = None,
    permuted: bool | None = None,
    seed: int = 0,
    tensors_a_part: int = 0,
) -> dict[str, Array]:
    """Write a tiny model; returns its weights under Hugging Face names, before quantisation.

    tensors_a_part: above 0, the model is split into files NAME-00001-of-0000N.gguf.

    metadata: more keys, or None as a value to leave one out. raw: finished blocks in place of a tensor.
    extra: more tensors under GGUF names.
    """
    weights, stored_names = hf_weights(seed=seed, untied=untied, more=more)
    writer = GGUFWriter(path, architecture, split_max_tensors=tensors_a_part)
    keys: dict[str, Any] = {f"{architecture}.{name}": value for name, value in SIZES.items()}
    keys |= {f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5, f"{architecture}.rope.freq_base": 10000.0}
    keys |= {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 0}
    for key, value in (keys | _vocabulary(tokenizer) | (metadata or {})).items():
        _add(writer, key, value)
    if permuted is None:
        permuted = architecture in ("llama", "smollm3")
    for name, values in weights.items():
        stored = stored_names[name]
        if raw and stored in raw:
            writer.add_tensor(stored, raw[stored][0], raw_dtype=raw[stored][1])
            continue
        heads = {"attn_q.": 4, "attn_k.": 2}
        num_heads = next((count for part, count in heads.items() if part in stored), None)
        array = permute(values, num_heads) if permuted and num_heads else values
        kept = GGMLQuantizationType.F32 if array.ndim == 1 else quantization
        writer.add_tensor(stored, quants.quantize(array, kept), raw_dtype=kept)
    for stored, values in (extra or {}).items():
        writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _vocabulary(kind: str | None) -> dict[str, Any]:
    """Metadata of a small vocabulary: None, gpt2 or llama."""
    if kind == "llama":
        tokens, scores, types = sentencepiece_pieces()
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    if kind is None:
        return {}
    core = tiny_tokenizer()
    special = {token.content for token in core.get_added_tokens_decoder().values()}
    tokens = [core.id_to_token(i) or "" for i in range(core.get_vocab_size())]
    return {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges_of(core.to_str())],
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def merges_of(serialized: str) -> list[list[str]]:
    merges: list[list[str]] = json.loads(serialized)["model"]["merges"]
    return merges


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Write a metadata value in the type that the converter uses for it."""
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key} is {value!r}")


def convert(
    config: dict[str, Any],
    weights: dict[str, Array],
    path: Path,
    architecture: str,
    *,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    experts: GGMLQuantizationType | None = None,
    changed: bool = True,
    extra: dict[str, Array] | None = None,
    num_drafting: int = 0,
    delta_heads: str | None = None,
    legacy: bool = False,
) -> None:
    """Write a checkpoint of the hub as llama.cpp's converter does.

    config: as transformers 5 saves it. weights: under the hub's names. Names of tensors and keys are those of the
    gguf library, which the converter uses as well. experts: of their matrices; None: as the others.
    changed: rows are put into llama.cpp's order, and one is added to norms, where the converter does so.
    extra: more tensors under GGUF names. num_drafting: layers that draft, which the config counts.
    delta_heads: the order of value heads of delta nets, tiled or grouped; None: that of the architecture.
    legacy: queries, keys, values and z of Qwen3-Next's delta nets stay in one tensor, as in older files.
    """
    writer = GGUFWriter(path, architecture)
    if num_drafting:
        writer.add_nextn_predict_layers(num_drafting)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    if any(name.startswith("mtp.") for name in weights):
        writer.add_nextn_predict_layers(1)
        weights = _with_nextn(weights, config["num_hidden_layers"])
        config = config | {"num_hidden_layers": config["num_hidden_layers"] + 1}
    if architecture in ("lfm2", "lfm2moe"):  # the config states another size where it is adjusted
        config = config | {"intermediate_size": len(weights["model.layers.0.feed_forward.w1.weight"])}
        weights = {
            name.replace("feed_forward.experts", "block_sparse_moe.experts"): each
            for name, each in weights.items()
        }
    _add_sizes(writer, config)
    _add_rope(writer, config, architecture)
    _add_own_keys(writer, config, architecture)
    writer.add_eos_token_id(config["eos_token_id"])
    kind = next(each for each, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    if changed and architecture in _DELTA_HEADS:
        weights = _split_by_part(weights, config, qkvz=not legacy)
        tiled = (delta_heads or _DELTA_HEADS[architecture]) == "tiled"
        weights = _with_delta_nets(weights, config, tiled=tiled)
    if architecture == "gemma4":
        weights = _as_gemma4(weights)
    for name, values in _stacked_experts(weights).items():
        if changed and architecture in ("granite", "granitemoe", "mistral3", "llama"):
            part = name.split(".")[-2]
            values = permute(values, heads[part]) if part in heads else values
        if changed and architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        values = values[0] if name.endswith("shared_expert_gate.weight") else values
        values = values[:, 0] if name.endswith("conv.conv.weight") else values
        stored = name if ".nextn." in name else names.get_name(name, try_suffixes=(".weight", ".bias"))
        for of_hub, of_file in (("router.scale", "ffn_gate_inp"), ("router.per_expert_scale", "ffn_down_exps")):
            if name.endswith(of_hub):
                stored = f"blk.{name.split('.')[2]}.{of_file}.scale"
        assert stored is not None, f"the gguf library has no name for {name}"
        stored += ".weight" if name.endswith(".sinks") else ".bias" if name.endswith("expert_bias") else ""
        unquantised = name.endswith(("bias", "conv1d.weight", "mlp.gate.weight"))
        kept = experts or quantization if values.ndim == 3 else quantization
        kept = GGMLQuantizationType.F32 if values.ndim == 1 or unquantised else kept
        writer.add_tensor(stored, quants.quantize(values, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _with_nextn(weights: dict[str, Array], layer: int) -> dict[str, Array]:
    """The layer that drafts as one more of the model's; its own tensors under the names that files have.

    llama.cpp's conversion/qwen.py, _Qwen35MtpMixin; the gguf library has no such names for this architecture.
    """
    own = {
        "mtp.fc.weight": "eh_proj",
        "mtp.pre_fc_norm_embedding.weight": "enorm",
        "mtp.pre_fc_norm_hidden.weight": "hnorm",
        "mtp.norm.weight": "shared_head_norm",
    }
    of_layer = f"model.layers.{layer}."
    return {
        f"blk.{layer}.nextn.{own[name]}.weight" if name in own else name.replace("mtp.layers.0.", of_layer): values
        for name, values in weights.items()
    }


_DELTA_HEADS = {"qwen35": "tiled", "qwen35moe": "tiled", "qwen3next": "grouped"}


def _split_by_part(weights: dict[str, Array], config: dict[str, Any], *, qkvz: bool) -> dict[str, Array]:
    """Queries, keys and values of all key heads in one tensor, and z in another, in place of in_proj_qkvz."""
    heads = config["linear_num_key_heads"]
    of_keys = config["linear_key_head_dim"]
    of_values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    found: dict[str, Array] = {}
    for name, values in weights.items():
        if not qkvz or not name.endswith("in_proj_qkvz.weight"):
            found[name] = values
            continue
        parts: list[list[Array]] = [[], [], [], []]
        row = 0
        for _ in range(heads):
            for part, count in zip(parts, (of_keys, of_keys, of_values, of_values), strict=True):
                part.append(values[row : row + count])
                row += count
        q, k, v, z = (np.concatenate(part) for part in parts)
        found[name.replace("qkvz", "qkv")] = np.concatenate((q, k, v))
        found[name.replace("qkvz", "z")] = z
    return found


def _with_delta_nets(weights: dict[str, Array], config: dict[str, Any], *, tiled: bool) -> dict[str, Array]:
    """tiled: the first value head of each key head, then the second ones, and so on.

    One is added to all norms but that of delta nets; A itself in place of its logarithm; no axis of one.
    """
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width, keys = config["linear_value_head_dim"], 2 * k_heads * config["linear_key_head_dim"]
    heads = np.arange(v_heads).reshape(k_heads, -1).T.reshape(-1) if tiled else np.arange(v_heads)
    channels = (heads[:, None] * width + np.arange(width)).reshape(-1)
    behind_keys = np.concatenate((np.arange(keys), keys + channels))
    found: dict[str, Array] = {}
    for name, values in weights.items():
        of = name.partition("linear_attn.")[2]
        if of in ("A_log", "dt_bias"):
            values = (-np.exp(values) if of == "A_log" else values)[heads]
            name = name.replace("dt_bias", "dt_proj.bias")
        elif of in ("in_proj_a.weight", "in_proj_b.weight"):
            values = values[heads]
        elif of == "in_proj_z.weight":
            values = values[channels]
        elif of in ("in_proj_qkv.weight", "conv1d.weight"):
            values = values[behind_keys].reshape(len(values), -1)
        elif of == "out_proj.weight":
            values = values[:, channels]
        elif name.endswith("norm.weight") and of != "norm.weight":
            values = values + np.float32(1)
        found[name] = np.ascontiguousarray(values)
    return found


def _as_gemma4(weights: dict[str, Array]) -> dict[str, Array]:
    """Gate and up of an expert in one tensor, and names with endings."""
    found = {
        f"{name}.weight" if name.endswith("layer_scalar") else name: values
        for name, values in weights.items()
        if ".up_proj" not in name or ".experts." not in name
    }
    for name in [each for each in found if re.search(r"experts\.\d+\.gate_proj", each)]:
        halves = found.pop(name), weights[name.replace("gate_proj", "up_proj")]
        found[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(halves)
    return found


def _stacked_experts(weights: dict[str, Array]) -> dict[str, Array]:
    """With the matrices of all experts of a layer in one tensor, [E, N, K], and so their biases, [E, N]."""
    found: dict[str, Array] = {}
    parts: dict[str, dict[int, Array]] = {}
    for name, values in weights.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.(?:weight|bias))", name):
            parts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
        else:
            found[name] = values
    return found | {name: np.stack([each[i] for i in range(len(each))]) for name, each in parts.items()}


def _add_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    if "per_layer_config" in config:  # of Gemma 4, which has keys of its own
        return
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    heads = config["num_key_value_heads"]
    attends = [each == "full_attention" for each in config.get("layer_types") or ()]
    writer.add_head_count_kv([heads * each for each in attends] if "conv_L_cache" in config else heads)
    if head_dim := config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)


def _add_rope(writer: GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    given = config["rope_parameters"]
    rope = given.get("full_attention", given)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if architecture != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    if architecture in ("phi3", "glm4", *_DELTA_HEADS, "granite", "granitemoe", "mistral3"):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if "sliding_attention" in given and given["sliding_attention"]["rope_theta"] != 10_000.0:
        writer.add_rope_freq_base_swa(given["sliding_attention"]["rope_theta"])
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    match rope["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
            if "mscale_all_dim" in rope:
                writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        case "longrope":
            original = config["original_max_position_embeddings"]
            growth = config["max_position_embeddings"] / original
            writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(growth) / math.log(original)))
            writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
            writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))


def _add_own_keys(writer: GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    match architecture:
        case "phi3":
            writer.add_sliding_window(config["sliding_window"] or 0)
        case "granite" | "granitemoe":
            if architecture == "granitemoe":
                _add_experts(writer, config)
            writer.add_attention_scale(config["attention_multiplier"])
            writer.add_embedding_scale(config["embedding_multiplier"])
            writer.add_residual_scale(config["residual_multiplier"])
            writer.add_logit_scale(config["logits_scaling"])
        case "gemma2":
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
            writer.add_sliding_window(config["sliding_window"])
        case "gemma3":
            writer.add_sliding_window(config["sliding_window"])
        case "gemma4":
            _add_gemma4(writer, config)
        case "mistral3" if beta := config["rope_parameters"].get("llama_4_scaling_beta"):
            writer.add_attn_temperature_scale(beta)
        case "lfm2" | "lfm2moe":
            writer.add_shortconv_l_cache(config["conv_L_cache"])
            writer.add_vocab_size(config["vocab_size"])
            if architecture == "lfm2moe":
                writer.add_expert_count(config["num_experts"])
                writer.add_expert_used_count(config["num_experts_per_tok"])
                writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
                writer.add_leading_dense_block_count(config["num_dense_layers"])
                writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        case "qwen3vl":
            writer.add_num_deepstack_layers(2)
        case "gpt-oss":
            _add_experts(writer, config)
            writer.add_expert_feed_forward_length(config["intermediate_size"])
            writer.add_sliding_window(config["sliding_window"])
        case "olmoe":
            _add_experts(writer, config)
        case "qwen35" | "qwen35moe" | "qwen3next":
            if architecture != "qwen35":
                _add_experts(writer, config)
                writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
                writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
            v_heads = config["linear_num_value_heads"]
            writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
            writer.add_ssm_state_size(config["linear_key_head_dim"])
            writer.add_ssm_group_count(config["linear_num_key_heads"])
            writer.add_ssm_time_step_rank(v_heads)
            writer.add_ssm_inner_size(config["linear_value_head_dim"] * v_heads)
        case "qwen3moe" | "llama":
            _add_experts(writer, config)
            if architecture == "qwen3moe":
                writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
            elif config["sliding_window"]:
                writer.add_sliding_window(config["sliding_window"])


def _add_gemma4(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Sizes are lists only where layers differ; pairs that do not turn have a factor of 1e30."""
    local = [each == "sliding_attention" for each in config["layer_types"]]
    shared, size = config["num_kv_shared_layers"], config["intermediate_size"]
    of_global = {"head_dim": config["head_dim"], "num_key_value_heads": config["num_key_value_heads"]}
    of_global |= next(iter(config["per_layer_config"].values()))
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(local)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    for add_width, width in (
        (writer.add_key_length, of_global["head_dim"]),
        (writer.add_value_length, of_global["head_dim"]),
        (writer.add_key_length_swa, config["head_dim"]),
        (writer.add_value_length_swa, config["head_dim"]),
        (writer.add_rope_dimension_count, of_global["head_dim"]),
        (writer.add_rope_dimension_count_swa, config["head_dim"]),
    ):
        add_width(width)
    wide = [size * (1 + (layer >= len(local) - shared)) for layer in range(len(local))]
    writer.add_feed_forward_length(wide if config["use_double_wide_mlp"] else size)
    heads = [config["num_key_value_heads"] if each else of_global["num_key_value_heads"] for each in local]
    writer.add_head_count_kv(heads if len(set(heads)) > 1 else heads[0])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    pairs = of_global["head_dim"] // 2
    turning = int(pairs * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    factors = [1.0] * turning + [1e30] * (pairs - turning)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def _add_experts(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
