"""Directories whose config.json is that of a one-layer decoder, with the head's fields beside it.

    LlamaForCausalLMEagle3, Eagle3LlamaForCausalLM   EAGLE-3: fc, midlayer.* (or layers.0.*), norm, lm_head, d2t,
    Eagle3Qwen3ForCausalLM                           t2d; perhaps embed_tokens
    LlamaForCausalLM with draft_vocab_size           the same, as the authors of EAGLE-3 publish it
    EagleLlamaForCausalLM, or model_type eagle       EAGLE: fc, layers.0.*; perhaps embed_tokens and lm_head
    LlamaForCausalLM                                 the same, as the authors of EAGLE publish it

The last of them is described like a target, so the operator has to name the method. A config of model_type eagle
may describe the layers within `model`.
"""

from collections.abc import Mapping
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.fields import Fields
from faser.engine.checkpoints.heads import layers
from faser.engine.checkpoints.heads.head_spec import HeadKind, HeadSpec
from faser.engine.checkpoints.heads.refused import refuse_architecture, refuse_parallel
from faser.engine.checkpoints.quantized import stored_quantization
from faser.errors import ModelError

_EAGLE3_FAMILY = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
}


_EAGLE = ("EagleLlamaForCausalLM", "EAGLEModel", "EAGLE")


def head_kind(config: Mapping[str, Any]) -> HeadKind | None:
    """None: the architecture is that of a target. Raises ModelError for a refused head, with the reason."""
    architecture = _architecture(config)
    if architecture in _EAGLE or config.get("model_type") == "eagle":
        return HeadKind.EAGLE
    if architecture not in _EAGLE3_FAMILY:
        refuse_architecture(architecture)
        if config.get("draft_vocab_size") is None:
            return None
    refuse_parallel(config)
    return HeadKind.EAGLE3


def head_spec(config: Mapping[str, Any], kind: HeadKind, target: DecoderSpec) -> HeadSpec:
    """Raises ModelError that names an unusable field, or both values where the head does not fit the target."""
    return _eagle(config, target) if kind is HeadKind.EAGLE else _eagle3(config, target)


def _eagle(config: Mapping[str, Any], target: DecoderSpec) -> HeadSpec:
    """The states are the target's last ones; what the head gives out is of their width."""
    fields = Fields(config)
    layers.refuse_logit_scale(fields)
    layer_config = fields.optional_dict("model") or config
    decoder = layers.layers_spec(layer_config, target, family="llama")
    layers.refuse_truncated_vocabulary(fields, target)
    return HeadSpec(
        kind=HeadKind.EAGLE,
        decoder=decoder,
        draft_vocab_size=decoder.vocab_size,
        target_hidden_size=layers.target_hidden_size(Fields(layer_config), decoder, target),
        state_layers=(target.num_layers,),
        states_are_normed=True,
        quantization=stored_quantization(config),
    )


def _eagle3(config: Mapping[str, Any], target: DecoderSpec) -> HeadSpec:
    """Fields in `eagle_config` come before those beside it, as in vLLM."""
    eagle_config = Fields(config).optional_dict("eagle_config") or {}
    merged = {**config, **{name: value for name, value in eagle_config.items() if value is not None}}
    fields = Fields(merged)
    if not fields.flag("use_aux_hidden_state", True):
        raise ModelError("config.json: use_aux_hidden_state is false; only heads that project states are computed")
    layers.refuse_logit_scale(fields)
    family = _EAGLE3_FAMILY.get(_architecture(config)) or str(config.get("model_type", "llama"))
    decoder = layers.layers_spec(config, target, family=family)
    state_layers = layers.state_layers(merged.get("eagle_aux_hidden_state_layer_ids") or None, target)
    stated = fields.positive_int("num_aux_hidden_states", len(state_layers))
    if stated != len(state_layers):
        raise ModelError(
            f"config.json: num_aux_hidden_states is {stated}, but the head reads the states of layers "
            f"{', '.join(map(str, state_layers))}; eagle_aux_hidden_state_layer_ids must name {stated}"
        )
    return HeadSpec(
        kind=HeadKind.EAGLE3,
        decoder=decoder,
        draft_vocab_size=layers.draft_vocab_size(fields, target),
        target_hidden_size=layers.target_hidden_size(fields, decoder, target),
        state_layers=state_layers,
        feature_norm=layers.feature_norm(
            fc_norm=fields.flag("fc_norm", False), norm_before_fc=fields.flag("norm_before_fc", False)
        ),
        norm_before_residual=fields.flag("norm_before_residual", False),
        norm_output=fields.flag("norm_output", False),
        quantization=stored_quantization(config),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or [""]
    return str(architectures[0])
