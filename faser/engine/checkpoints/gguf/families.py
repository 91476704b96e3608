"""The architectures of GGUF files, a page of data: classes on the hub, names of tensors, keys of their own.

Formulas and defaults are those of llama.cpp's converter, conversion/*.py, and of its src/models. config.py reads
the keys that all of them share, rope.py those of the rotary embedding.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from faser.engine.checkpoints.gguf.file import GgufFile
from faser.errors import ModelError

Config = dict[str, Any]
OwnFields = Callable[[GgufFile, Config], Config]

_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERT = "{}"  # stands for the number of an expert: the file has the matrices of all experts in one tensor
GATE_UP = "gate_up_proj"  # of an expert: the rows of its gate, then those of its other half
_QWEN3_MOE = _LAYER | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{EXPERT}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EXPERT}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EXPERT}.down_proj",
}
_LLAMA = _LAYER | {  # a mixture is a Mixtral
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": f"block_sparse_moe.experts.{EXPERT}.w1",
    "ffn_up_exps": f"block_sparse_moe.experts.{EXPERT}.w3",
    "ffn_down_exps": f"block_sparse_moe.experts.{EXPERT}.w2",
}
_GRANITE_MOE = _LLAMA | {"ffn_gate_inp": "block_sparse_moe.router.layer"}
SINKS = "self_attn.sinks"
_GPT_OSS = {name: hub for name, hub in _LAYER.items() if not name.startswith("ffn_")} | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": SINKS,
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": f"mlp.experts.{EXPERT}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EXPERT}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EXPERT}.down_proj",
}
_PHI3 = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = _GEMMA | {
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": f"experts.{EXPERT}.{GATE_UP}",
    "ffn_gate_exps": f"experts.{EXPERT}.gate_proj",
    "ffn_up_exps": f"experts.{EXPERT}.up_proj",
    "ffn_down_exps": f"experts.{EXPERT}.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_GLM4 = {name: hub for name, hub in _LAYER.items() if name not in ("ffn_gate", "attn_q_norm", "attn_k_norm")} | {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}
# Names of the hub's without an ending.
A_LOG = "linear_attn.A_log"
DELTA_NORM = "linear_attn.norm"  # the one norm that is stored as it is
CONVOLUTIONS = ("linear_attn.conv1d.weight", "conv.conv.weight")  # [N, 1, kernel] on the hub, [N, kernel] here
BARE = (
    *(SINKS, A_LOG, "linear_attn.dt_bias", "layer_scalar", "router.scale", "router.per_expert_scale"),
    *("attention_conv.base_kernel", "mlp_conv.base_kernel", "feed_forward.expert_bias"),
)
SHARED_GATE = "mlp.shared_expert_gate"
CONFIDENCE = "confidence_head.proj.weight"
VECTORS = (f"{SHARED_GATE}.weight", CONFIDENCE)  # rows of the hub's, [1, N], are vectors here
DRAFT_IDS = "d2t"  # of each row of a drafter's logits: the token itself; on the hub, how far it is behind the row
_QWEN35 = {name: hub for name, hub in _LAYER.items() if name != "ffn_norm"} | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": A_LOG,
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": DELTA_NORM,
    "ssm_out": "linear_attn.out_proj",
}
_QWEN35_MOE = (_QWEN3_MOE | _QWEN35) | {
    "ffn_gate_inp_shexp": SHARED_GATE,
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_QWEN3_NEXT = _QWEN35_MOE | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}
_LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.expert_bias",
    "ffn_gate_exps": f"feed_forward.experts.{EXPERT}.w1",
    "ffn_up_exps": f"feed_forward.experts.{EXPERT}.w3",
    "ffn_down_exps": f"feed_forward.experts.{EXPERT}.w2",
}
_LFM2_OUTER = dict.fromkeys(("token_embd_norm.weight", "output_norm.weight"), "model.embedding_norm.weight")
# Of the layer that drafts, besides those of a layer with attention.
MTP_TENSORS = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "lm_head",
}
# Of block drafters, outside the layers. Norms are stored as they are, whatever those of the target are.
_DRAFTER = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": CONFIDENCE,
    "conf_proj.bias": "confidence_head.proj.bias",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    DRAFT_IDS: DRAFT_IDS,
}
_CONVOLUTIONS = {"attn_conv": "attention_conv", "ffn_conv": "mlp_conv"}
_DRAFTER_LAYER = (
    _LAYER
    | {f"{name}_base": f"{hub}.base_kernel" for name, hub in _CONVOLUTIONS.items()}
    | {f"{name}_proj": f"{hub}.kernel_projection" for name, hub in _CONVOLUTIONS.items()}
)
_SMOLLM3_ROPE_INTERVAL = 4
# The number of layers of the 27B models, which scale scores by the hidden size a head, not by the head's width.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_GEMMA3_PERIOD = 6
_CALL = "<|call|>"


def _no_fields(_file: GgufFile, _config: Config) -> Config:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Particulars of the files of one architecture.

    class_name, model_type: on the hub. tensors: of a layer, the hub's names by those in the file. permuted: rows
    of q and k are in llama.cpp's order. plus_one: norms are stored plus one. partial_rotary: some channels of a
    head may stay as they are. windows, experts: there may be a sliding window, or a mixture of experts.
    drafting_layers: the last layers may be there to draft (nextn): of a head, and none of the model.
    sizes_by_layer: layers may have key-value heads and networks of their own sizes, which own_fields reads.
    outer: the hub's names of further tensors outside the layers. drafter: it drafts for a model, whose embedding
    it may lack. own_fields: fields of config.json from keys of its own; called with the file and the other fields,
    which they replace.
    """

    class_name: str
    model_type: str
    tensors: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    permuted: bool = False
    plus_one: bool = False
    partial_rotary: bool = False
    windows: bool = False
    experts: bool = False
    drafting_layers: bool = False
    sizes_by_layer: bool = False
    outer: Mapping[str, str] = field(default_factory=dict)
    drafter: bool = False
    own_fields: OwnFields = _no_fields


def _llama_fields(file: GgufFile, _config: Config) -> Config:
    """A llama file with a window was converted from a Mistral checkpoint, one with experts from a Mixtral."""
    if experts := file.get("llama.expert_count", int, 0):
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": experts,
            "num_experts_per_tok": file.size("llama.expert_used_count"),
            "sliding_window": file.get("llama.attention.sliding_window", int) or None,
        }
    window = file.get("llama.attention.sliding_window", int)
    if not window:
        return {}
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


def _qwen3_moe_fields(file: GgufFile, _config: Config) -> Config:
    """llama.cpp always renormalises the weights of these experts. Layers without experts are dense."""
    layers = range(file.size("qwen3moe.block_count"))
    return {
        "num_experts": file.size("qwen3moe.expert_count"),
        "num_experts_per_tok": file.size("qwen3moe.expert_used_count"),
        "moe_intermediate_size": file.size("qwen3moe.expert_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": [each for each in layers if not file.has_tensor(f"blk.{each}.ffn_gate_exps.weight")],
    }


def _olmoe_fields(file: GgufFile, _config: Config) -> Config:
    """llama.cpp never renormalises the weights of these experts."""
    return {
        "num_experts": file.size("olmoe.expert_count"),
        "num_experts_per_tok": file.size("olmoe.expert_used_count"),
        "norm_topk_prob": False,
    }


def _gpt_oss_fields(file: GgufFile, config: Config) -> Config:
    """Files leave out that the ends of YaRN's ramp are not rounded, and that calls end generation too."""
    scaling, ends = config["rope_scaling"] or {}, config["eos_token_id"]
    if scaling.get("rope_type") == "yarn":
        scaling = scaling | {"truncate": False}
    if file.has("tokenizer.ggml.tokens") and _CALL in (tokens := file.require_list("tokenizer.ggml.tokens", str)):
        ends = list(dict.fromkeys((*ends, tokens.index(_CALL))))
    return {
        "num_local_experts": file.size("gpt-oss.expert_count"),
        "num_experts_per_tok": file.size("gpt-oss.expert_used_count"),
        "intermediate_size": file.size("gpt-oss.expert_feed_forward_length"),
        "sliding_window": file.size("gpt-oss.attention.sliding_window"),
        "rope_scaling": scaling or {"rope_type": "default"},
        "eos_token_id": ends,
    }


def _smollm3_fields(_file: GgufFile, config: Config) -> Config:
    layers = range(1, config["num_hidden_layers"] + 1)
    return {"no_rope_layers": [int(layer % _SMOLLM3_ROPE_INTERVAL != 0) for layer in layers]}


def _phi3_fields(file: GgufFile, _config: Config) -> Config:
    """A window of 0, or none, is no window: so the converter marks Phi-4."""
    return {"sliding_window": file.get("phi3.attention.sliding_window", int) or None}


def _mistral3_fields(file: GgufFile, config: Config) -> Config:
    """Ministral 3 if queries grow with the position, else Mistral Small 3.x."""
    beta = file.number("mistral3.attention.temperature_scale", 0.0)
    plain = {"sliding_window": file.get("mistral3.attention.sliding_window", int) or None}
    if not beta:
        return plain
    scaling = config["rope_scaling"] or {}
    if scaling.get("rope_type") != "yarn":
        raise ModelError(
            f"{file.path}: mistral3.attention.temperature_scale is {beta:g} without yarn; it is not supported"
        )
    original = scaling["original_max_position_embeddings"]
    length = file.get("mistral3.attention.temperature_length", int) or original
    if length != original:
        raise ModelError(
            f"{file.path}: mistral3.attention.temperature_length is {length}; only the original context length, "
            f"{original}, is supported"
        )
    ministral = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    return plain | ministral | {"rope_scaling": scaling | {"llama_4_scaling_beta": beta}}


def _granite_fields(file: GgufFile, config: Config, name: str = "granite") -> Config:
    """attention.scale: of the scores; none, or 0: 1 / √head_dim."""
    if not file.get(f"{name}.rope.scaling.finetuned", bool, True):
        raise ModelError(
            f"{file.path}: {name}.rope.scaling.finetuned is false; only models with rope are supported"
        )
    return {
        "attention_multiplier": file.number(f"{name}.attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": file.number(f"{name}.embedding_scale", 0.0) or 1.0,
        "residual_multiplier": file.number(f"{name}.residual_scale", 0.0) or 1.0,
        "logits_scaling": file.number(f"{name}.logit_scale", 0.0) or 1.0,
    }


def _granite_moe_fields(file: GgufFile, config: Config) -> Config:
    return _granite_fields(file, config, "granitemoe") | {
        "num_local_experts": file.size("granitemoe.expert_count"),
        "num_experts_per_tok": file.size("granitemoe.expert_used_count"),
    }


def _gemma2_fields(file: GgufFile, config: Config) -> Config:
    return _gemma_fields("gemma2", config) | {
        "sliding_window": file.size("gemma2.attention.sliding_window"),
        "attn_logit_softcapping": file.number("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("gemma2.final_logit_softcapping", 30.0),
    }


def _gemma3_fields(file: GgufFile, config: Config) -> Config:
    """Without a window, every layer attends everywhere and rotates as the global ones do."""
    window = file.get("gemma3.attention.sliding_window", int) or None
    pattern = file.get("gemma3.attention.sliding_window_pattern", int, _GEMMA3_PERIOD)
    return _gemma_fields("gemma3", config) | {
        "sliding_window": window,
        "sliding_window_pattern": pattern if window else 1,
        "rope_local_base_freq": file.number("gemma3.rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": file.number("gemma3.final_logit_softcapping", 0.0) or None,
    }


def _gemma_fields(architecture: str, config: Config) -> Config:
    """The scale of the scores is not stored; it follows from the sizes."""
    of_27b = config["num_hidden_layers"] == _LAYERS_OF_27B[architecture]
    share = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": share if of_27b else config["head_dim"],
    }


def _gemma4_fields(file: GgufFile, config: Config) -> Config:
    """A layer that stores keys without values takes them for values."""
    num_layers, shared = config["num_hidden_layers"], file.get("gemma4.attention.shared_kv_layers", int, 0)
    own = range(num_layers - shared)
    local = file.require_list("gemma4.attention.sliding_window_pattern", bool)
    kv_heads = file.by_layer("gemma4.attention.head_count_kv", num_layers)
    sizes = file.by_layer("gemma4.feed_forward_length", num_layers)
    size, wide = sizes[0], sizes[-1] != sizes[0]
    if len(local) != num_layers:
        raise ModelError(
            f"{file.path}: gemma4.attention.sliding_window_pattern has {len(local)} entries for {num_layers} "
            "layers"
        )
    if sizes != [size * (1 + (wide and layer not in own)) for layer in range(num_layers)]:
        raise ModelError(
            f"{file.path}: gemma4.feed_forward_length is {sizes}; only the last {shared} layers, which share "
            "keys, may be wider than the others, by a factor of 2"
        )
    widths = [file.size(f"gemma4.attention.key_length{'_swa' if each else ''}") for each in local]
    rope = {"rope_type": "default"} | (config["rope_scaling"] or {}) | {"rope_theta": config["rope_theta"]}
    experts, inputs = file.get("gemma4.expert_count", int, 0), "per_layer_token_embd.weight"
    found: Config = {
        "hidden_act": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention" if each else "full_attention" for each in local],
        "sliding_window": file.size("gemma4.attention.sliding_window"),
        "per_layer_config": {
            str(layer): {"head_dim": widths[layer], "num_key_value_heads": kv_heads[layer]}
            for layer in range(num_layers)
        },
        "attention_k_eq_v": not all(file.has_tensor(f"blk.{layer}.attn_v.weight") for layer in own),
        "num_kv_shared_layers": shared,
        "intermediate_size": size,
        "use_double_wide_mlp": wide,
        "final_logit_softcapping": file.number("gemma4.final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": file.get("gemma4.embedding_length_per_layer_input", int, 0),
        "vocab_size_per_layer_input": file.shape(inputs)[0] if file.has_tensor(inputs) else None,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.number("gemma4.rope.freq_base_swa", 10_000.0),
            },
        },
    }
    if experts:
        found |= {
            "enable_moe_block": True,
            "num_experts": experts,
            "top_k_experts": file.size("gemma4.expert_used_count"),
            "moe_intermediate_size": file.size("gemma4.expert_feed_forward_length"),
        }
    return found


def _glm4_fields(file: GgufFile, _config: Config) -> Config:
    """The converter orders rows of q and k otherwise for the text half of GLM-4.1V, which rotates in sections."""
    if file.has("glm4.rope.dimension_sections"):
        raise ModelError(f"{file.path} has glm4.rope.dimension_sections; the text half of GLM-4V is not supported")
    return {}


def _qwen35_fields(file: GgufFile, config: Config, name: str = "qwen35") -> Config:
    """Value heads are stored in tiles, one for each key head. Layers that draft count among the blocks."""
    num_v_heads = file.size(f"{name}.ssm.time_step_rank")
    layers = range(config["num_hidden_layers"] - file.get(f"{name}.nextn_predict_layers", int, 0))
    linear = [file.has_tensor(f"blk.{layer}.ssm_out.weight") for layer in layers]
    return {
        "num_hidden_layers": len(layers),
        "layer_types": ["linear_attention" if each else "full_attention" for each in linear],
        "linear_num_key_heads": file.size(f"{name}.ssm.group_count"),
        "linear_num_value_heads": num_v_heads,
        "linear_key_head_dim": file.size(f"{name}.ssm.state_size"),
        "linear_value_head_dim": file.size(f"{name}.ssm.inner_size") // num_v_heads,
        "linear_conv_kernel_dim": file.size(f"{name}.ssm.conv_kernel"),
        "linear_value_heads_tiled": True,
    }


def _qwen35_moe_fields(file: GgufFile, config: Config, name: str = "qwen35moe") -> Config:
    """llama.cpp always renormalises the weights of these experts."""
    return _qwen35_fields(file, config, name) | {
        "num_experts": file.size(f"{name}.expert_count"),
        "num_experts_per_tok": file.size(f"{name}.expert_used_count"),
        "moe_intermediate_size": file.size(f"{name}.expert_feed_forward_length"),
        "shared_expert_intermediate_size": file.size(f"{name}.expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _qwen3_next_fields(file: GgufFile, config: Config) -> Config:
    """Value heads are in the hub's order. Older files have queries, keys, values and z in one tensor as well."""
    found = _qwen35_moe_fields(file, config, "qwen3next")
    split = any(file.has_tensor(f"blk.{layer}.attn_gate.weight") for layer in range(found["num_hidden_layers"]))
    return found | {"linear_value_heads_tiled": False, "linear_qkvz_split": split}


def _lfm2_fields(file: GgufFile, config: Config, name: str = "lfm2") -> Config:
    """A layer without key-value heads has a short convolution."""
    kv_heads = file.require_list(f"{name}.attention.head_count_kv", int)
    if len(kv_heads) != config["num_hidden_layers"]:
        raise ModelError(
            f"{file.path}: {name}.attention.head_count_kv is {kv_heads}; it must have one of each layer"
        )
    return {
        "layer_types": ["full_attention" if each else "conv" for each in kv_heads],
        "num_key_value_heads": max(kv_heads),
        "conv_L_cache": file.size(f"{name}.shortconv.l_cache"),
        "intermediate_size": file.size(f"{name}.feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config["rms_norm_eps"],
    }


def _lfm2_moe_fields(file: GgufFile, config: Config) -> Config:
    """llama.cpp always renormalises the weights of these experts."""
    name = "lfm2moe"
    num_dense = file.get(f"{name}.leading_dense_block_count", int, 0)
    return _lfm2_fields(file, config, name) | {
        "num_dense_layers": num_dense,
        "num_experts": file.size(f"{name}.expert_count"),
        "num_experts_per_tok": file.size(f"{name}.expert_used_count"),
        "moe_intermediate_size": file.size(f"{name}.expert_feed_forward_length"),
        "use_expert_bias": file.has_tensor(f"blk.{num_dense}.exp_probs_b.bias"),
        "norm_topk_prob": True,
    }


def _dflash_fields(file: GgufFile, config: Config) -> Config:
    """DFlash; with a selector DFlash 2, with a Markov head DSpark.

    target_layers counts the inputs of layers, from 0. Where the file does not say it, DSpark predicts from the
    anchor and no layer is causal, as in llama.cpp.
    """
    if file.get("dflash.hyper_connection.count", int, 0):
        raise ModelError(
            f"{file.path} is a DSpark with the layers of DeepSeek-V4; only those of Qwen3 are computed"
        )
    if file.has("dflash.attention.value_scale"):
        raise ModelError(f"{file.path} has dflash.attention.value_scale, which is not computed")
    hidden_size, corrected = config["hidden_size"], file.has_tensor("markov_w1.weight")
    found: Config = {
        "architectures": ["Qwen3DSparkModel" if corrected else "DFlashDraftModel"],
        "target_layers": file.require_list("dflash.target_layers", int),
        "block_size": file.size("dflash.block_size"),
        "mask_token_id": file.require("tokenizer.ggml.mask_token_id", int),
        "sample_from_anchor": file.get("dflash.sample_from_anchor", bool, corrected),
        "is_causal": file.get("dflash.attention.causal", bool, False),
        "markov_rank": _columns(file, "markov_w1.weight") if corrected else 0,
        "output_multiplier": file.number("dflash.logit_scale", 0.0) or None,
        "final_logit_softcapping": file.number("dflash.final_logit_softcapping", 0.0) or None,
        "input_embedding_scale": file.number("dflash.embedding_scale", 0.0) or None,
    }
    if file.has_tensor("selector_hidden.weight"):
        found["architectures"] = ["DFlash2DraftModel"]
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        found |= {name: file.size(f"dflash.{name}") for name in names}
    if file.has_tensor("conf_proj.weight"):
        found["enable_confidence_head"] = True
        found["confidence_head_with_markov"] = _columns(file, "conf_proj.weight") > hidden_size
    if file.has_tensor(DRAFT_IDS):
        found["draft_vocab_size"] = math.prod(file.shape(DRAFT_IDS))
    if window := file.get("dflash.attention.sliding_window", int):
        local = file.require_list("dflash.attention.sliding_window_pattern", bool)
        found["layer_types"] = ["sliding_attention" if each else "full_attention" for each in local]
        found["sliding_window"] = window
    return found


def _columns(file: GgufFile, name: str) -> int:
    """Return how many values a row of a tensor has."""
    return (file.shape(name) or (1,))[-1]


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        class_name="LlamaForCausalLM",
        model_type="llama",
        tensors=_LLAMA,
        permuted=True,
        windows=True,
        experts=True,
        own_fields=_llama_fields,
    ),
    "qwen2": Architecture(class_name="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": Architecture(class_name="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen35": Architecture(
        class_name="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        tensors=_QWEN35,
        plus_one=True,
        partial_rotary=True,
        drafting_layers=True,
        own_fields=_qwen35_fields,
    ),
    "qwen35moe": Architecture(
        class_name="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        tensors=_QWEN35_MOE,
        plus_one=True,
        partial_rotary=True,
        experts=True,
        drafting_layers=True,
        own_fields=_qwen35_moe_fields,
    ),
    "qwen3next": Architecture(
        class_name="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        tensors=_QWEN3_NEXT,
        plus_one=True,
        partial_rotary=True,
        experts=True,
        drafting_layers=True,
        own_fields=_qwen3_next_fields,
    ),
    "qwen3moe": Architecture(
        class_name="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        tensors=_QWEN3_MOE,
        experts=True,
        own_fields=_qwen3_moe_fields,
    ),
    "smollm3": Architecture(
        class_name="SmolLM3ForCausalLM", model_type="smollm3", permuted=True, own_fields=_smollm3_fields
    ),
    # The text halves of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: for text alone rope in sections is plain rope.
    "qwen2vl": Architecture(class_name="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3vl": Architecture(class_name="Qwen3ForCausalLM", model_type="qwen3"),
    "mistral3": Architecture(
        class_name="MistralForCausalLM",
        model_type="mistral",
        permuted=True,
        windows=True,
        own_fields=_mistral3_fields,
    ),
    "phi3": Architecture(
        class_name="Phi3ForCausalLM",
        model_type="phi3",
        tensors=_PHI3,
        partial_rotary=True,
        windows=True,
        own_fields=_phi3_fields,
    ),
    "granite": Architecture(
        class_name="GraniteForCausalLM", model_type="granite", permuted=True, own_fields=_granite_fields
    ),
    "granitemoe": Architecture(
        class_name="GraniteMoeForCausalLM",
        model_type="granitemoe",
        tensors=_GRANITE_MOE,
        permuted=True,
        experts=True,
        own_fields=_granite_moe_fields,
    ),
    "olmoe": Architecture(
        class_name="OlmoeForCausalLM",
        model_type="olmoe",
        tensors=_QWEN3_MOE,
        experts=True,
        own_fields=_olmoe_fields,
    ),
    "gemma2": Architecture(
        class_name="Gemma2ForCausalLM",
        model_type="gemma2",
        tensors=_GEMMA,
        plus_one=True,
        windows=True,
        own_fields=_gemma2_fields,
    ),
    "gemma3": Architecture(
        class_name="Gemma3ForCausalLM",
        model_type="gemma3_text",
        tensors=_GEMMA,
        plus_one=True,
        windows=True,
        own_fields=_gemma3_fields,
    ),
    "gemma4": Architecture(
        class_name="Gemma4ForCausalLM",
        model_type="gemma4_text",
        tensors=_GEMMA4,
        windows=True,
        experts=True,
        sizes_by_layer=True,
        own_fields=_gemma4_fields,
    ),
    "glm4": Architecture(
        class_name="Glm4ForCausalLM",
        model_type="glm4",
        tensors=_GLM4,
        partial_rotary=True,
        own_fields=_glm4_fields,
    ),
    "gpt-oss": Architecture(
        class_name="GptOssForCausalLM",
        model_type="gpt_oss",
        tensors=_GPT_OSS,
        windows=True,
        experts=True,
        own_fields=_gpt_oss_fields,
    ),
    "lfm2": Architecture(
        class_name="Lfm2ForCausalLM",
        model_type="lfm2",
        tensors=_LFM2,
        outer=_LFM2_OUTER,
        sizes_by_layer=True,
        own_fields=_lfm2_fields,
    ),
    "lfm2moe": Architecture(
        class_name="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        tensors=_LFM2,
        outer=_LFM2_OUTER,
        experts=True,
        sizes_by_layer=True,
        own_fields=_lfm2_moe_fields,
    ),
}

DRAFTERS: Mapping[str, Architecture] = {
    "dflash": Architecture(
        class_name="DFlashDraftModel",
        model_type="qwen3",
        tensors=_DRAFTER_LAYER,
        windows=True,
        outer=_DRAFTER,
        drafter=True,
        own_fields=_dflash_fields,
    ),
}
_REFUSED = {
    "dspark": "forks of llama.cpp write such files, which number layers and name tensors in ways of their own; "
    "convert the checkpoint with llama.cpp, whose files of DSpark are of architecture dflash",
}


def architecture_of(file: GgufFile) -> Architecture:
    """Raises ModelError that names an architecture that is not supported."""
    name = file.require("general.architecture", str)
    if found := ARCHITECTURES.get(name) or DRAFTERS.get(name):
        return found
    if name in _REFUSED:
        raise ModelError(f"{file.path} is of architecture {name}, which is not supported: {_REFUSED[name]}")
    raise ModelError(f"{file.path} is of architecture {name}; supported are {', '.join(ARCHITECTURES)}")
