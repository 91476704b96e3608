"""Llama 2 and 3, and models of the same architecture (SmolLM, SmolLM2, TinyLlama)."""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec, LayerSpec
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """attention_bias applies to queries, keys, values and the output."""
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    layer = LayerSpec(
        attention=attention(fields, rope_spec(fields), bias=bias, out_bias=bias),
        feed_forward=dense(fields, bias=fields.flag("mlp_bias", False)),
    )
    return decoder(fields, (layer,) * fields.num_layers())
