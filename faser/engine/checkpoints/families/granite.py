"""Granite 3 and 4: a Llama with four constants; of GraniteMoe with a mixture of experts in every layer.

Embeddings are multiplied by embedding_multiplier, what a layer adds by residual_multiplier r, scores by
attention_multiplier; logits are divided by logits_scaling. The residual stream is kept divided by r here, so that
nothing multiplies what a layer adds: norms give the same with eps / r².
"""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import (
    DecoderSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    RopeSpec,
    StackedExperts,
    TensorNames,
)
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec
from faser.engine.checkpoints.families.mixtures import local_experts
from faser.errors import ModelError

_NAMES = TensorNames()
_MOE_NAMES = TensorNames(
    router="block_sparse_moe.router.layer",
    expert="block_sparse_moe.experts.{}.",
    expert_parts=("w1", "w3", "w2"),
    stacked_experts=StackedExperts.HALVES,
)
_HYBRID_NAMES = TensorNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
_ATTENTION = ("attention", "full_attention")


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config)
    return _decoder(fields, rope_spec(fields), dense(fields, bias=fields.flag("mlp_bias", False)), _NAMES)


def moe_spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config)
    return _decoder(fields, rope_spec(fields), local_experts(fields), _MOE_NAMES)


def hybrid_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Read a Granite 4 of attention and dense networks alone. Raises ModelError for a layer of Mamba."""
    fields = Fields(config)
    num_layers = fields.num_layers()
    listed = fields.optional_list("layer_types", num_layers) or ["mamba"] * num_layers
    for number, kind in enumerate(listed):
        if kind not in _ATTENTION:
            raise ModelError(f"config.json: layer_types[{number}] is {kind!r}; only attention is supported")
    experts = config.get("num_local_experts", 8)
    if experts != 0:
        raise ModelError(
            f"config.json: num_local_experts is {experts}; experts beside a shared one are not supported"
        )
    fields.expect("position_embedding_type", ("rope", "nope"), "only rope, or none, is supported")
    rope = rope_spec(fields) if config.get("position_embedding_type") == "rope" else None
    network = DenseSpec(size=fields.positive_int("shared_intermediate_size", 1024), activation=fields.activation())
    return _decoder(fields, rope, network, _HYBRID_NAMES)


def _decoder(
    fields: Fields, rope: RopeSpec | None, network: DenseSpec | ExpertsSpec, names: TensorNames
) -> DecoderSpec:
    """attention_bias applies to queries, keys, values and the output."""
    bias = fields.flag("attention_bias", False)
    scale = fields.positive_float("attention_multiplier", 1.0)
    layer = LayerSpec(
        attention=attention(fields, rope, scale=scale, bias=bias, out_bias=bias), feed_forward=network
    )
    residual = fields.positive_float("residual_multiplier", 1.0)
    return decoder(
        fields,
        (layer,) * fields.num_layers(),
        rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6) / residual**2,
        embedding_scale=fields.positive_float("embedding_multiplier", 1.0) / residual,
        logit_scale=1 / fields.positive_float("logits_scaling", 1.0),
        names=names,
    )
