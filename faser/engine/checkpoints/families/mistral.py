"""Mistral 7B and models of the same architecture: one sliding window for all layers, or none; no biases."""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.fields import Fields, rope_spec

_DEFAULT_WINDOW = 4096


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """A config without sliding_window has the window of the first Mistral; null means no window."""
    fields = Fields(config)
    num_layers = fields.num_layers()
    num_heads = fields.positive_int("num_attention_heads")
    window = fields.optional_int("sliding_window") if "sliding_window" in config else _DEFAULT_WINDOW
    return DecoderSpec(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
        head_dim=fields.head_dim(),
        rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.positive_int("max_position_embeddings"),
        rope=rope_spec(fields),
        windows=fields.windows((window,) * num_layers),
        rotary=(True,) * num_layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
    )
