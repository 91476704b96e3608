"""Qwen2 and Qwen2.5: biases on queries, keys and values; optional sliding windows from some layer on."""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec, LayerSpec
from faser.engine.checkpoints.families.family import Family, GgufArchitecture
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec, windowed

_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config)
    layer = LayerSpec(attention=attention(fields, rope_spec(fields), bias=True), feed_forward=dense(fields))
    return decoder(fields, windowed(layer, late_windows(config, fields)))


def late_windows(config: Mapping[str, Any], fields: Fields) -> tuple[int | None, ...]:
    """Return each layer's window. Layers from max_window_layers on have one, if use_sliding_window is true.

    layer    0 ....... max_window_layers ....... num_layers
    sees     |  everything  |  sliding_window positions  |
    """
    num_layers = fields.num_layers()
    if not fields.flag("use_sliding_window", False):
        return fields.windows((None,) * num_layers)
    window = fields.optional_int("sliding_window") if "sliding_window" in config else _DEFAULT_WINDOW
    num_full = min(fields.non_negative_int("max_window_layers", _DEFAULT_FULL_LAYERS), num_layers)
    return fields.windows((None,) * num_full + (window,) * (num_layers - num_full))


GGUF: Mapping[str, GgufArchitecture] = {
    "qwen2": GgufArchitecture(class_name="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen2vl": GgufArchitecture(class_name="Qwen2ForCausalLM", model_type="qwen2"),
}
FAMILIES = (
    Family(
        name="Qwen2",
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        to_spec=spec,
        tool_parsers=("hermes",),
        examples=("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-Coder-1.5B-Instruct"),
        gguf=("qwen2", "qwen2vl"),
        files=("Qwen2.5-Coder-1.5B: GGUF Q4_K_M",),
    ),
)
