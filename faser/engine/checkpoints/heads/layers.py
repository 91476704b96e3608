"""The fields that every layout shares: the head's layers, its vocabulary, and how both fit the target."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.fields import Fields
from faser.engine.checkpoints.heads.head_spec import FeatureNorm
from faser.errors import ModelError

_FAMILIES = ("llama", "qwen3")


def layers_spec(config: Mapping[str, Any], target: DecoderSpec, *, family: str) -> DecoderSpec:
    """The head's layers. config: that of the layers; where it lacks a vocabulary size, the target's is meant.

    max_position_embeddings of a head is not a limit: its rotary embedding is relative.
    Raises ModelError for an unknown family, or for a vocabulary other than the target's.
    """
    if family not in _FAMILIES:
        raise ModelError(
            f"config.json: model_type of the head is {family!r}; only {', '.join(_FAMILIES)} are read"
        )
    given = {name: value for name, value in config.items() if value is not None}
    fields = {"max_position_embeddings": target.max_position_embeddings, "vocab_size": target.vocab_size} | given
    spec = decoder_spec(fields | {"architectures": [], "model_type": family, "tie_word_embeddings": False})
    spec = dataclasses.replace(spec, windows=Fields(fields).windows(spec.windows))
    if spec.vocab_size != target.vocab_size:
        raise ModelError(
            f"the head was made for a vocabulary of {spec.vocab_size} tokens; the model has {target.vocab_size}"
        )
    return spec


def target_hidden_size(fields: Fields, layers: DecoderSpec, target: DecoderSpec) -> int:
    """The width of the target's states, as the head was made for. Raises ModelError if the target's differs."""
    stated = fields.positive_int("target_hidden_size", layers.hidden_size)
    if stated != target.hidden_size:
        raise ModelError(
            f"the head was made for hidden states of {stated} values; those of the model have {target.hidden_size}"
        )
    return stated


def draft_vocab_size(fields: Fields, target: DecoderSpec) -> int:
    return fields.positive_int("draft_vocab_size", target.vocab_size)


def state_layers(listed: object, target: DecoderSpec) -> tuple[int, ...]:
    """Which layers' inputs the head reads, ascending. listed: the field of the config; None: it has none.

    The default, (2, half, three before the end), is EAGLE-3's (arXiv 2503.01840) and vLLM's.
    Raises ModelError for a layer that the target does not have, or that is named twice.
    """
    count = target.num_layers
    if listed is None:
        default = (2, count // 2, count - 3)
        if sorted(set(default)) != list(default):
            raise ModelError(
                f"the head does not name the layers whose states it reads, and {count} layers are too few for "
                "the usual ones (the third, the middle one, the third from the end)"
            )
        return default
    if not isinstance(listed, list) or not listed or not all(type(each) is int for each in listed):
        raise ModelError(f"eagle_aux_hidden_state_layer_ids is {listed!r}; it must be a list of integers")
    if outside := [each for each in listed if not 0 <= each <= count]:
        raise ModelError(
            f"eagle_aux_hidden_state_layer_ids names layer {outside[0]}; the model has layers 0 to {count - 1}, "
            f"and {count} stands for the output of the last one"
        )
    if len(set(listed)) < len(listed):
        raise ModelError(f"eagle_aux_hidden_state_layer_ids is {listed}; it names a layer twice")
    return tuple(sorted(listed))


def feature_norm(*, fc_norm: bool, norm_before_fc: bool) -> FeatureNorm:
    if fc_norm and norm_before_fc:
        raise ModelError("fc_norm and norm_before_fc are both true; a head has one of them")
    return FeatureNorm.EACH if fc_norm else FeatureNorm.TOGETHER if norm_before_fc else FeatureNorm.NONE


def refuse_logit_scale(fields: Fields) -> None:
    if (scale := fields.positive_float("logit_scale", 1.0)) != 1.0:
        raise ModelError(f"logit_scale of the head is {scale}; only 1 is computed")


def refuse_truncated_vocabulary(fields: Fields, target: DecoderSpec) -> None:
    truncated = fields.positive_int("truncated_vocab_size", target.vocab_size)
    if truncated != target.vocab_size:
        raise ModelError(
            f"config.json: truncated_vocab_size is {truncated}; heads of this kind are computed with all "
            f"{target.vocab_size} tokens only"
        )
