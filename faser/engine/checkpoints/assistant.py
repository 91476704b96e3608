"""Gemma 4's assistants: heads that attend to the target's own keys and values, and have none themselves.

config.json has model_type gemma4_assistant or gemma4_unified_assistant, backbone_hidden_size, text_config, and
perhaps use_ordered_embeddings with num_centroids and centroid_intermediate_top_k.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser.engine.checkpoints.families import gemma4
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.fields import Fields
from faser.engine.checkpoints.heads import HeadSpec
from faser.engine.checkpoints.quantized import stored_quantization
from faser.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Centroids:
    """A vocabulary in `count` groups of equal size; a row computes the logits of the best `top_k` alone."""

    count: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantSpec(HeadSpec):
    """An assistant. kv_layer of its layers: the target's layers. centroids: None: it computes all logits."""

    centroids: Centroids | None = None


def assistant_spec(config: Mapping[str, Any], target: DecoderSpec) -> AssistantSpec:
    """Read the assistant that config.json describes, for a target.

    Raises ModelError that names the field, or both values where the assistant does not fit the target.
    """
    fields = Fields(config)
    text = fields.optional_dict("text_config")
    if text is None:
        raise ModelError("config.json: text_config is missing; an assistant has one")
    if (width := fields.positive_int("backbone_hidden_size")) != target.hidden_size:
        raise ModelError(
            f"the assistant was made for hidden states of {width} values; those of the model have "
            f"{target.hidden_size}"
        )
    if (stored := stored_quantization(config)) is not None:
        raise ModelError(f"the assistant is quantised ({stored.method}); only 16 and 32 bits are read")
    decoder = gemma4.assistant_spec(text, target)
    if decoder.vocab_size != target.vocab_size:
        raise ModelError(
            f"the assistant was made for a vocabulary of {decoder.vocab_size} tokens; the model has "
            f"{target.vocab_size}"
        )
    centroids = None
    if fields.flag("use_ordered_embeddings", False):
        centroids = Centroids(
            count=fields.positive_int("num_centroids", 2048),
            top_k=fields.positive_int("centroid_intermediate_top_k", 32),
        )
        if decoder.vocab_size % centroids.count or centroids.top_k > centroids.count:
            raise ModelError(
                f"config.json: num_centroids is {centroids.count}, centroid_intermediate_top_k {centroids.top_k}; "
                f"the {decoder.vocab_size} tokens are divided evenly, and no more groups are chosen than there are"
            )
    return AssistantSpec(
        decoder=decoder,
        draft_vocab_size=decoder.vocab_size,
        target_hidden_size=target.hidden_size,
        state_layers=(target.num_layers,),
        norm_output=True,
        centroids=centroids,
    )
