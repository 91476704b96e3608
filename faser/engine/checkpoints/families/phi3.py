"""Phi-3, Phi-4, Phi-4-mini: fused products, heads that rotate in part, longrope."""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec, LayerSpec, TensorNames
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec, windowed

_OLD_NAMES = ("su", "yarn")  # of longrope


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields({"rms_norm_eps": 1e-5} | _renamed(config))
    layer = LayerSpec(attention=attention(fields, rope_spec(fields)), feed_forward=dense(fields))
    window = fields.optional_int("sliding_window")
    layers = windowed(layer, fields.windows((window,) * fields.num_layers()))
    return decoder(fields, layers, names=TensorNames(fused_qkv=True, gate_up=("mlp.gate_up_proj",)))


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the name longrope in place of those of the first configs."""
    found = dict(config)
    for field in ("rope_scaling", "rope_parameters"):
        given = config.get(field)
        if isinstance(given, dict) and given.get("rope_type", given.get("type")) in _OLD_NAMES:
            found[field] = {**given, "rope_type": "longrope"}
    return found
