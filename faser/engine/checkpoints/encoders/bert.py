"""BERT (arXiv:1810.04805): learned positions and token types, norms behind attention and network.

RoBERTa (arXiv:1907.11692) and XLM-RoBERTa (arXiv:1911.02116) are BERT whose positions begin behind the padding's.
"""

from collections.abc import Mapping
from dataclasses import replace
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
from faser.types.pooling import PoolingKind

_EPS = 1e-12
_NAMES = EncoderNames(
    word="embeddings.word_embeddings",
    position="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layer="encoder.layer.{}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    attention_out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    network_norm="output.LayerNorm",
)
_HEAD = ClassifierSpec(kind=PoolingKind.CLS, dense="pooler.dense", activation=None, out="classifier")
_ROBERTA_HEAD = replace(_HEAD, dense="classifier.dense", out="classifier.out_proj")
_PADDING = 1


def _bert(config: Mapping[str, Any]) -> EncoderSpec:
    return _spec(config, first_position=0, head=_HEAD)


def _roberta(config: Mapping[str, Any]) -> EncoderSpec:
    padding = encoder_fields(config).non_negative_int("pad_token_id", _PADDING)
    return _spec(config, first_position=padding + 1, head=_ROBERTA_HEAD)


def _spec(config: Mapping[str, Any], *, first_position: int, head: ClassifierSpec) -> EncoderSpec:
    """Return the encoder of BERT's fields. first_position: row of the position table that the first token has."""
    fields = encoder_fields(config)
    fields.expect("position_embedding_type", ("absolute",), "only absolute positions are supported")
    fields.expect("add_cross_attention", (False,), "cross attention is not supported")
    hidden_size, num_heads = fields.positive_int("hidden_size"), fields.positive_int("num_attention_heads")
    check_heads(hidden_size, num_heads)
    return EncoderSpec(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=fields.positive_int("intermediate_size"),
        max_position_embeddings=fields.positive_int("max_position_embeddings") - first_position,
        layers=(EncoderLayer(),) * fields.num_layers(),
        activation=activation_of(config, "hidden_act", "gelu"),
        norm_eps=fields.positive_float("layer_norm_eps", _EPS),
        names=_NAMES,
        first_position=first_position,
        num_types=fields.positive_int("type_vocab_size", 2),
        ignored=("pooler.", "cls.", "lm_head.", "embeddings.position_ids"),
        classifier=head,
    )


FAMILIES = (
    EncoderFamily(
        name="BERT",
        model_type="bert",
        architecture="BertModel",
        to_spec=_bert,
        prefix="bert.",
        classifier="BertForSequenceClassification",
        masked="BertForMaskedLM",
        examples=(
            "sentence-transformers/all-MiniLM-L6-v2",
            "BAAI/bge-small-en-v1.5",
            "intfloat/e5-base-v2",
            "thenlper/gte-base",
            "cross-encoder/ms-marco-MiniLM-L6-v2",
        ),
        files=("all-MiniLM-L6-v2: float32",),
    ),
    EncoderFamily(
        name="XLM-RoBERTa",
        model_type="xlm-roberta",
        architecture="XLMRobertaModel",
        to_spec=_roberta,
        prefix="roberta.",
        classifier="XLMRobertaForSequenceClassification",
        masked="XLMRobertaForMaskedLM",
        examples=(
            "intfloat/multilingual-e5-small",
            "BAAI/bge-m3",
            "BAAI/bge-reranker-v2-m3",
            "Snowflake/snowflake-arctic-embed-l-v2.0",
        ),
        note="Of bge-m3 the dense vectors are served; its sparse and multiple vectors are not",
    ),
    EncoderFamily(
        name="RoBERTa",
        model_type="roberta",
        architecture="RobertaModel",
        to_spec=_roberta,
        prefix="roberta.",
        classifier="RobertaForSequenceClassification",
        masked="RobertaForMaskedLM",
        examples=("sentence-transformers/all-distilroberta-v1", "sentence-transformers/all-roberta-large-v1"),
    ),
)
