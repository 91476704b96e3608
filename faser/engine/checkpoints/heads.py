"""Heads: small models that draft from a target's hidden states, as checkpoints describe them.

Two kinds are computed: EAGLE-3 (Li et al., arXiv 2503.01840), and the layer for multi-token prediction (MTP) that
a target's own checkpoint may have. Of EAGLE-3 two layouts become one HeadSpec:

    `speculators`   config.json: speculators_model_type, transformer_layer_config,
                    speculators_config {algorithm, proposal_methods, verifier},
                    draft_vocab_size, eagle_aux_hidden_state_layer_ids, norm_before_residual,
                    norm_before_fc, fc_norm, norm_output, target_hidden_size
    flat            config.json of a one-layer decoder, with the head's fields next to it, or in `eagle_config`:
                    LlamaForCausalLMEagle3, Eagle3LlamaForCausalLM, Eagle3Qwen3ForCausalLM, and, as the authors
                    publish theirs, LlamaForCausalLM with draft_vocab_size

Both have the tensors fc, layers.0.* (flat perhaps midlayer.*), norm, lm_head, d2t and t2d, and perhaps
embed_tokens. A head that is described like a target is known by its tensors. Other kinds are refused by name.
An MTP layer is described by its target's config.json, and known by its tensors, mtp.*. assistant.py has Gemma 4's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from faser.config.speculation import MTP
from faser.config.vllm_names import REFUSED_HEADS
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.families.architecture import AttentionSpec, DecoderSpec, DenseSpec
from faser.engine.checkpoints.families.fields import Fields, windowed
from faser.engine.checkpoints.files import gguf_file, tensor_names
from faser.engine.checkpoints.gguf_weights import open_gguf
from faser.engine.checkpoints.quantized import StoredMxfp4, StoredQuantization, stored_quantization
from faser.errors import ModelError
from faser.files import parse_json
from faser.optional import given

EAGLE3 = "eagle3"  # the method, as vLLM and speculators name it
MTP_PREFIX = "mtp."  # of the tensors of an MTP layer
_MTP_PARTS = {"fc", "layers", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"}
KIND = "speculators_model_type"
_FAMILIES = ("llama", "qwen3")  # of a head's layers
_ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
}
# Parts of other architectures, and the kind of head that they stand for. The first one that fits counts.
_REFUSED_ARCHITECTURES = {
    "KVNative": "kv_native_dflash",
    "MuseGlimmerAssistant": "muse",
    "DSparkDeepseekV4": "deepseek_v4",
    "DeepSeekV4DSpark": "deepseek_v4",
    "DSparkDraft": "dspark_draft",
    "LiLiCorr": "lilicorr",
    "Domino": "domino",
    "DFlash": "block",
    "DSpark": "block",
    "XPress": "block",
    "PEagle": "peagle",
    "Peagle": "peagle",
    "MLPSpeculator": "mlp_speculator",
    "Eagle3": "eagle3 of another family",
    "Eagle": "eagle",
    "EAGLE": "eagle",
    "Medusa": "medusa",
    "MTP": MTP,
}


class FeatureNorm(StrEnum):
    """Norms of the target's states before they are projected to features.

    EACH: every layer's states by a norm of their own (`fc_norm`). TOGETHER: the states of all layers by one norm
    (`norm_before_fc`).
    """

    NONE = "none"
    EACH = "fc_norm"
    TOGETHER = "norm_before_fc"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A head for one target. Checked when built: raises ModelError that names the value and the limit.

    decoder: the layers of the head. Its vocab_size is the target's, which embeddings have; it ties nothing.
    draft_vocab_size: rows of the head's logits. target_hidden_size: width of a state.
    state_layers: the layers whose input the head reads, ascending: i is the residual stream at the input of the
        target's layer i, and the number of layers is the stream after the last one, before the final norm. This is
        the numbering of `eagle_aux_hidden_state_layer_ids` in vLLM and speculators. A row of states is the states
        of these layers, concatenated in this order.
    norm_before_residual: the residual stream begins with the normalised features, else with the features.
    norm_output: the next row takes the normalised output, else the output before the norm.
    num_draft_tokens: how many tokens the checkpoint advises to draft; None: it does not say.
    target_name: of the model that the head was trained for; None: it does not say.
    quantization: of the stored weights; None: they are stored as floats of at least 16 bits.
    """

    decoder: DecoderSpec
    draft_vocab_size: int
    target_hidden_size: int
    state_layers: tuple[int, ...]
    feature_norm: FeatureNorm = FeatureNorm.NONE
    norm_before_residual: bool = False
    norm_output: bool = False
    num_draft_tokens: int | None = None
    target_name: str | None = None
    quantization: StoredQuantization | None = None

    def __post_init__(self) -> None:
        if isinstance(self.quantization, StoredMxfp4):
            raise ModelError("the head is quantised (mxfp4), which is supported for gpt-oss only")
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


def read_head_spec(directory: Path, target: DecoderSpec) -> HeadSpec:
    """The head in a directory.

    Raises ModelError that names the file or the field; the reason why a kind of head is refused; or both values
    where the head does not fit the target.
    """
    config = read_config(directory / "config.json")
    if not describes_head(config):
        _has_head_tensors(directory)
    return _speculators_spec(config, target) if KIND in config else _flat_spec(config, target)


def read_mtp_spec(path: Path, target: DecoderSpec) -> HeadSpec | None:
    """The MTP layer in the checkpoint of the target; None: it has none.

    The layer attends as the target's layers do, has their feed-forward network or mixture of experts, as its
    tensors say, and reads the stream after the last one. Raises ModelError for what is not computed: several
    layers, an embedding of its own.
    """
    if MTP_PREFIX not in target.names.not_read:
        return None
    weights = gguf_file(path)
    names = tensor_names(path) if weights is None else open_gguf(weights).names()
    own = [name.split(".") for name in names if name.startswith(MTP_PREFIX)]
    if not own:
        return None
    parts = {name[1] for name in own}
    if parts != _MTP_PARTS:
        raise ModelError(
            f"the MTP layer of {path} has {', '.join(sorted(parts))}; only layers with "
            f"{', '.join(sorted(_MTP_PARTS))} are supported"
        )
    numbers = {name[2] for name in own if name[1] == "layers"}
    if len(numbers) > 1:
        raise ModelError(f"{path} has {len(numbers)} MTP layers; only one is supported")
    layer = next(each for each in target.layers if isinstance(each.attention, AttentionSpec))
    mixes = any("experts" in name for name in own)
    network = next(
        (each.feed_forward for each in target.layers if mixes != isinstance(each.feed_forward, DenseSpec)), None
    )
    if network is None:
        kinds = ("a mixture of experts", "dense")
        mine, others = kinds if mixes else kinds[::-1]
        raise ModelError(f"the MTP layer of {path} is {mine}; the layers of the model are {others}")
    return HeadSpec(
        decoder=replace(target, layers=(replace(layer, feed_forward=network),), tie_word_embeddings=False),
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        state_layers=(target.num_layers,),
        norm_output=True,
    )


def is_head(directory: Path) -> bool:
    """Return whether a directory holds a head, not a model. Raises ModelError, with the reason, if refused."""
    path = directory / "config.json"
    return path.is_file() and (describes_head(read_config(path)) or _has_head_tensors(directory))


def describes_assistant(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of one of Gemma 4's assistants."""
    return config.get("model_type") in ("gemma4_assistant", "gemma4_unified_assistant")


def describes_head(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a head; False: it may be a target's.

    Raises ModelError for a kind that is refused, with the reason, or unknown.
    """
    if KIND in config:
        _refuse_kind(config[KIND])
        return True
    if describes_assistant(config):
        return True
    _refuse_kind("medusa" if "medusa_num_heads" in config else config.get("model_type"))
    named = architecture(config)
    if named not in _ARCHITECTURES:
        for part, kind in _REFUSED_ARCHITECTURES.items():
            if part in named:
                raise ModelError(f"architecture {named} of the head is not supported: {REFUSED_HEADS[kind]}")
        if config.get("draft_vocab_size") is None:
            return False
    for name in ("mask_token_id", "pard_token", "ptd_token_id"):
        if config.get(name) is not None:
            raise ModelError(
                f"config.json: {name} is {config[name]!r}, so it drafts in parallel, which is not supported: "
                f"{REFUSED_HEADS['peagle']}"
            )
    return True


def _speculators_spec(config: Mapping[str, Any], target: DecoderSpec) -> HeadSpec:
    """Defaults are those of vLLM's reader, where they differ from the library's, which writes all fields."""
    if config[KIND] != EAGLE3:
        raise ModelError(f"config.json: {KIND} is {config[KIND]!r}; only {EAGLE3} is supported")
    fields = Fields(config)
    layers = fields.optional_dict("transformer_layer_config")
    if layers is None:
        raise ModelError("config.json: transformer_layer_config is missing; a speculators directory has one")
    decoder = head_layers_spec(layers, target, family=str(layers.get("model_type", "llama")))
    algorithm = fields.optional_dict("speculators_config") or {}
    verifier = algorithm.get("verifier")
    return HeadSpec(
        decoder=decoder,
        draft_vocab_size=fields.positive_int("draft_vocab_size", target.vocab_size),
        target_hidden_size=target_width(fields, decoder, target),
        state_layers=_state_layers(config.get("eagle_aux_hidden_state_layer_ids") or None, target),
        feature_norm=_feature_norm(fields),
        norm_before_residual=fields.flag("norm_before_residual", True),
        norm_output=fields.flag("norm_output", False),
        num_draft_tokens=_num_draft_tokens(algorithm.get("proposal_methods")),
        target_name=verifier.get("name_or_path") if isinstance(verifier, dict) else None,
        quantization=stored_quantization(config),
    )


def _flat_spec(config: Mapping[str, Any], target: DecoderSpec) -> HeadSpec:
    """Fields in `eagle_config` come before those next to it, as in vLLM."""
    eagle_config = Fields(config).optional_dict("eagle_config") or {}
    merged = {**config, **given(eagle_config)}
    fields = Fields(merged)
    if not fields.flag("use_aux_hidden_state", True):
        raise ModelError("config.json: use_aux_hidden_state is false; only true is supported")
    if (scale := fields.positive_float("logit_scale", 1.0)) != 1.0:
        raise ModelError(f"logit_scale of the head is {scale}; only 1 is supported")
    family = _ARCHITECTURES.get(architecture(config)) or str(config.get("model_type", "llama"))
    decoder = head_layers_spec(config, target, family=family)
    state_layers = _state_layers(merged.get("eagle_aux_hidden_state_layer_ids") or None, target)
    stated = fields.positive_int("num_aux_hidden_states", len(state_layers))
    if stated != len(state_layers):
        raise ModelError(
            f"config.json: num_aux_hidden_states is {stated}, but the head reads the states of layers "
            f"{', '.join(map(str, state_layers))}; eagle_aux_hidden_state_layer_ids must name {stated}"
        )
    return HeadSpec(
        decoder=decoder,
        draft_vocab_size=fields.positive_int("draft_vocab_size", target.vocab_size),
        target_hidden_size=target_width(fields, decoder, target),
        state_layers=state_layers,
        feature_norm=_feature_norm(fields),
        norm_before_residual=fields.flag("norm_before_residual", False),
        norm_output=fields.flag("norm_output", False),
        quantization=stored_quantization(config),
    )


def head_layers_spec(
    config: Mapping[str, Any], target: DecoderSpec, *, family: str, families: tuple[str, ...] = _FAMILIES
) -> DecoderSpec:
    """The head's layers. config: that of the layers; where it lacks a vocabulary size, the target's is meant.

    families: those that heads of this kind may have.
    max_position_embeddings of a head is not a limit: its rotary embedding is relative.
    Raises ModelError for an unknown family, or for a vocabulary other than the target's.
    """
    if family not in families:
        raise ModelError(
            f"config.json: model_type of the head is {family!r}; only {', '.join(families)} are supported"
        )
    of_target = {"max_position_embeddings": target.max_position_embeddings, "vocab_size": target.vocab_size}
    fields = of_target | given(config)
    spec = decoder_spec(fields | {"architectures": [], "model_type": family, "tie_word_embeddings": False})
    windows = Fields(fields).windows(spec.windows)
    spec = replace(
        spec, layers=tuple(windowed(layer, (each,))[0] for layer, each in zip(spec.layers, windows, strict=True))
    )
    if spec.vocab_size != target.vocab_size:
        raise ModelError(
            f"the head was made for a vocabulary of {spec.vocab_size} tokens; the model has {target.vocab_size}"
        )
    return spec


def target_width(fields: Fields, layers: DecoderSpec, target: DecoderSpec) -> int:
    """The width of the target's states, as the head was made for. Raises ModelError if the target's differs."""
    stated = fields.positive_int("target_hidden_size", layers.hidden_size)
    if stated != target.hidden_size:
        raise ModelError(
            f"the head was made for hidden states of {stated} values; those of the model have {target.hidden_size}"
        )
    return stated


def _state_layers(listed: object, target: DecoderSpec) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads, ascending. listed: the config's field; None: it has none.

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
    return tuple(sorted(checked_layers("eagle_aux_hidden_state_layer_ids", listed, target, input_of_first=0)))


def checked_layers(name: str, listed: object, target: DecoderSpec, *, input_of_first: int) -> tuple[int, ...]:
    """State layers, in the order of the list in the field called name.

    input_of_first: what the field calls the input of the first layer: 0, or -1 where it counts outputs.
    Raises ModelError for a list of something else, and a layer that the target lacks or that is named twice.
    """
    count = target.num_layers
    if not isinstance(listed, list) or not listed or not all(type(each) is int for each in listed):
        raise ModelError(f"{name} is {listed!r}; it must be a list of integers")
    if outside := [each for each in listed if not 0 <= each - input_of_first <= count]:
        last = count + input_of_first
        ends = f", and {last} stands for the output of the last one" if last == count else ""
        raise ModelError(f"{name} names layer {outside[0]}; the model has layers 0 to {count - 1}{ends}")
    if len(set(listed)) < len(listed):
        raise ModelError(f"{name} is {listed}; it names a layer twice")
    return tuple(each - input_of_first for each in listed)


def _feature_norm(fields: Fields) -> FeatureNorm:
    each, together = fields.flag("fc_norm", False), fields.flag("norm_before_fc", False)
    if each and together:
        raise ModelError("fc_norm and norm_before_fc are both true; a head has one of them")
    return FeatureNorm.EACH if each else FeatureNorm.TOGETHER if together else FeatureNorm.NONE


def _num_draft_tokens(methods: object) -> int | None:
    """speculative_tokens of the first proposal method."""
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        return None
    return Fields(methods[0]).optional_int("speculative_tokens")


def _refuse_kind(kind: object) -> None:
    """Raises ModelError with the reason if this kind of head is known and not computed."""
    reason = REFUSED_HEADS.get(str(kind))
    if reason is not None:
        raise ModelError(f"the head is of kind {kind}, which is not supported: {reason}")


def _has_head_tensors(directory: Path) -> bool:
    """No model has a tensor fc. Raises ModelError where EAGLE's heads have it, whose features have no norm."""
    names = tensor_names(directory)
    if not any(name.removeprefix("model.") == "fc.weight" for name in names):
        return False
    if not any(name.endswith(".hidden_norm.weight") for name in names):
        _refuse_kind("eagle")
    return True


def architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or [""]
    return str(architectures[0])


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a head. Raises ModelError that names the file where it cannot be read."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; the directory of a head must have one") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} contains {type(value).__name__}; it must contain an object")
    return value
