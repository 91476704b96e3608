"""Phi-3, Phi-4, Phi-4-mini: fused products, heads that rotate in part, longrope."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.families.architecture import DecoderSpec, LayerSpec, TensorNames
from faser.engine.checkpoints.families.family import Config, Family, GgufArchitecture
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec, windowed

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile

_OLD_NAMES = ("su", "yarn")  # of longrope


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields({"rms_norm_eps": 1e-5} | _renamed(config))
    layer = LayerSpec(attention=attention(fields, rope_spec(fields)), feed_forward=dense(fields))
    window = fields.optional_int("sliding_window")
    layers = windowed(layer, fields.windows((window,) * fields.num_layers()))
    return decoder(fields, layers, names=TensorNames(fused_qkv=True, gate_up=("mlp.gate_up_proj",)))


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the name longrope in place of those of the first configs."""
    found = dict(config)
    for field in ("rope_scaling", "rope_parameters"):
        given = config.get(field)
        if isinstance(given, dict) and given.get("rope_type", given.get("type")) in _OLD_NAMES:
            found[field] = {**given, "rope_type": "longrope"}
    return found


_PHI3 = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


def _phi3_fields(file: "GgufFile", _config: Config) -> Config:
    """A window of 0, or none, is no window: so the converter marks Phi-4."""
    return {"sliding_window": file.get("phi3.attention.sliding_window", int) or None}


GGUF: Mapping[str, GgufArchitecture] = {
    "phi3": GgufArchitecture(
        class_name="Phi3ForCausalLM",
        model_type="phi3",
        tensors=_PHI3,
        partial_rotary=True,
        windows=True,
        own_fields=_phi3_fields,
    ),
}
FAMILIES = (
    Family(
        name="Phi-3",
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        to_spec=spec,
        tool_parsers=("phi4_mini_json",),
        examples=("microsoft/Phi-3-mini-4k-instruct", "microsoft/phi-4", "microsoft/Phi-4-mini-instruct"),
        gguf=("phi3",),
    ),
)
