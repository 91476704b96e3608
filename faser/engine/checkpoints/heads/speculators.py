"""Directories in the format of the `speculators` library (vllm-project/speculators).

    config.json              speculators_model_type, speculators_config {algorithm, proposal_methods, verifier},
                             transformer_layer_config, draft_vocab_size, eagle_aux_hidden_state_layer_ids,
                             norm_before_residual, norm_before_fc, fc_norm, norm_output, target_hidden_size
    model.safetensors        fc.weight, layers.0.*, norm.weight, lm_head.weight, d2t, t2d; perhaps embed_tokens

Defaults of fields are those of vLLM's reader, where they differ from the library's: the library writes them all.
"""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.fields import Fields
from faser.engine.checkpoints.heads import layers
from faser.engine.checkpoints.heads.head_spec import HeadKind, HeadSpec
from faser.engine.checkpoints.heads.refused import refuse_kind
from faser.engine.checkpoints.quantized import stored_quantization
from faser.errors import ModelError

_KIND = "speculators_model_type"


def is_speculators(config: Mapping[str, Any]) -> bool:
    return _KIND in config


def head_kind(config: Mapping[str, Any]) -> HeadKind:
    """Raises ModelError for a kind that is refused, with the reason, or unknown."""
    stated = config[_KIND]
    if stated != HeadKind.EAGLE3:
        refuse_kind(stated)
        raise ModelError(f"config.json: {_KIND} is {stated!r}; only {HeadKind.EAGLE3} is read")
    return HeadKind.EAGLE3


def head_spec(config: Mapping[str, Any], kind: HeadKind, target: DecoderSpec) -> HeadSpec:
    fields = Fields(config)
    layer_config = fields.optional_dict("transformer_layer_config")
    if layer_config is None:
        raise ModelError("config.json: transformer_layer_config is missing; a speculators directory has one")
    decoder = layers.layers_spec(layer_config, target, family=str(layer_config.get("model_type", "llama")))
    algorithm = fields.optional_dict("speculators_config") or {}
    verifier = algorithm.get("verifier")
    return HeadSpec(
        kind=kind,
        decoder=decoder,
        draft_vocab_size=layers.draft_vocab_size(fields, target),
        target_hidden_size=layers.target_hidden_size(fields, decoder, target),
        state_layers=layers.state_layers(config.get("eagle_aux_hidden_state_layer_ids") or None, target),
        feature_norm=layers.feature_norm(
            fc_norm=fields.flag("fc_norm", False), norm_before_fc=fields.flag("norm_before_fc", False)
        ),
        norm_before_residual=fields.flag("norm_before_residual", True),
        norm_output=fields.flag("norm_output", False),
        num_draft_tokens=_num_draft_tokens(algorithm.get("proposal_methods")),
        target_name=verifier.get("name_or_path") if isinstance(verifier, dict) else None,
        quantization=stored_quantization(config),
    )


def _num_draft_tokens(methods: object) -> int | None:
    """speculative_tokens of the first proposal method."""
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        return None
    return Fields(methods[0]).optional_int("speculative_tokens")
