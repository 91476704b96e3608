"""LFM2 and LFM2.5: most layers have a gated short convolution in place of attention; 8B-A1B mixes experts.

Attention normalises each query and key head. The experts of a row have the largest σ(logit) + bias; their weights
are the σ alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.families.architecture import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    MixerSpec,
    TensorNames,
)
from faser.engine.checkpoints.families.family import EXPERT, Config, Family, GgufArchitecture
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, rope_spec
from faser.errors import ModelError

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile

_CONVOLUTION, _FULL = "conv", "full_attention"
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
}
_NAMES = TensorNames(
    norm_before_attention="operator_norm",
    norm_before_feed_forward="ffn_norm",
    final_norm="model.embedding_norm.weight",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    attention_out="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    router="feed_forward.gate",
    choice_bias="feed_forward.expert_bias",
    expert="feed_forward.experts.{}.",
    expert_parts=("w1", "w3", "w2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec(MixerSpec):
    """Gated short convolution of a layer, in place of attention. Checked when built.

    What it computes: kernels/interface/short_conv.py. kernel: tokens that it sees, the row's own included. Raises
    ModelError that names the value and the limit.
    """

    kernel: int

    def __post_init__(self) -> None:
        if self.kernel < 2:
            raise ModelError(f"a convolution of {self.kernel} tokens; it must be at least 2")


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """A dense model. The network is smaller than intermediate_size says where block_auto_adjust_ff_dim is true."""
    fields = _fields(config)
    return _decoder(config, fields, [DenseSpec(size=_inner_size(fields))] * fields.num_layers())


def moe_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """A mixture in every layer but the first num_dense_layers."""
    fields = _fields(config)
    plain = DenseSpec(size=fields.positive_int("intermediate_size", 7168))
    mixture = ExpertsSpec(
        num_experts=fields.positive_int("num_experts", 32),
        top_k=fields.positive_int("num_experts_per_tok", 4),
        size=fields.positive_int("moe_intermediate_size", 1792),
        renormalise=fields.flag("norm_topk_prob", True),
        sigmoid=True,
        choice_bias=fields.flag("use_expert_bias", True),
        scale=fields.positive_float("routed_scaling_factor", 1.0),
    )
    num_dense = fields.non_negative_int("num_dense_layers", 2)
    networks = [plain if layer < num_dense else mixture for layer in range(fields.num_layers())]
    return _decoder(config, fields, networks)


def _fields(config: Mapping[str, Any]) -> Fields:
    """Under the names of other families; older files have block_ff_dim, tie_embedding and full_attn_idxs."""
    given = _DEFAULTS | {name: value for name, value in config.items() if value is not None}
    for old, name in (("block_ff_dim", "intermediate_size"), ("tie_embedding", "tie_word_embeddings")):
        given |= {name: given[old]} if old in given else {}
    fields = Fields(given)
    fields.expect("conv_bias", (False,), "convolutions with biases are not supported")
    return fields


def _inner_size(fields: Fields) -> int:
    size = fields.positive_int("intermediate_size", 12288)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.positive_int("block_multiple_of", 256)
    size = int(fields.positive_float("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def _decoder(
    config: Mapping[str, Any], fields: Fields, networks: Sequence[DenseSpec | ExpertsSpec]
) -> DecoderSpec:
    """networks: of each layer."""
    full = attention(fields, rope_spec(fields, default_theta=1_000_000.0), qk_norm=True)
    mixers: dict[str, AttentionSpec | ShortConvSpec] = {
        _FULL: full,
        _CONVOLUTION: ShortConvSpec(kernel=fields.positive_int("conv_L_cache")),
    }
    layers = [
        LayerSpec(attention=mixers[kind], feed_forward=network)
        for kind, network in zip(_layer_types(config, fields), networks, strict=True)
    ]
    eps = fields.positive_float("norm_eps")
    return decoder(fields, layers, tied=True, rms_norm_eps=eps, names=_NAMES)


def _layer_types(config: Mapping[str, Any], fields: Fields) -> list[str]:
    """Raises ModelError for a kind of layer that is neither, and where no layer has attention."""
    num_layers = fields.num_layers()
    attends = config.get("full_attn_idxs")
    usual = [_FULL if attends is None or layer in attends else _CONVOLUTION for layer in range(num_layers)]
    found = fields.optional_list("layer_types", num_layers) or usual
    for layer, kind in enumerate(found):
        if kind not in (_FULL, _CONVOLUTION):
            raise ModelError(f"config.json: layer_types[{layer}] is {kind!r}; only {_FULL}, {_CONVOLUTION}")
    if _FULL not in found:
        raise ModelError(f"config.json: layer_types has no {_FULL}; at least one layer must attend")
    return found


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


def _lfm2_fields(file: "GgufFile", config: Config, name: str = "lfm2") -> Config:
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


def _lfm2_moe_fields(file: "GgufFile", config: Config) -> Config:
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


GGUF: Mapping[str, GgufArchitecture] = {
    "lfm2": GgufArchitecture(
        class_name="Lfm2ForCausalLM",
        model_type="lfm2",
        tensors=_LFM2,
        outer=_LFM2_OUTER,
        sizes_by_layer=True,
        own_fields=_lfm2_fields,
    ),
    "lfm2moe": GgufArchitecture(
        class_name="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        tensors=_LFM2,
        outer=_LFM2_OUTER,
        experts=True,
        sizes_by_layer=True,
        own_fields=_lfm2_moe_fields,
    ),
}
FAMILIES = (
    Family(
        name="LFM2, LFM2.5",
        model_type="lfm2",
        architecture="Lfm2ForCausalLM",
        to_spec=spec,
        tool_parsers=("lfm2",),
        examples=("LiquidAI/LFM2-1.2B", "LiquidAI/LFM2.5-1.2B-Instruct"),
        gguf=("lfm2",),
        note="Short convolutions, which CPUs compute.",
    ),
    Family(
        name="LFM2-MoE",
        model_type="lfm2_moe",
        architecture="Lfm2MoeForCausalLM",
        to_spec=moe_spec,
        tool_parsers=("lfm2",),
        examples=("LiquidAI/LFM2-8B-A1B",),
        gguf=("lfm2moe",),
        note="A mixture of experts with short convolutions, which CPUs compute.",
    ),
)
