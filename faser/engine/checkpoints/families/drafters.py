"""Drafters in GGUF files, and the MTP layer in those of a model: names of tensors, keys of their own."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from faser.engine.checkpoints.families.family import CONFIDENCE, DRAFT_IDS, LAYER, Config, GgufArchitecture
from faser.errors import ModelError

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile

# Of the layer that drafts, besides those of a layer with attention.
MTP_TENSORS = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "lm_head",
}
# Of block drafters, outside the layers. Norms are stored as they are, whatever those of the target are.
_DRAFTER = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": CONFIDENCE,
    "conf_proj.bias": "confidence_head.proj.bias",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    DRAFT_IDS: DRAFT_IDS,
}
_CONVOLUTIONS = {"attn_conv": "attention_conv", "ffn_conv": "mlp_conv"}
_DRAFTER_LAYER = (
    LAYER
    | {f"{name}_base": f"{hub}.base_kernel" for name, hub in _CONVOLUTIONS.items()}
    | {f"{name}_proj": f"{hub}.kernel_projection" for name, hub in _CONVOLUTIONS.items()}
)


def _dflash_fields(file: "GgufFile", config: Config) -> Config:
    """DFlash; with a selector DFlash 2, with a Markov head DSpark.

    target_layers counts the inputs of layers, from 0. Where the file does not say it, DSpark predicts from the
    anchor and no layer is causal, as in llama.cpp.
    """
    if file.get("dflash.hyper_connection.count", int, 0):
        raise ModelError(
            f"{file.path} is a DSpark with the layers of DeepSeek-V4; only those of Qwen3 are computed"
        )
    if file.has("dflash.attention.value_scale"):
        raise ModelError(f"{file.path} has dflash.attention.value_scale, which is not computed")
    hidden_size, corrected = config["hidden_size"], file.has_tensor("markov_w1.weight")
    found: Config = {
        "architectures": ["Qwen3DSparkModel" if corrected else "DFlashDraftModel"],
        "target_layers": file.require_list("dflash.target_layers", int),
        "block_size": file.size("dflash.block_size"),
        "mask_token_id": file.require("tokenizer.ggml.mask_token_id", int),
        "sample_from_anchor": file.get("dflash.sample_from_anchor", bool, corrected),
        "is_causal": file.get("dflash.attention.causal", bool, False),
        "markov_rank": _columns(file, "markov_w1.weight") if corrected else 0,
        "output_multiplier": file.number("dflash.logit_scale", 0.0) or None,
        "final_logit_softcapping": file.number("dflash.final_logit_softcapping", 0.0) or None,
        "input_embedding_scale": file.number("dflash.embedding_scale", 0.0) or None,
    }
    if file.has_tensor("selector_hidden.weight"):
        found["architectures"] = ["DFlash2DraftModel"]
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        found |= {name: file.size(f"dflash.{name}") for name in names}
    if file.has_tensor("conf_proj.weight"):
        found["enable_confidence_head"] = True
        found["confidence_head_with_markov"] = _columns(file, "conf_proj.weight") > hidden_size
    if file.has_tensor(DRAFT_IDS):
        found["draft_vocab_size"] = math.prod(file.shape(DRAFT_IDS))
    if window := file.get("dflash.attention.sliding_window", int):
        local = file.require_list("dflash.attention.sliding_window_pattern", bool)
        found["layer_types"] = ["sliding_attention" if each else "full_attention" for each in local]
        found["sliding_window"] = window
    return found


def _columns(file: "GgufFile", name: str) -> int:
    """Return how many values a row of a tensor has."""
    return (file.shape(name) or (1,))[-1]


DRAFTERS: Mapping[str, GgufArchitecture] = {
    "dflash": GgufArchitecture(
        class_name="DFlashDraftModel",
        model_type="qwen3",
        tensors=_DRAFTER_LAYER,
        windows=True,
        outer=_DRAFTER,
        drafter=True,
        own_fields=_dflash_fields,
    ),
}
REFUSED = {
    "dspark": "forks of llama.cpp write such files, which number layers and name tensors in ways of their own; "
    "convert the checkpoint with llama.cpp, whose files of DSpark are of architecture dflash",
}
