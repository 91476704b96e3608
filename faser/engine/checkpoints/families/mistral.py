"""Mistral 7B, Mistral Small, Ministral, Devstral: no biases; one sliding window for all layers, or none.

Ministral 3 also multiplies its rotated queries by a number that grows with the position.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.families.architecture import DecoderSpec, LayerSpec, QueryGrowth, RopeSpec
from faser.engine.checkpoints.families.family import Config, Family, GgufArchitecture
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec, windowed
from faser.errors import ModelError

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile

_DEFAULT_WINDOW = 4096
_MINISTRAL3 = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """A config without sliding_window has the window of the first Mistral; null means no window."""
    fields = Fields(config)
    window = fields.optional_int("sliding_window") if "sliding_window" in config else _DEFAULT_WINDOW
    return _decoder(fields, rope_spec(fields), window)


def ministral3_spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(_MINISTRAL3 | dict(config))
    rope = rope_spec(fields)
    given = Fields(fields.optional_dict("rope_scaling") or fields.optional_dict("rope_parameters") or {})
    beta = given.optional_float("llama_4_scaling_beta")
    if beta:
        growth = QueryGrowth(beta=beta, original_positions=given.positive_int("original_max_position_embeddings"))
        rope = replace(rope, query_growth=growth)
    return _decoder(fields, rope, fields.optional_int("sliding_window"))


def _decoder(fields: Fields, rope: RopeSpec, window: int | None) -> DecoderSpec:
    layer = LayerSpec(attention=attention(fields, rope), feed_forward=dense(fields))
    return decoder(fields, windowed(layer, fields.windows((window,) * fields.num_layers())))


def _mistral3_fields(file: "GgufFile", config: Config) -> Config:
    """Ministral 3 if queries grow with the position, else Mistral Small 3.x."""
    beta = file.number("mistral3.attention.temperature_scale", 0.0)
    plain = {"sliding_window": file.get("mistral3.attention.sliding_window", int) or None}
    if not beta:
        return plain
    scaling = config["rope_scaling"] or {}
    if scaling.get("rope_type") != "yarn":
        raise ModelError(
            f"{file.path}: mistral3.attention.temperature_scale is {beta:g} without yarn; it is not supported"
        )
    original = scaling["original_max_position_embeddings"]
    length = file.get("mistral3.attention.temperature_length", int) or original
    if length != original:
        raise ModelError(
            f"{file.path}: mistral3.attention.temperature_length is {length}; only the original context length, "
            f"{original}, is supported"
        )
    ministral = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    return plain | ministral | {"rope_scaling": scaling | {"llama_4_scaling_beta": beta}}


GGUF: Mapping[str, GgufArchitecture] = {
    "mistral3": GgufArchitecture(
        class_name="MistralForCausalLM",
        model_type="mistral",
        permuted=True,
        windows=True,
        own_fields=_mistral3_fields,
    ),
}
FAMILIES = (
    Family(
        name="Mistral",
        model_type="mistral",
        architecture="MistralForCausalLM",
        to_spec=spec,
        tool_parsers=("mistral",),
        examples=("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-Nemo-Instruct-2407"),
        gguf=("llama", "mistral3"),
    ),
    Family(
        name="Ministral 3",
        model_type="ministral3",
        architecture="Ministral3ForCausalLM",
        to_spec=ministral3_spec,
        tool_parsers=("mistral",),
        examples=("mistralai/Devstral-2-123B-Instruct-2512",),
        gguf=("mistral3",),
        note="Checkpoints that also read images (Mistral3ForConditionalGeneration) load as their text half.",
    ),
)
