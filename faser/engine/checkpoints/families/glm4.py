"""GLM-4: four norms a layer, gate and up in one tensor, half of a head rotates, in adjacent pairs."""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec, LayerSpec, TensorNames
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec

_DEFAULTS = {"partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True}
_NAMES = TensorNames(
    norm_after_attention="post_self_attn_layernorm",
    norm_after_feed_forward="post_mlp_layernorm",
    gate_up=("mlp.gate_up_proj",),
)


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """attention_bias applies to queries, keys and values."""
    fields = Fields(_DEFAULTS | dict(config))
    layer = LayerSpec(
        attention=attention(
            fields, rope_spec(fields, interleaved=True), bias=fields.flag("attention_bias", False)
        ),
        feed_forward=dense(fields),
        norms_after=True,
    )
    return decoder(fields, (layer,) * fields.num_layers(), names=_NAMES)
