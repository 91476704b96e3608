"""Muse Glimmer: of four layers three have a window and rotate, the fourth attends everywhere and does not.

Query and key heads are normalised without weights, queries then multiplied by qk_scale_factor; what attention
gives is multiplied by σ of a gate. Norms of layers multiply by 1 + w, those behind attention and network have an
epsilon of their own, and embeddings are normalised without weights. Logits are multiplied, then capped.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.families import gemma
from faser.engine.checkpoints.families.architecture import DecoderSpec, LayerSpec, TensorNames
from faser.engine.checkpoints.families.family import Config, Family, GgufArchitecture
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile

_NEAR, _FAR = "sliding_attention", "full_attention"
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 202_048,
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
    "output_multiplier": 0.19611613513818404,
}
_NAMES = TensorNames(
    norm_before_feed_forward="pre_feedforward_layernorm",
    norm_after_attention="post_attention_layernorm",
    norm_after_feed_forward="post_feedforward_layernorm",
    attention_gate="self_attn.gate_proj",
)


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """layer_rope_theta: 0 in layers that do not rotate; without it, and without layer_types, every fourth."""
    fields = Fields(_DEFAULTS | {name: value for name, value in config.items() if value is not None})
    num_layers, bias = fields.num_layers(), fields.flag("attention_bias", False)
    every_fourth = [_NEAR if (num_layers - 1 - layer) % 4 else _FAR for layer in range(num_layers)]
    thetas = fields.optional_list("layer_rope_theta", num_layers) or [each == _NEAR for each in every_fourth]
    rope, window = rope_spec(fields, default_theta=10_000.0), fields.positive_int("sliding_window")
    scale = fields.positive_float("qk_scale_factor", 3.87) * fields.head_dim() ** -0.5
    layers = [
        LayerSpec(
            attention=attention(
                fields,
                rope if theta else None,
                scale=scale,
                window=window if kind == _NEAR else None,
                bare_qk_norm=True,
                gated=True,
                bias=bias,
                out_bias=bias,
            ),
            feed_forward=dense(fields),
            norms_after=True,
        )
        for kind, theta in zip(fields.layer_types(num_layers) or every_fourth, thetas, strict=True)
    ]
    return decoder(
        fields,
        layers,
        logit_scale=fields.positive_float("output_multiplier"),
        logit_cap=fields.optional_float("final_logit_softcapping"),
        plus_one=True,
        plus_one_last=False,
        norm_after_eps=fields.positive_float("post_norm_eps", 1e-8),
        normed_embedding=True,
        names=_NAMES,
    )


_TENSORS = gemma.TENSORS | {"attn_gate": "self_attn.gate_proj"}


def _fields(file: "GgufFile", config: Config) -> Config:
    """The weights of the query norm are qk_scale_factor, which no key has; the epsilon behind parts is a
    constant."""
    name = "muse-glimmer"
    local = file.value(f"{name}.attention.sliding_window_pattern")
    if not isinstance(local, list):
        local = [(layer + 1) % local != 0 for layer in range(config["num_hidden_layers"])]
    return {
        "layer_types": [_NEAR if each else _FAR for each in local],
        "layer_rope_theta": [config["rope_theta"] if each else 0 for each in local],
        "sliding_window": file.size(f"{name}.attention.sliding_window"),
        "qk_scale_factor": float(file.array("blk.0.attn_q_norm.weight")[0]),
        "output_multiplier": file.number(f"{name}.logit_scale", 1.0),
        "final_logit_softcapping": file.number(f"{name}.final_logit_softcapping", 0.0) or None,
    }


GGUF: Mapping[str, GgufArchitecture] = {
    "muse-glimmer": GgufArchitecture(
        class_name="MuseGlimmerForCausalLM",
        model_type="muse_glimmer_text",
        tensors=_TENSORS,
        not_read=("attn_q_norm", "attn_k_norm"),
        permuted=True,
        plus_one=True,
        plus_one_last=False,
        windows=True,
        own_fields=_fields,
    ),
}
FAMILIES = (
    Family(
        name="Muse Glimmer",
        model_type="muse_glimmer_text",
        architecture="MuseGlimmerForCausalLM",
        to_spec=spec,
        tool_parsers=("muse_glimmer",),
        examples=("meta-models/Muse-Glimmer-30B",),
        gguf=("muse-glimmer",),
        note="The text half of MuseGlimmerForConditionalGeneration.",
    ),
)
