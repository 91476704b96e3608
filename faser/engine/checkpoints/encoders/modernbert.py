"""ModernBERT (arXiv:2412.13663): rotary positions, gated networks, norms before; most layers attend locally."""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.encoders.spec import (
    ClassifierSpec,
    EncoderFamily,
    EncoderLayer,
    EncoderNames,
    EncoderSpec,
    activation_of,
    check_heads,
    encoder_fields,
)
from faser.engine.checkpoints.families.fields import Fields, rope_spec
from faser.errors import ModelError
from faser.types.pooling import PoolingKind

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_THETAS = {_GLOBAL: ("global_rope_theta", 160_000.0), _LOCAL: ("local_rope_theta", 10_000.0)}
_EVERY = 3  # of as many layers the first one attends to all positions
_NAMES = EncoderNames(
    word="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    layer="layers.{}.",
    qkv=("attn.Wqkv",),
    attention_out="attn.Wo",
    attention_norm="attn_norm",
    up=("mlp.Wi",),
    down="mlp.Wo",
    network_norm="mlp_norm",
    last_norm="final_norm",
)


def spec(config: Mapping[str, Any]) -> EncoderSpec:
    fields = encoder_fields(config)
    hidden_size, num_heads = fields.positive_int("hidden_size"), fields.positive_int("num_attention_heads")
    check_heads(hidden_size, num_heads)
    attention_bias, network_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    return EncoderSpec(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=fields.positive_int("intermediate_size"),
        max_position_embeddings=fields.positive_int("max_position_embeddings"),
        layers=_layers(fields),
        activation=activation_of(config, "hidden_activation", "gelu"),
        norm_eps=fields.positive_float("norm_eps", 1e-5),
        names=_NAMES,
        gated=True,
        pre_norm=True,
        norm_bias=fields.flag("norm_bias", False),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        up_bias=network_bias,
        down_bias=network_bias,
        ignored=("head.", "decoder."),
        classifier=_head(config, fields),
    )


def _layers(fields: Fields) -> tuple[EncoderLayer, ...]:
    """Return the layers, of which every third or those that layer_types names see everything."""
    count, every = fields.num_layers(), fields.positive_int("global_attn_every_n_layers", _EVERY)
    types = fields.optional_list("layer_types", count)
    types = types or [_LOCAL if number % every else _GLOBAL for number in range(count)]
    if unknown := [each for each in types if each not in _THETAS]:
        raise ModelError(f"config.json: layer_types has {unknown[0]!r}; supported are {_GLOBAL} and {_LOCAL}")
    ropes = {}
    for name, (field, default) in _THETAS.items():
        theta = fields.positive_float(field, default)
        ropes[name] = rope_spec(fields, default_theta=theta, layer_type=name)
    reaches = {_GLOBAL: None, _LOCAL: fields.positive_int("local_attention", 128) // 2}
    return tuple(
        EncoderLayer(rope=ropes[each], reach=reaches[each], has_norm=number > 0)
        for number, each in enumerate(types)
    )


def _head(config: Mapping[str, Any], fields: Fields) -> ClassifierSpec:
    kinds = {"cls": PoolingKind.CLS, "mean": PoolingKind.MEAN}
    kind = config.get("classifier_pooling") or "cls"
    if kind not in kinds:
        raise ModelError(f"config.json: classifier_pooling is {kind!r}; supported are {', '.join(kinds)}")
    return ClassifierSpec(
        kind=kinds[kind],
        dense="head.dense",
        activation=activation_of(config, "classifier_activation", "gelu"),
        norm="head.norm",
        out="classifier",
        dense_bias=fields.flag("classifier_bias", False),
    )


FAMILIES = (
    EncoderFamily(
        name="ModernBERT",
        model_type="modernbert",
        architecture="ModernBertModel",
        to_spec=spec,
        prefix="model.",
        classifier="ModernBertForSequenceClassification",
        masked="ModernBertForMaskedLM",
        examples=(
            "Alibaba-NLP/gte-modernbert-base",
            "nomic-ai/modernbert-embed-base",
            "Alibaba-NLP/gte-reranker-modernbert-base",
        ),
    ),
)
