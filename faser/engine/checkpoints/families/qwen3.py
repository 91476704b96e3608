"""Qwen3, dense: every query and key head is normalised before the rotation; head_dim is a field of its own."""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec, LayerSpec
from faser.engine.checkpoints.families.family import Family, GgufArchitecture
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec, windowed
from faser.engine.checkpoints.families.qwen2 import late_windows

_DEFAULT_HEAD_DIM = 128


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """attention_bias applies to queries, keys, values and the output."""
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    head_dim = fields.positive_int("head_dim", _DEFAULT_HEAD_DIM)
    rope = rope_spec(fields, head_dim=head_dim)
    layer = LayerSpec(
        attention=attention(fields, rope, head_dim=head_dim, qk_norm=True, bias=bias, out_bias=bias),
        feed_forward=dense(fields),
    )
    return decoder(fields, windowed(layer, late_windows(config, fields)))


GGUF: Mapping[str, GgufArchitecture] = {
    "qwen3": GgufArchitecture(class_name="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen3vl": GgufArchitecture(class_name="Qwen3ForCausalLM", model_type="qwen3"),
}
FAMILIES = (
    Family(
        name="Qwen3",
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        to_spec=spec,
        tool_parsers=("hermes",),
        examples=("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B-Instruct-2507"),
        gguf=("qwen3", "qwen3vl"),
    ),
)
