"""Qwen3, dense: every query and key head is normalised before the rotation; head_dim is a field of its own."""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.fields import Fields, rope_spec
from faser.engine.checkpoints.families.qwen2 import late_windows

_DEFAULT_HEAD_DIM = 128


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """attention_bias applies to queries, keys, values and the output."""
    fields = Fields(config)
    num_layers = fields.num_layers()
    num_heads = fields.positive_int("num_attention_heads")
    attention_bias = fields.flag("attention_bias", False)
    return DecoderSpec(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
        head_dim=fields.positive_int("head_dim", _DEFAULT_HEAD_DIM),
        rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.positive_int("max_position_embeddings"),
        rope=rope_spec(fields),
        windows=fields.windows(late_windows(config, fields, num_layers)),
        rotary=(True,) * num_layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qk_norm=True,
        attention_bias=attention_bias,
        attention_out_bias=attention_bias,
    )
