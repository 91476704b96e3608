"""Mistral 7B, Mistral Small, Ministral, Devstral: no biases; one sliding window for all layers, or none.

Ministral 3 also multiplies its rotated queries by a number that grows with the position.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec, LayerSpec, QueryGrowth, RopeSpec
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec, windowed

_DEFAULT_WINDOW = 4096
_MINISTRAL3 = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """A config without sliding_window has the window of the first Mistral; null means no window."""
    fields = Fields(config)
    window = fields.optional_int("sliding_window") if "sliding_window" in config else _DEFAULT_WINDOW
    return _decoder(fields, rope_spec(fields), window)


def ministral3_spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(_MINISTRAL3 | dict(config))
    rope = rope_spec(fields)
    given = Fields(fields.optional_dict("rope_scaling") or fields.optional_dict("rope_parameters") or {})
    beta = given.optional_float("llama_4_scaling_beta")
    if beta:
        growth = QueryGrowth(beta=beta, original_positions=given.positive_int("original_max_position_embeddings"))
        rope = replace(rope, query_growth=growth)
    return _decoder(fields, rope, fields.optional_int("sliding_window"))


def _decoder(fields: Fields, rope: RopeSpec, window: int | None) -> DecoderSpec:
    layer = LayerSpec(attention=attention(fields, rope), feed_forward=dense(fields))
    return decoder(fields, windowed(layer, fields.windows((window,) * fields.num_layers())))
