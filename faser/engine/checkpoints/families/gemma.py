"""Gemma 2 and Gemma 3: four norms a layer that multiply by 1 + w, a GELU gate, embeddings times √H.

Gemma 2 caps scores and logits; every second layer has a window. Gemma 3 normalises queries and keys; of six layers
five have a window, and a rotary embedding of their own.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.families.architecture import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    RopeSpec,
    TensorNames,
)
from faser.engine.checkpoints.families.family import LAYER, Config, Family, GgufArchitecture
from faser.engine.checkpoints.families.fields import Fields, attention, decoder, dense, rope_spec

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile

_HEAD_DIM = 256
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3 = {  # what the text halves of 4B to 27B leave out
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
_DEFAULT_WINDOW = 4096
_NAMES = TensorNames(
    norm_before_feed_forward="pre_feedforward_layernorm",
    norm_after_attention="post_attention_layernorm",
    norm_after_feed_forward="post_feedforward_layernorm",
)


def gemma2_spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(_GELU | _CAPS | dict(config))
    rope = rope_spec(fields, head_dim=fields.positive_int("head_dim", _HEAD_DIM))
    everywhere = _attention(fields, rope)
    window = _window(fields, config)
    return _decoder(fields, everywhere, replace(everywhere, window=window), period=2)


def gemma3_spec(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(_GELU | _GEMMA3 | dict(config))
    head_dim = fields.positive_int("head_dim", _HEAD_DIM)
    far = rope_spec(fields, default_theta=1_000_000.0, layer_type="full_attention", head_dim=head_dim)
    near_theta = fields.positive_float("rope_local_base_freq", 10_000.0)
    nested = {"rope_parameters": config.get("rope_parameters"), "head_dim": head_dim}
    near = rope_spec(Fields(nested), default_theta=near_theta, layer_type="sliding_attention")
    everywhere = _attention(fields, far, qk_norm=True)
    near_by = replace(everywhere, rope=near, window=_window(fields, config))
    return _decoder(fields, everywhere, near_by, period=fields.positive_int("sliding_window_pattern", 6))


def _window(fields: Fields, config: Mapping[str, Any]) -> int | None:
    return fields.optional_int("sliding_window") if "sliding_window" in config else _DEFAULT_WINDOW


def _attention(fields: Fields, rope: RopeSpec, **options: Any) -> AttentionSpec:
    return attention(
        fields,
        rope,
        head_dim=fields.positive_int("head_dim", _HEAD_DIM),
        scale=fields.positive_float("query_pre_attn_scalar", float(_HEAD_DIM)) ** -0.5,
        bias=fields.flag("attention_bias", False),
        out_bias=fields.flag("attention_bias", False),
        score_cap=fields.optional_float("attn_logit_softcapping"),
        **options,
    )


def _decoder(fields: Fields, everywhere: AttentionSpec, near_by: AttentionSpec, *, period: int) -> DecoderSpec:
    """period: where layer_types are not listed, each layer whose number is a multiple of it attends everywhere."""
    num_layers = fields.num_layers()
    listed = fields.layer_types(num_layers)
    usual = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]
    feed_forward = dense(fields)
    layers = [
        LayerSpec(
            attention=near_by if layer_type == "sliding_attention" else everywhere,
            feed_forward=feed_forward,
            norms_after=True,
        )
        for layer_type in listed or usual
    ]
    return decoder(
        fields,
        layers,
        tied=True,
        embedding_scale=fields.positive_int("hidden_size") ** 0.5,
        logit_cap=fields.optional_float("final_logit_softcapping"),
        plus_one=True,
        names=_NAMES,
    )


TENSORS = LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# The number of layers of the 27B models, which scale scores by the hidden size a head, not by the head's width.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_GEMMA3_PERIOD = 6


def _gemma2_fields(file: "GgufFile", config: Config) -> Config:
    return _gemma_fields("gemma2", config) | {
        "sliding_window": file.size("gemma2.attention.sliding_window"),
        "attn_logit_softcapping": file.number("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("gemma2.final_logit_softcapping", 30.0),
    }


def _gemma3_fields(file: "GgufFile", config: Config) -> Config:
    """Without a window, every layer attends everywhere and rotates as the global ones do."""
    window = file.get("gemma3.attention.sliding_window", int) or None
    pattern = file.get("gemma3.attention.sliding_window_pattern", int, _GEMMA3_PERIOD)
    return _gemma_fields("gemma3", config) | {
        "sliding_window": window,
        "sliding_window_pattern": pattern if window else 1,
        "rope_local_base_freq": file.number("gemma3.rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": file.number("gemma3.final_logit_softcapping", 0.0) or None,
    }


def _gemma_fields(architecture: str, config: Config) -> Config:
    """The scale of the scores is not stored; it follows from the sizes."""
    of_27b = config["num_hidden_layers"] == _LAYERS_OF_27B[architecture]
    share = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": share if of_27b else config["head_dim"],
    }


GGUF: Mapping[str, GgufArchitecture] = {
    "gemma2": GgufArchitecture(
        class_name="Gemma2ForCausalLM",
        model_type="gemma2",
        tensors=TENSORS,
        plus_one=True,
        windows=True,
        own_fields=_gemma2_fields,
    ),
    "gemma3": GgufArchitecture(
        class_name="Gemma3ForCausalLM",
        model_type="gemma3_text",
        tensors=TENSORS,
        plus_one=True,
        windows=True,
        own_fields=_gemma3_fields,
    ),
}
FAMILIES = (
    Family(
        name="Gemma 2",
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        to_spec=gemma2_spec,
        tool_parsers=(),
        examples=("google/gemma-2-2b-it", "google/gemma-2-9b-it"),
        gguf=("gemma2",),
    ),
    Family(
        name="Gemma 3",
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        to_spec=gemma3_spec,
        tool_parsers=(),
        examples=("google/gemma-3-270m-it", "google/gemma-3-1b-it"),
        gguf=("gemma3",),
        note="From 4B on they also read images (Gemma3ForConditionalGeneration): their text half loads.",
    ),
)
