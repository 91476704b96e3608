"""GLM-4: four norms a layer, gate and up in one tensor, half of a head rotates, in adjacent pairs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.families.architecture import DecoderSpec, LayerSpec, TensorNames
from faser.engine.checkpoints.families.family import LAYER, Config, Family, GgufArchitecture
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec
from faser.errors import ModelError

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile

_DEFAULTS = {"partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True}
_NAMES = TensorNames(
    norm_after_attention="post_self_attn_layernorm",
    norm_after_feed_forward="post_mlp_layernorm",
    gate_up=("mlp.gate_up_proj",),
)


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """attention_bias applies to queries, keys and values."""
    fields = Fields(_DEFAULTS | dict(config))
    layer = LayerSpec(
        attention=attention(
            fields, rope_spec(fields, interleaved=True), bias=fields.flag("attention_bias", False)
        ),
        feed_forward=dense(fields),
        norms_after=True,
    )
    return decoder(fields, (layer,) * fields.num_layers(), names=_NAMES)


_GLM4 = {name: hub for name, hub in LAYER.items() if name not in ("ffn_gate", "attn_q_norm", "attn_k_norm")} | {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}


def _glm4_fields(file: "GgufFile", _config: Config) -> Config:
    """The converter orders rows of q and k otherwise for the text half of GLM-4.1V, which rotates in sections."""
    if file.has("glm4.rope.dimension_sections"):
        raise ModelError(f"{file.path} has glm4.rope.dimension_sections; the text half of GLM-4V is not supported")
    return {}


GGUF: Mapping[str, GgufArchitecture] = {
    "glm4": GgufArchitecture(
        class_name="Glm4ForCausalLM",
        model_type="glm4",
        tensors=_GLM4,
        partial_rotary=True,
        own_fields=_glm4_fields,
    ),
}
FAMILIES = (
    Family(
        name="GLM-4",
        model_type="glm4",
        architecture="Glm4ForCausalLM",
        to_spec=spec,
        tool_parsers=("glm4",),
        examples=("zai-org/GLM-4-9B-0414", "zai-org/GLM-4-32B-0414"),
        gguf=("glm4",),
    ),
)
