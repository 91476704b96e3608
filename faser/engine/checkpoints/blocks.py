"""Block drafters: small models that draft a whole block of tokens in one pass, as checkpoints describe them.

Five layouts become one BlockSpec:

    DFlash        config.json: DFlashDraftModel, the fields of Qwen3 layers, dflash_config {mask_token_id,
                  target_layer_ids, block_size, causal, use_swa, swa_window_size}, num_target_layers
    DFlash 2      config.json: DFlash2DraftModel, as DFlash, and in dflash_config conv_kernel_size,
                  conv_group_size, selector_rank, selector_top_k, and perhaps output_multiplier,
                  final_logit_softcapping, input_embedding_scale. Its method is dflash, as in vLLM
    DSpark        config.json: Qwen3DSparkModel or Gemma4DSparkModel, all fields flat: block_size,
    target_layer_ids, mask_token_id,
                  markov_rank, markov_head_type, enable_confidence_head, confidence_head_with_markov
    speculators   speculators_model_type dflash or dspark, transformer_layer_config, draft_vocab_size,
                  aux_hidden_state_layer_ids, sample_from_anchor, sliding_window_non_causal, and DSpark's fields
    GGUF          a file of architecture dflash, of which families/drafters.py makes the fields of DFlash or DSpark

The layouts number layers differently. `target_layer_ids` counts outputs: i is the output of layer i, which is the
input of layer i + 1, and -1 is the embedding. `aux_hidden_state_layer_ids` and a GGUF file's `target_layers` count
inputs, as EAGLE-3's list does: vLLM takes 1 off each id of a speculators file where it needs DFlash's own
numbering. A file with a speculators_model_type that does not say which convention its slots follow
(sample_from_anchor) is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from faser.config.speculation import DFLASH, DSPARK
from faser.config.vllm_names import REFUSED_HEADS
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.fields import Fields, windowed
from faser.engine.checkpoints.files import read_config
from faser.engine.checkpoints.heads import (
    KIND,
    architecture,
    checked_layers,
    head_layers_spec,
    target_width,
)
from faser.engine.checkpoints.quantized import StoredQuantization, stored_quantization
from faser.errors import ModelError
from faser.optional import given

_DFLASH2 = "DFlash2DraftModel"
_GEMMA4 = "Gemma4DSparkModel"
_ARCHITECTURES = {"DFlashDraftModel": DFLASH, _DFLASH2: DFLASH, "Qwen3DSparkModel": DSPARK, _GEMMA4: DSPARK}
_GEMMA4_FAMILIES = ("gemma4_text", "gemma4_unified_text")
_CANDIDATES = 16  # of each row, unless the config says how many


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """A block drafter for one target. Checked when built: raises ModelError that names the value and the limit.

    decoder: its layers, with their windows, and what multiplies and caps embeddings and logits. Its vocab_size is
    the target's. method: dflash or dspark. draft_vocab_size: rows of its logits. target_hidden_size, state_layers:
    as in HeadSpec. block_size: most rows of a block, the anchor included: what the drafter was trained for.
    mask_token_id: the token of the rows behind the anchor; None: the checkpoint has an embedding for them.
    predicts_from_anchor: row i of a block predicts the token after it, and the anchor the first one; else row i
    predicts the token at its own place, and the anchor none. causal: of each layer, whether the rows of a block
    see only those before them. markov_rank: of the correction of the logits by the token before; 0: there is none.
    selector: the correction depends on the row's hidden state as well. num_candidates: the best tokens of a row,
    which alone are corrected. conv_kernel_size: taps of the convolutions in the layers; 0: there are none.
    conv_group_size: channels that share the part of a kernel that depends on the row. confidence: there is a head
    that estimates acceptance. confidence_reads_markov: it reads the row of the correction as well.
    """

    decoder: DecoderSpec
    method: str
    draft_vocab_size: int
    target_hidden_size: int
    state_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int | None
    predicts_from_anchor: bool
    causal: tuple[bool, ...]
    markov_rank: int = 0
    selector: bool = False
    num_candidates: int = _CANDIDATES
    conv_kernel_size: int = 0
    conv_group_size: int = 1
    confidence: bool = False
    confidence_reads_markov: bool = False
    quantization: StoredQuantization | None = None

    def __post_init__(self) -> None:
        vocab_size = self.decoder.vocab_size
        if self.draft_vocab_size > vocab_size:
            raise ModelError(
                f"draft_vocab_size is {self.draft_vocab_size}; the target's vocabulary has {vocab_size} tokens"
            )
        if self.mask_token_id is not None and self.mask_token_id >= vocab_size:
            raise ModelError(f"mask_token_id is {self.mask_token_id}; the model has tokens 0 to {vocab_size - 1}")
        if self.most_tokens < 1:
            raise ModelError(
                f"config.json: block_size is {self.block_size}; where the anchor predicts no token it must be at "
                "least 2"
            )
        for causal, window in zip(self.causal, self.decoder.windows, strict=True):
            if window is not None and not causal and window < self.block_size:
                raise ModelError(
                    f"the drafter's window is {window}; it must be at least its block_size, {self.block_size}"
                )
        if self.hidden_size % self.conv_group_size:
            raise ModelError(
                f"config.json: conv_group_size is {self.conv_group_size}; it must divide hidden_size, "
                f"{self.hidden_size}"
            )
        if self.confidence_reads_markov and not self.markov_rank:
            raise ModelError("config.json: confidence_head_with_markov is true, but markov_rank is 0")

    @property
    def is_plain(self) -> bool:
        """Return whether there are no convolutions, no selector, and no scales of embeddings and logits."""
        scales = (self.decoder.embedding_scale, self.decoder.logit_scale, self.decoder.logit_cap)
        return not self.conv_kernel_size and not self.selector and scales == (1.0, 1.0, None)

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def states_size(self) -> int:
        """Width of a row of states, of all layers."""
        return len(self.state_layers) * self.target_hidden_size

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest draft."""
        return self.block_size - (not self.predicts_from_anchor)

    def rows(self, num_tokens: int) -> int:
        """Rows of a block that drafts this many tokens."""
        return num_tokens + (not self.predicts_from_anchor)


def block_method(directory: Path) -> str | None:
    """The method of the block drafter in a directory, or a GGUF file; None: none lies there."""
    found = directory.suffix == ".gguf" or (directory / "config.json").is_file()
    return _method(read_config(directory)) if found else None


def _method(config: Mapping[str, Any]) -> str | None:
    if KIND in config:
        return config[KIND] if config[KIND] in (DFLASH, DSPARK) else None
    return _ARCHITECTURES.get(architecture(config))


def read_block_spec(directory: Path, target: DecoderSpec, method: str) -> BlockSpec:
    """The block drafter in a directory, or a GGUF file. method: what the operator named it.

    Raises ModelError that names the file or the field, or both values where it does not fit the target.
    """
    config = read_config(directory)
    found = _method(config)
    if found is None:
        raise ModelError(
            f"method is {method}; {directory} has no block drafter: its config.json describes "
            f"{config.get(KIND) or architecture(config) or 'no architecture'}, not a {' or '.join(_ARCHITECTURES)}"
        )
    if found != method:
        raise ModelError(f"method is {method}; {directory} is a drafter of the method {found}")
    return _speculators_spec(config, target, found) if KIND in config else _flat_spec(config, target, found)


def _speculators_spec(config: dict[str, Any], target: DecoderSpec, method: str) -> BlockSpec:
    layers = Fields(config).optional_dict("transformer_layer_config")
    if layers is None:
        raise ModelError("config.json: transformer_layer_config is missing; a speculators directory has one")
    if config.get("sample_from_anchor") is None:
        raise ModelError(
            f"config.json: sample_from_anchor is missing; a speculators file of kind {method} must say whether "
            "the first row of a block, its anchor, predicts a token"
        )
    state_layers = checked_layers(
        "aux_hidden_state_layer_ids", config.get("aux_hidden_state_layer_ids"), target, input_of_first=0
    )
    non_causal = Fields(config).flag("sliding_window_non_causal", False)
    return _spec(
        config | ({"causal": False} if non_causal else {}),
        layers,
        target,
        method,
        state_layers,
        predicts_from_anchor=False,
    )


def _flat_spec(config: Mapping[str, Any], target: DecoderSpec, method: str) -> BlockSpec:
    """Fields in `dflash_config` come before those next to it."""
    inner = Fields(_without_causal(config)).optional_dict("dflash_config") or {}
    merged = {**config, **given(inner)}
    stated = Fields(_without_causal(merged)).optional_int("num_target_layers")
    if stated is not None and stated != target.num_layers:
        raise ModelError(
            f"the drafter was made for a model of {stated} layers (num_target_layers); the model has "
            f"{target.num_layers}"
        )
    if (kind := merged.get("projector_type")) in REFUSED_HEADS:
        raise ModelError(f"config.json: projector_type is {kind!r}, which is not supported: {REFUSED_HEADS[kind]}")
    name, first = ("target_layers", 0) if "target_layers" in merged else ("target_layer_ids", -1)
    state_layers = checked_layers(name, merged.get(name), target, input_of_first=first)
    return _spec(merged, merged, target, method, state_layers, predicts_from_anchor=method == DSPARK)


def _spec(
    config: Mapping[str, Any],
    layers: Mapping[str, Any],
    target: DecoderSpec,
    method: str,
    state_layers: tuple[int, ...],
    *,
    predicts_from_anchor: bool,
) -> BlockSpec:
    """config: the drafter's own fields. layers: those of its layers. predicts_from_anchor: unless it says so."""
    if list(state_layers) != sorted(state_layers):
        raise ModelError("config.json: the drafter names the layers whose states it reads in falling order")
    fields = Fields(_without_causal(config))
    decoder = _layers(config, _without_causal(layers), target)
    decoder = replace(
        decoder,
        embedding_scale=fields.positive_float("input_embedding_scale", decoder.embedding_scale),
        logit_scale=fields.positive_float("output_multiplier", decoder.logit_scale),
        logit_cap=fields.optional_float("final_logit_softcapping") or None,
    )
    if fields.flag("use_swa", False):
        window = fields.positive_int("swa_window_size")
        decoder = replace(decoder, layers=windowed(decoder.layers[0], (window,) * decoder.num_layers))
    convolved = architecture(config) == _DFLASH2 or config.get("conv_kernel_size") is not None
    selector = architecture(config) == _DFLASH2 or config.get("selector_rank") is not None
    markov_rank = fields.non_negative_int("markov_rank", 0) if config.get("markov_rank") else 0
    if selector and markov_rank:
        raise ModelError(
            f"config.json: markov_rank is {markov_rank}; a drafter with a candidate selector has none"
        )
    if markov_rank and (kind := config.get("markov_head_type", "vanilla")) != "vanilla":
        raise ModelError(f"config.json: markov_head_type is {kind!r}; only vanilla is supported")
    confidence = fields.flag("enable_confidence_head", False)
    mask = config.get("mask_token_id")
    return BlockSpec(
        decoder=decoder,
        method=method,
        draft_vocab_size=fields.positive_int("draft_vocab_size", target.vocab_size),
        target_hidden_size=target_width(fields, decoder, target),
        state_layers=state_layers,
        block_size=fields.positive_int("block_size"),
        mask_token_id=None if mask is None else fields.non_negative_int("mask_token_id", 0),
        predicts_from_anchor=fields.flag("sample_from_anchor", predicts_from_anchor),
        causal=_causal(config, decoder),
        markov_rank=fields.positive_int("selector_rank") if selector else markov_rank,
        selector=selector,
        num_candidates=fields.positive_int("selector_top_k") if selector else _CANDIDATES,
        conv_kernel_size=fields.positive_int("conv_kernel_size") if convolved else 0,
        conv_group_size=fields.positive_int("conv_group_size") if convolved else 1,
        confidence=confidence,
        confidence_reads_markov=confidence and fields.flag("confidence_head_with_markov", False),
        quantization=stored_quantization(config),
    )


def _layers(config: Mapping[str, Any], layers: Mapping[str, Any], target: DecoderSpec) -> DecoderSpec:
    """Layers of Gemma 4's drafters have the config of the target's, of which they use a part."""
    if architecture(config) != _GEMMA4:
        return head_layers_spec(layers, target, family=str(layers.get("model_type", "qwen3")))
    given = {**layers, "hidden_size_per_layer_input": layers.get("hidden_size_per_layer_input") or 0}
    family = str(layers.get("model_type"))
    decoder = head_layers_spec(given, target, family=family, families=_GEMMA4_FAMILIES)
    reads_other = any(each.kv_layer is not None for each in decoder.attentions)
    mixes = any(each.experts is not None for each in decoder.layers)
    if reads_other or mixes or decoder.token_inputs is not None or any(decoder.windows):
        raise ModelError(
            "config.json: the drafter has num_kv_shared_layers, enable_moe_block, hidden_size_per_layer_input, or "
            "layers other than full_attention; only dense layers without these are computed"
        )
    return decoder


def _causal(config: Mapping[str, Any], decoder: DecoderSpec) -> tuple[bool, ...]:
    """Return whether each layer is causal, as vLLM decides it: as stated, else where the layer has a window."""
    for name in ("is_causal", "causal"):
        if (stated := config.get(name)) is not None:
            if not isinstance(stated, bool):
                raise ModelError(f"config.json: {name} is {stated!r}; it must be true or false")
            return (stated,) * decoder.num_layers
    return tuple(window is not None for window in decoder.windows)


def _without_causal(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without the field that says how the rows of a block see each other, which no other model may have."""
    return {name: value for name, value in config.items() if name != "is_causal"}
