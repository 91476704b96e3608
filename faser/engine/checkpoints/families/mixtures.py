"""Mixtures of experts: Qwen3-MoE (30B-A3B, Coder), Mixtral, and OLMoE, whose norms span all heads of a token."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from faser.engine.checkpoints.families import qwen3
from faser.engine.checkpoints.families.architecture import DecoderSpec, ExpertsSpec, LayerSpec, TensorNames
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, rope_spec, windowed

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
