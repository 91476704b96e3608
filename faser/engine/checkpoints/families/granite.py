"""Granite 3 and 4, dense: a Llama with four constants.

Embeddings are multiplied by embedding_multiplier, what a layer adds by residual_multiplier r, scores by
attention_multiplier; logits are divided by logits_scaling. The residual stream is kept divided by r here, so that
nothing multiplies what a layer adds: norms give the same with eps / r².
"""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec, LayerSpec
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """attention_bias applies to queries, keys, values and the output."""
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    layer = LayerSpec(
        attention=attention(
            fields,
            rope_spec(fields),
            scale=fields.positive_float("attention_multiplier", 1.0),
            bias=bias,
            out_bias=bias,
        ),
        feed_forward=dense(fields, bias=fields.flag("mlp_bias", False)),
    )
    residual = fields.positive_float("residual_multiplier", 1.0)
    return decoder(
        fields,
        (layer,) * fields.num_layers(),
        rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6) / residual**2,
        embedding_scale=fields.positive_float("embedding_multiplier", 1.0) / residual,
        logit_scale=1 / fields.positive_float("logits_scaling", 1.0),
    )
