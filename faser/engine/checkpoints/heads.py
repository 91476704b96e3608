"""HeadSpec: a head as plain values: its layers, its vocabulary, the target's states that it reads.

A head is a small model that drafts from the target's hidden states. Knows no tensors and no files.

The fields that every layout shares: the head's layers, its vocabulary, and how both fit the target.

The kinds of heads that FASER knows by name and does not compute, with the reason for each.

Directories whose config.json is that of a one-layer decoder, with the head's fields beside it.

    LlamaForCausalLMEagle3, Eagle3LlamaForCausalLM   EAGLE-3: fc, midlayer.* (or layers.0.*), norm, lm_head, d2t,
    Eagle3Qwen3ForCausalLM                           t2d; perhaps embed_tokens
    LlamaForCausalLM with draft_vocab_size           the same, as the authors of EAGLE-3 publish it
    EagleLlamaForCausalLM, or model_type eagle       EAGLE: fc, layers.0.*; perhaps embed_tokens and lm_head
    LlamaForCausalLM                                 the same, as the authors of EAGLE publish it

The last of them is described like a target, so the operator has to name the method. A config of model_type eagle
may describe the layers within `model`.

Directories in the format of the `speculators` library (vllm-project/speculators).

    config.json              speculators_model_type, speculators_config {algorithm, proposal_methods, verifier},
                             transformer_layer_config, draft_vocab_size, eagle_aux_hidden_state_layer_ids,
                             norm_before_residual, norm_before_fc, fc_norm, norm_output, target_hidden_size
    model.safetensors        fc.weight, layers.0.*, norm.weight, lm_head.weight, d2t, t2d; perhaps embed_tokens

Defaults of fields are those of vLLM's reader, where they differ from the library's: the library writes them all.

Reads the config.json of a head's directory, in any layout, for one target.

A `speculators` directory names its kind. The others are found by their architecture and fields; where these are a
target's (`LlamaForCausalLM`), by the method that the operator names, else by the names of the tensors.

untrainable: why a head cannot be trained further. `faser distill` makes heads that can.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from faser.config.refused_heads import REFUSED_HEADS
from faser.engine.checkpoints import heads as flat
from faser.engine.checkpoints import heads as layers
from faser.engine.checkpoints import heads as speculators
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.fields import Fields
from faser.engine.checkpoints.quantization.detection import stored_quantization
from faser.engine.checkpoints.quantization.stored import StoredFp8, StoredLowBit
from faser.engine.checkpoints.safetensors_names import tensor_names
from faser.errors import ModelError


class HeadKind(StrEnum):
    """The arithmetic of a head. Values are vLLM's names of the methods.

    EAGLE3: Li et al., arXiv 2503.01840.
    """

    EAGLE3 = "eagle3"


class FeatureNorm(StrEnum):
    """How the target's states are normalised before they are projected to features.

    EACH: every layer's states by a norm of their own (`fc_norm`). TOGETHER: the states of all layers by one norm
    (`norm_before_fc`).
    """

    NONE = "none"
    EACH = "fc_norm"
    TOGETHER = "norm_before_fc"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A head for one target. Checked when built: raises ModelError that names the value and the limit.

    decoder: the layers of the head. Its vocab_size is the target's, which embeddings have; it ties nothing. Medusa
        heads have none: this is the smallest that a cache can be of.
    draft_vocab_size: rows of the head's logits. target_hidden_size: width of a state.
    state_layers: the layers whose input the head reads, ascending: i is the residual stream at the input of the
        target's layer i, and the number of layers is the stream after the last one, before the final norm. This is
        the numbering of `eagle_aux_hidden_state_layer_ids` in vLLM and speculators (DFlash's `target_layer_ids`
        are one less). A row of states is the states of these layers, concatenated in this order.
    states_are_normed: features are computed from states after the target's final norm.
    norm_before_residual: the residual stream begins with the normalised features, else with the features.
    norm_output: the next row takes the normalised output, else the output before the norm.
    num_draft_tokens: how many tokens the checkpoint advises to draft; None: it does not say.
    max_draft_tokens: the longest draft that the head can make; None: of any length.
    medusa_blocks: blocks of each of the max_draft_tokens heads; 0: of another kind of head.
    target_name: of the model that the head was trained for; None: it does not say.
    quantization: of the stored weights; None: they are stored as floats of at least 16 bits.
    """

    kind: HeadKind
    decoder: DecoderSpec
    draft_vocab_size: int
    target_hidden_size: int
    state_layers: tuple[int, ...]
    states_are_normed: bool = False
    feature_norm: FeatureNorm = FeatureNorm.NONE
    norm_before_residual: bool = False
    norm_output: bool = False
    num_draft_tokens: int | None = None
    max_draft_tokens: int | None = None
    medusa_blocks: int = 0
    target_name: str | None = None
    quantization: StoredFp8 | StoredLowBit | None = None

    def __post_init__(self) -> None:
        if self.draft_vocab_size > self.decoder.vocab_size:
            raise ModelError(
                f"draft_vocab_size is {self.draft_vocab_size}; the target's vocabulary has "
                f"{self.decoder.vocab_size} tokens"
            )

    @property
    def hidden_size(self) -> int:
        """Width of the head's own stream, and of its features."""
        return self.decoder.hidden_size

    @property
    def states_size(self) -> int:
        """Width of a row of states, of all layers."""
        return len(self.state_layers) * self.target_hidden_size


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


# Endings and beginnings of architectures, and the kind of head that they stand for.
_ARCHITECTURES = {
    "DFlash2": "dflash2",
    "DFlash": "dflash",
    "DSpark": "dspark",
    "XPress": "dflash",
    "PEagle": "peagle",
    "Peagle": "peagle",
    "MLPSpeculator": "mlp_speculator",
    "Eagle3": "eagle3 of another family",
    "MTP": "mtp",
}


def refuse_kind(kind: object) -> None:
    """Raises ModelError with the reason if this kind of head is refused."""
    reason = REFUSED_HEADS.get(str(kind))
    if reason is not None:
        raise ModelError(f"the head is of kind {kind}, which is not supported: {reason}")


def refuse_architecture(architecture: str) -> None:
    """Raises ModelError with the reason if heads of this architecture are refused."""
    for part, kind in _ARCHITECTURES.items():
        if part in architecture:
            raise ModelError(f"architecture {architecture} of the head is not supported: {REFUSED_HEADS[kind]}")


def refuse_parallel(config: Mapping[str, Any]) -> None:
    """Raises ModelError for a head that drafts several positions in one pass."""
    for name in ("mask_token_id", "pard_token", "ptd_token_id"):
        if config.get(name) is not None:
            raise ModelError(
                f"config.json: {name} is {config[name]!r}, so it drafts in parallel, which is not supported: "
                f"{REFUSED_HEADS['peagle']}"
            )


_EAGLE3_FAMILY = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
}


_EAGLE = ("EagleLlamaForCausalLM", "EAGLEModel", "EAGLE")


def _flat_kind(config: Mapping[str, Any]) -> HeadKind | None:
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


def _flat_spec(config: Mapping[str, Any], kind: HeadKind, target: DecoderSpec) -> HeadSpec:
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


_KIND = "speculators_model_type"


def is_speculators(config: Mapping[str, Any]) -> bool:
    return _KIND in config


def _speculators_kind(config: Mapping[str, Any]) -> HeadKind:
    """Raises ModelError for a kind that is refused, with the reason, or unknown."""
    stated = config[_KIND]
    if stated != HeadKind.EAGLE3:
        refuse_kind(stated)
        raise ModelError(f"config.json: {_KIND} is {stated!r}; only {HeadKind.EAGLE3} is read")
    return HeadKind.EAGLE3


def _speculators_spec(config: Mapping[str, Any], kind: HeadKind, target: DecoderSpec) -> HeadSpec:
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


def read_head_spec(directory: Path, target: DecoderSpec, *, method: str | None = None) -> HeadSpec:
    """The head in a directory. method: what the operator calls it (a HeadKind's value); None: the files say it.

    Raises ModelError that names the file or the field; the reason why a kind of head is refused; or both values
    where the head does not fit the target.
    """
    config = _read(directory / "config.json")
    kind = _checked(head_kind(config), method) or _kind_by_tensors(directory)
    if kind is None:
        raise ModelError(
            f"{directory} does not say which kind of head it is; name it: "
            f'"method": {" or ".join(each.value for each in HeadKind)}'
        )
    if kind is HeadKind.MEDUSA:
        return medusa.head_spec(config, target)
    to_spec = speculators.head_spec if speculators.is_speculators(config) else flat.head_spec
    return to_spec(config, kind, target)


def kind_of_directory(directory: Path) -> HeadKind | None:
    """The kind of head that lies in a directory; None: a model does, or something else.

    Raises ModelError for a kind that is refused, with the reason.
    """
    path = directory / "config.json"
    return None if not path.is_file() else head_kind(_read(path)) or _kind_by_tensors(directory)


def head_kind(config: Mapping[str, Any]) -> HeadKind | None:
    """The kind of head that a config.json describes; None: that of no head, or it does not say which.

    Raises ModelError for a kind that is refused, with the reason.
    """
    if speculators.is_speculators(config):
        return speculators.head_kind(config)
    return HeadKind.MEDUSA if medusa.is_medusa(config) else flat.head_kind(config)


def _checked(found: HeadKind | None, method: str | None) -> HeadKind | None:
    """What the operator calls the head, or else what was found. Raises ModelError if they differ."""
    if method is not None and found not in (None, method):
        raise ModelError(f"method is {method}; the config.json of the head describes {found}")
    return found if method is None else HeadKind(method)


def _kind_by_tensors(directory: Path) -> HeadKind | None:
    """EAGLE's authors describe their heads like models; no model has a tensor fc."""
    names = tensor_names(directory)
    if not any(name.removeprefix("model.") == "fc.weight" for name in names):
        return None
    return HeadKind.EAGLE3 if any(name.endswith(".hidden_norm.weight") for name in names) else HeadKind.EAGLE


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; the directory of a head must have one") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} contains {type(value).__name__}; it must contain an object")
    return value


def untrainable(spec: HeadSpec, directory: Path) -> str | None:
    """What the head in directory has that a head in training has not; None: it can be trained."""
    decoder = spec.decoder
    has_biases = decoder.attention_bias or decoder.attention_out_bias or decoder.mlp_bias
    has_windows = any(window is not None for window in decoder.windows)
    reasons = {
        f"it is of the kind {spec.kind}, not {HeadKind.EAGLE3}": spec.kind is not HeadKind.EAGLE3,
        f"it has {decoder.num_layers} layers, not 1": decoder.num_layers != 1,
        f"it is {spec.hidden_size} values wide, its model {spec.target_hidden_size}": spec.hidden_size
        != spec.target_hidden_size,
        "its states have no norms of their own (fc_norm)": spec.feature_norm is not FeatureNorm.EACH,
        "norm_before_residual is false": not spec.norm_before_residual,
        "norm_output is true": spec.norm_output,
        "its layer has biases": has_biases,
        "its layer normalises queries and keys": decoder.qk_norm,
        "its layer has a sliding window": has_windows,
        "its layer has no rotary embedding": not all(decoder.rotary),
        "its weights are stored in fp8": isinstance(spec.quantization, StoredFp8),
        "it has an embedding of its own": any(
            name.endswith("embed_tokens.weight") for name in tensor_names(directory)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
