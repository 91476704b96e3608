"""Qwen3.5, Qwen3.6 and Qwen3-Next: of four layers three have a gated delta net, the fourth has gated attention.

Queries and keys are normalised, and a quarter of their channels rotates. Norms multiply by 1 + w, but for the one
behind a delta net. Mixtures have an expert that every row passes. Checkpoints have a layer that drafts (mtp.*),
which heads.py describes, and may have a vision half, which is not read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from faser.engine.checkpoints.families.architecture import (
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    StackedExperts,
    TensorNames,
)
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec
from faser.engine.checkpoints.families.mixtures import has_experts
from faser.errors import ModelError

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
_NEXT_NAMES = replace(_NAMES, fused_qkvz=True, fused_rates=True)


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
    names = replace(_NEXT_NAMES, fused_qkvz=not fields.flag("linear_qkvz_split", False))
    return _decoder(fields, networks, names)


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


def _decoder(fields: Fields, networks: Sequence[DenseSpec | ExpertsSpec], names: TensorNames) -> DecoderSpec:
    """networks: of each layer."""
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
