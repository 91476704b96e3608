"""Qwen2 and Qwen2.5: biases on queries, keys and values; optional sliding windows from some layer on."""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.fields import Fields, rope_spec

_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config)
    num_layers = fields.num_layers()
    num_heads = fields.positive_int("num_attention_heads")
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
        windows=fields.windows(late_windows(config, fields, num_layers)),
        rotary=(True,) * num_layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=True,
    )


def late_windows(config: Mapping[str, Any], fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Windows for the layers from max_window_layers on, if use_sliding_window is true.

    layer    0 ....... max_window_layers ....... num_layers
    sees     |  everything  |  sliding_window positions  |
    """
    if not fields.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = fields.optional_int("sliding_window") if "sliding_window" in config else _DEFAULT_WINDOW
    num_full = min(fields.non_negative_int("max_window_layers", _DEFAULT_FULL_LAYERS), num_layers)
    return (None,) * num_full + (window,) * (num_layers - num_full)
