"""SmolLM3: a Llama of which some layers have no rotary embedding; the same layers may have a sliding window."""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.fields import Fields, rope_spec

_DEFAULT_THETA = 2_000_000.0
_DEFAULT_INTERVAL = 4


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """attention_bias applies to queries, keys, values and the output."""
    fields = Fields(config)
    num_layers = fields.num_layers()
    num_heads = fields.positive_int("num_attention_heads")
    attention_bias = fields.flag("attention_bias", False)
    rotary = _rotary(fields, num_layers)
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
        rope=rope_spec(fields, default_theta=_DEFAULT_THETA),
        windows=fields.windows(_windows(fields, rotary)),
        rotary=rotary,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        attention_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _rotary(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """no_rope_layers has, despite its name, 1 for a layer with rope. By default every fourth layer has none."""
    listed = fields.optional_list("no_rope_layers", num_layers)
    if listed is not None:
        return tuple(bool(each) for each in listed)
    interval = fields.positive_int("no_rope_layer_interval", _DEFAULT_INTERVAL)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def _windows(fields: Fields, rotary: tuple[bool, ...]) -> tuple[int | None, ...]:
    if not fields.flag("use_sliding_window", False):
        return (None,) * len(rotary)
    window = fields.optional_int("sliding_window")
    return tuple(None if rotates else window for rotates in rotary)
