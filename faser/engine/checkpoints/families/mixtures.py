"""Mixtures of experts: Qwen3-MoE (30B-A3B, Coder), Mixtral, and OLMoE, whose norms span all heads of a token."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.families import qwen3
from faser.engine.checkpoints.families.architecture import DecoderSpec, ExpertsSpec, LayerSpec, TensorNames
from faser.engine.checkpoints.families.family import EXPERT, LAYER, Config, Family, GgufArchitecture
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, rope_spec, windowed

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile

_COUNTS = ("num_experts", "num_local_experts")


def qwen3_moe_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Layers of mlp_only_layers, and those that decoder_sparse_step leaves out, have a dense network."""
    fields = Fields(config)
    plain = qwen3.spec({name: value for name, value in config.items() if name not in _COUNTS})
    mixture = ExpertsSpec(
        num_experts=fields.positive_int("num_experts", fields.positive_int("num_local_experts", 128)),
        top_k=fields.positive_int("num_experts_per_tok", 8),
        size=fields.positive_int("moe_intermediate_size", 768),
        renormalise=fields.flag("norm_topk_prob", False),
        activation=fields.activation(),
    )
    layers = tuple(
        replace(layer, feed_forward=mixture) if mixes else layer
        for layer, mixes in zip(plain.layers, has_experts(config, fields), strict=True)
    )
    return replace(plain, layers=layers)


def has_experts(config: Mapping[str, Any], fields: Fields) -> list[bool]:
    """Return whether each layer is a mixture, by mlp_only_layers and decoder_sparse_step."""
    every, left_out = fields.positive_int("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return [number not in left_out and (number + 1) % every == 0 for number in range(fields.num_layers())]


def local_experts(fields: Fields) -> ExpertsSpec:
    """Read experts as Mixtral counts them. Softmax over the chosen is softmax over all, divided by its sum."""
    return ExpertsSpec(
        num_experts=fields.positive_int("num_local_experts", 8),
        top_k=fields.positive_int("num_experts_per_tok", 2),
        size=fields.positive_int("intermediate_size"),
        renormalise=True,
        activation=fields.activation(),
    )


def olmoe_spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields({"rms_norm_eps": 1e-5, "intermediate_size": 2048} | dict(config))
    fields.expect("clip_qkv", (), "queries, keys and values that are cut off are not supported")
    bias = fields.flag("attention_bias", False)
    mixture = ExpertsSpec(
        num_experts=fields.positive_int("num_experts", 64),
        top_k=fields.positive_int("num_experts_per_tok", 8),
        size=fields.positive_int("intermediate_size"),
        renormalise=fields.flag("norm_topk_prob", False),
        activation=fields.activation(),
    )
    heads = attention(fields, rope_spec(fields), wide_qk_norm=True, bias=bias, out_bias=bias)
    return decoder(fields, (LayerSpec(attention=heads, feed_forward=mixture),) * fields.num_layers())


def mixtral_spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields({"rms_norm_eps": 1e-5} | dict(config))
    rope = rope_spec(fields, default_theta=1_000_000.0)
    layer = LayerSpec(attention=attention(fields, rope), feed_forward=local_experts(fields))
    window = fields.optional_int("sliding_window")
    names = TensorNames(
        router="block_sparse_moe.gate", expert="block_sparse_moe.experts.{}.", expert_parts=("w1", "w3", "w2")
    )
    return decoder(fields, windowed(layer, (window,) * fields.num_layers()), names=names)


QWEN3_MOE = LAYER | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{EXPERT}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EXPERT}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EXPERT}.down_proj",
}


def _qwen3_moe_fields(file: "GgufFile", _config: Config) -> Config:
    """llama.cpp always renormalises the weights of these experts. Layers without experts are dense."""
    layers = range(file.size("qwen3moe.block_count"))
    return {
        "num_experts": file.size("qwen3moe.expert_count"),
        "num_experts_per_tok": file.size("qwen3moe.expert_used_count"),
        "moe_intermediate_size": file.size("qwen3moe.expert_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": [each for each in layers if not file.has_tensor(f"blk.{each}.ffn_gate_exps.weight")],
    }


def _olmoe_fields(file: "GgufFile", _config: Config) -> Config:
    """llama.cpp never renormalises the weights of these experts."""
    return {
        "num_experts": file.size("olmoe.expert_count"),
        "num_experts_per_tok": file.size("olmoe.expert_used_count"),
        "norm_topk_prob": False,
    }


GGUF: Mapping[str, GgufArchitecture] = {
    "qwen3moe": GgufArchitecture(
        class_name="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        tensors=QWEN3_MOE,
        experts=True,
        own_fields=_qwen3_moe_fields,
    ),
    "olmoe": GgufArchitecture(
        class_name="OlmoeForCausalLM",
        model_type="olmoe",
        tensors=QWEN3_MOE,
        experts=True,
        own_fields=_olmoe_fields,
    ),
}
FAMILIES = (
    Family(
        name="Qwen3-MoE",
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        to_spec=qwen3_moe_spec,
        tool_parsers=("hermes", "qwen3_coder"),
        examples=("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
        gguf=("qwen3moe",),
        note="A mixture of experts.",
    ),
    Family(
        name="Mixtral",
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        to_spec=mixtral_spec,
        tool_parsers=(),
        examples=("mistralai/Mixtral-8x7B-Instruct-v0.1",),
        gguf=("llama",),
        note="A mixture of experts.",
    ),
    Family(
        name="OLMoE",
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        to_spec=olmoe_spec,
        tool_parsers=(),
        examples=("allenai/OLMoE-1B-7B-0924-Instruct", "allenai/OLMoE-1B-7B-0125-Instruct"),
        gguf=("olmoe",),
        note="A mixture of experts.",
    ),
)
