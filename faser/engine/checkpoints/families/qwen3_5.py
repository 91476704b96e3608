"""Qwen3.5, Qwen3.6 and Qwen3-Next: of four layers three have a gated delta net, the fourth has gated attention.

Queries and keys are normalised, and a quarter of their channels rotates. Norms multiply by 1 + w, but for the one
behind a delta net. Mixtures have an expert that every row passes. Checkpoints have a layer that drafts (mtp.*),
which heads.py describes, and may have a vision half, which is not read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.families.architecture import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    MixerSpec,
    StackedExperts,
    TensorNames,
)
from faser.engine.checkpoints.families.family import (
    A_LOG,
    DELTA_NORM,
    LAYER,
    SHARED_GATE,
    Config,
    Family,
    GgufArchitecture,
)
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec
from faser.engine.checkpoints.families.mixtures import QWEN3_MOE, has_experts
from faser.errors import ModelError

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile

_LINEAR = "linear_attention"
_FULL = "full_attention"
_HEAD_DIM = 256
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
}
_OF_MIXTURES = _DEFAULTS | {"num_key_value_heads": 2}
_NAMES = TensorNames(not_read=("mtp.",), stacked_experts=StackedExperts.HALVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec(MixerSpec):
    """Gated delta net of a layer, in place of attention: a state, no keys and values. Checked when built.

    What it computes: kernels/interface/delta_net.py. A key head serves num_v_heads // num_k_heads value heads,
    which follow each other or, where they are tiled, come num_k_heads apart. kernel: tokens that the convolution
    sees, the row's own included. fused_qkvz: queries, keys, values and z are one tensor, in_proj_qkvz, that has
    them key head by key head; fused_rates: so are b and a, in_proj_ba.

    Raises ModelError that names the value and the limit.
    """

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    kernel: int
    tiled: bool = False
    fused_qkvz: bool = False
    fused_rates: bool = False

    def __post_init__(self) -> None:
        if self.num_v_heads % self.num_k_heads:
            raise ModelError(
                f"{self.num_v_heads} value heads of linear attention do not share {self.num_k_heads} key heads "
                "evenly"
            )
        if self.kernel < 2:
            raise ModelError(f"linear_conv_kernel_dim is {self.kernel}; it must be at least 2")

    @property
    def k_size(self) -> int:
        return self.num_k_heads * self.k_head_dim

    @property
    def v_size(self) -> int:
        return self.num_v_heads * self.v_head_dim


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """attention_bias applies to queries, gates, keys, values and the output of attention.

    linear_value_heads_tiled: no field of the hub's; GGUF files have the value heads in that order.
    """
    fields = _fields(config, _DEFAULTS)
    return _decoder(fields, [dense(fields)] * fields.num_layers(), replace(_NAMES, stacked_experts=None))


def moe_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """A mixture in every layer, whose weights are always renormalised."""
    fields = _fields(config, _OF_MIXTURES)
    fields.expect("norm_topk_prob", (True,), "the weights of these experts are always renormalised")
    return _decoder(fields, [_mixture(fields, num_experts=256, top_k=8)] * fields.num_layers(), _NAMES)


def next_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Qwen3-Next. Layers of mlp_only_layers, and those that decoder_sparse_step leaves out, are dense.

    linear_qkvz_split: no field of the hub's; GGUF files may have queries, keys and values apart from z.
    """
    fields = _fields(config, _OF_MIXTURES)
    mixture = _mixture(fields, num_experts=512, top_k=10)
    plain = DenseSpec(size=fields.positive_int("intermediate_size", 5632))
    networks = [mixture if mixes else plain for mixes in has_experts(config, fields)]
    fused_qkvz = not fields.flag("linear_qkvz_split", False)
    return _decoder(fields, networks, _NAMES, fused_qkvz=fused_qkvz, fused_rates=True)


def _fields(config: Mapping[str, Any], defaults: dict[str, Any]) -> Fields:
    fields = Fields(defaults | {name: value for name, value in config.items() if value is not None})
    fields.expect("hidden_act", ("silu",), "the convolution of a delta net is followed by silu")
    return fields


def _mixture(fields: Fields, *, num_experts: int, top_k: int) -> ExpertsSpec:
    """num_experts, top_k: where the fields do not say it."""
    return ExpertsSpec(
        num_experts=fields.positive_int("num_experts", num_experts),
        top_k=fields.positive_int("num_experts_per_tok", top_k),
        size=fields.positive_int("moe_intermediate_size", 512),
        renormalise=fields.flag("norm_topk_prob", True),
        shared_size=fields.positive_int("shared_expert_intermediate_size", 512),
    )


def _decoder(
    fields: Fields, networks: Sequence[DenseSpec | ExpertsSpec], names: TensorNames, **fused: bool
) -> DecoderSpec:
    """networks: of each layer. fused: see DeltaNetSpec."""
    head_dim, bias = fields.positive_int("head_dim", _HEAD_DIM), fields.flag("attention_bias", False)
    full = attention(
        fields,
        rope_spec(fields, head_dim=head_dim),
        head_dim=head_dim,
        qk_norm=True,
        gated=True,
        bias=bias,
        out_bias=bias,
    )
    linear = DeltaNetSpec(
        num_k_heads=fields.positive_int("linear_num_key_heads", 16),
        num_v_heads=fields.positive_int("linear_num_value_heads", 32),
        k_head_dim=fields.positive_int("linear_key_head_dim", 128),
        v_head_dim=fields.positive_int("linear_value_head_dim", 128),
        kernel=fields.positive_int("linear_conv_kernel_dim", 4),
        tiled=fields.flag("linear_value_heads_tiled", False),
        **fused,
    )
    kinds: dict[str, AttentionSpec | DeltaNetSpec] = {_LINEAR: linear, _FULL: full}
    layers = [
        LayerSpec(attention=kinds[kind], feed_forward=network)
        for kind, network in zip(_layer_types(fields), networks, strict=True)
    ]
    return decoder(fields, layers, plus_one=True, names=names)


def _layer_types(fields: Fields) -> list[str]:
    """Raises ModelError for a kind of layer that is neither, and where no layer has attention."""
    num_layers, period = fields.num_layers(), fields.positive_int("full_attention_interval", 4)
    listed = fields.optional_list("layer_types", num_layers)
    found = listed or [_LINEAR if (layer + 1) % period else _FULL for layer in range(num_layers)]
    for layer, kind in enumerate(found):
        if kind not in (_LINEAR, _FULL):
            raise ModelError(f"config.json: layer_types[{layer}] is {kind!r}; only {_FULL}, {_LINEAR}")
    if _FULL not in found:
        raise ModelError(f"config.json: layer_types has no {_FULL}; at least one layer must attend")
    return found


_QWEN35 = {name: hub for name, hub in LAYER.items() if name != "ffn_norm"} | {
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
_QWEN35_MOE = (QWEN3_MOE | _QWEN35) | {
    "ffn_gate_inp_shexp": SHARED_GATE,
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_QWEN3_NEXT = _QWEN35_MOE | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}


def _qwen35_fields(file: "GgufFile", config: Config, name: str = "qwen35") -> Config:
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


def _qwen35_moe_fields(file: "GgufFile", config: Config, name: str = "qwen35moe") -> Config:
    """llama.cpp always renormalises the weights of these experts."""
    return _qwen35_fields(file, config, name) | {
        "num_experts": file.size(f"{name}.expert_count"),
        "num_experts_per_tok": file.size(f"{name}.expert_used_count"),
        "moe_intermediate_size": file.size(f"{name}.expert_feed_forward_length"),
        "shared_expert_intermediate_size": file.size(f"{name}.expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _qwen3_next_fields(file: "GgufFile", config: Config) -> Config:
    """Value heads are in the hub's order. Older files have queries, keys, values and z in one tensor as well."""
    found = _qwen35_moe_fields(file, config, "qwen3next")
    split = any(file.has_tensor(f"blk.{layer}.attn_gate.weight") for layer in range(found["num_hidden_layers"]))
    return found | {"linear_value_heads_tiled": False, "linear_qkvz_split": split}


TILED_FILES = ("qwen35", "qwen35moe")  # architectures of GGUF files whose value heads are tiled

GGUF: Mapping[str, GgufArchitecture] = {
    "qwen35": GgufArchitecture(
        class_name="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        tensors=_QWEN35,
        plus_one=True,
        partial_rotary=True,
        drafting_layers=True,
        own_fields=_qwen35_fields,
    ),
    "qwen35moe": GgufArchitecture(
        class_name="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        tensors=_QWEN35_MOE,
        plus_one=True,
        partial_rotary=True,
        experts=True,
        drafting_layers=True,
        own_fields=_qwen35_moe_fields,
    ),
    "qwen3next": GgufArchitecture(
        class_name="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        tensors=_QWEN3_NEXT,
        plus_one=True,
        partial_rotary=True,
        experts=True,
        drafting_layers=True,
        own_fields=_qwen3_next_fields,
    ),
}
FAMILIES = (
    Family(
        name="Qwen3.5, dense",
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        to_spec=spec,
        tool_parsers=("qwen3_coder",),
        examples=("Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B"),
        gguf=("qwen35",),
        note="Gated delta nets. The MTP layer of a checkpoint drafts; of checkpoints that also read images "
        "(Qwen3_5ForConditionalGeneration) the text half loads.",
    ),
    Family(
        name="Qwen3.5-MoE",
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        to_spec=moe_spec,
        tool_parsers=("qwen3_coder",),
        examples=("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.6-35B-A3B"),
        gguf=("qwen35moe",),
        note="A mixture of experts with gated delta nets. The MTP layer of a checkpoint drafts; of checkpoints "
        "that also read images (Qwen3_5MoeForConditionalGeneration) the text half loads.",
    ),
    Family(
        name="Qwen3-Next",
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        to_spec=next_spec,
        tool_parsers=("hermes", "qwen3_coder"),
        examples=("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Coder-Next"),
        gguf=("qwen3next",),
        note="A mixture of experts with gated delta nets. The MTP layer of a checkpoint drafts.",
    ),
)
