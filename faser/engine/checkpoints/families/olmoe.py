"""OLMoE (1B-7B): a mixture of experts in every layer; a norm of all queries of a token, and of all its keys."""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec, ExpertsSpec, LayerSpec
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, rope_spec


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields({"rms_norm_eps": 1e-5, "intermediate_size": 2048} | dict(config))
    fields.expect("clip_qkv", (), "queries, keys and values that are cut off are not supported")
    bias = fields.flag("attention_bias", False)
    layer = LayerSpec(
        attention=attention(fields, rope_spec(fields), wide_qk_norm=True, bias=bias, out_bias=bias),
        feed_forward=ExpertsSpec(
            num_experts=fields.positive_int("num_experts", 64),
            top_k=fields.positive_int("num_experts_per_tok", 8),
            size=fields.positive_int("intermediate_size"),
            renormalise=fields.flag("norm_topk_prob", False),
            activation=fields.activation(),
        ),
    )
    return decoder(fields, (layer,) * fields.num_layers())
