"""SmolLM3: a Llama of which some layers have no rotary embedding; the same layers may have a sliding window."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.families.architecture import DecoderSpec, LayerSpec
from faser.engine.checkpoints.families.family import Config, Family, GgufArchitecture
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile

_DEFAULT_THETA = 2_000_000.0
_DEFAULT_INTERVAL = 4


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """attention_bias applies to queries, keys, values and the output."""
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    rope = rope_spec(fields, default_theta=_DEFAULT_THETA)
    rotary = _rotary(fields)
    feed_forward = dense(fields, bias=fields.flag("mlp_bias", False))
    layers = [
        LayerSpec(
            attention=attention(fields, rope if rotates else None, window=window, bias=bias, out_bias=bias),
            feed_forward=feed_forward,
        )
        for rotates, window in zip(rotary, fields.windows(_windows(fields, rotary)), strict=True)
    ]
    return decoder(fields, layers, tied=True)


def _rotary(fields: Fields) -> tuple[bool, ...]:
    """no_rope_layers has, despite its name, 1 for a layer with rope. By default every fourth layer has none."""
    num_layers = fields.num_layers()
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


_SMOLLM3_ROPE_INTERVAL = 4


def _smollm3_fields(_file: "GgufFile", config: Config) -> Config:
    layers = range(1, config["num_hidden_layers"] + 1)
    return {"no_rope_layers": [int(layer % _SMOLLM3_ROPE_INTERVAL != 0) for layer in layers]}


GGUF: Mapping[str, GgufArchitecture] = {
    "smollm3": GgufArchitecture(
        class_name="SmolLM3ForCausalLM", model_type="smollm3", permuted=True, own_fields=_smollm3_fields
    ),
}
FAMILIES = (
    Family(
        name="SmolLM3",
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        to_spec=spec,
        tool_parsers=("hermes",),
        examples=("HuggingFaceTB/SmolLM3-3B",),
        gguf=("smollm3",),
    ),
)
