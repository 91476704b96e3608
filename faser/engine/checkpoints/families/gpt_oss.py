"""gpt-oss (20B, 120B): a mixture of experts in every layer, biases on all products, attention sinks, YaRN.

Of two layers the first has a window.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.families.architecture import (
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    StackedExperts,
    TensorNames,
)
from faser.engine.checkpoints.families.family import EXPERT, LAYER, SINKS, Config, Family, GgufArchitecture
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, rope_spec, windowed
from faser.types.activation import Activation

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile

_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "rope_theta": 150_000.0,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_NAMES = TensorNames(router="mlp.router", stacked_experts=StackedExperts.ALTERNATING)


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Experts clamp what they multiply at 7 and have a gain of 1.702, as in all published models."""
    given = dict(_DEFAULTS) | {name: value for name, value in config.items() if value is not None}
    if not (given.get("rope_scaling") or given.get("rope_parameters")):
        given["rope_scaling"] = _YARN
    fields = Fields(given)
    fields.expect("swiglu_limit", (7,), "experts of gpt-oss clamp at 7")
    fields.expect("swiglu_alpha", (1.702,), "the gain of experts of gpt-oss is 1.702")
    bias = fields.flag("attention_bias", True)
    layer = LayerSpec(
        attention=attention(fields, rope_spec(fields), bias=bias, out_bias=bias, sinks=True),
        feed_forward=ExpertsSpec(
            num_experts=fields.positive_int("num_local_experts", fields.positive_int("num_experts", 128)),
            top_k=fields.positive_int("num_experts_per_tok", 4),
            size=fields.positive_int("intermediate_size", 2880),
            renormalise=True,
            activation=Activation.SWIGLU_OAI,
            bias=True,
        ),
    )
    window = fields.positive_int("sliding_window")
    usual = tuple(None if number % 2 else window for number in range(fields.num_layers()))
    return decoder(fields, windowed(layer, fields.windows(usual)), names=_NAMES)


_GPT_OSS = {name: hub for name, hub in LAYER.items() if not name.startswith("ffn_")} | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": SINKS,
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": f"mlp.experts.{EXPERT}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EXPERT}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EXPERT}.down_proj",
}
_CALL = "<|call|>"


def _gpt_oss_fields(file: "GgufFile", config: Config) -> Config:
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


GGUF: Mapping[str, GgufArchitecture] = {
    "gpt-oss": GgufArchitecture(
        class_name="GptOssForCausalLM",
        model_type="gpt_oss",
        tensors=_GPT_OSS,
        windows=True,
        experts=True,
        own_fields=_gpt_oss_fields,
    ),
}
FAMILIES = (
    Family(
        name="gpt-oss",
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        to_spec=spec,
        tool_parsers=("openai",),
        examples=("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
        gguf=("gpt-oss",),
        note="A mixture of experts, stored in MXFP4.",
    ),
)
