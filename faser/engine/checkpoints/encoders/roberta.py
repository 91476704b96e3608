"""RoBERTa (arXiv:1907.11692), XLM-RoBERTa (arXiv:1911.02116): BERT whose positions begin behind the padding's."""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.encoders.bert import bert_spec
from faser.engine.checkpoints.encoders.spec import ClassifierSpec, EncoderFamily, EncoderSpec, encoder_fields
from faser.types.pooling import PoolingKind

_PADDING = 1
_HEAD = ClassifierSpec(kind=PoolingKind.CLS, dense="classifier.dense", activation=None, out="classifier.out_proj")


def spec(config: Mapping[str, Any]) -> EncoderSpec:
    padding = encoder_fields(config).non_negative_int("pad_token_id", _PADDING)
    return bert_spec(config, first_position=padding + 1, head=_HEAD)


FAMILIES = (
    EncoderFamily(
        name="XLM-RoBERTa",
        model_type="xlm-roberta",
        architecture="XLMRobertaModel",
        to_spec=spec,
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
        to_spec=spec,
        prefix="roberta.",
        classifier="RobertaForSequenceClassification",
        masked="RobertaForMaskedLM",
        examples=("sentence-transformers/all-distilroberta-v1", "sentence-transformers/all-roberta-large-v1"),
    ),
)
