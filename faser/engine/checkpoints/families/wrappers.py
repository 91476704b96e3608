"""Vision-language wrappers: the config.json of their text half, which is served alone.

For text alone all axes of a position are equal, so rope in sections (mrope) is plain rope. Knows of tensors only
how their names begin.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser.errors import ModelError

# A wrapper's model_type and class, and the text halves that it may have; the first where none is named.
_WRAPPERS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"): ("qwen2_5_vl_text",),
    ("qwen3_vl", "Qwen3VLForConditionalGeneration"): ("qwen3_vl_text",),
    ("qwen3_5", "Qwen3_5ForConditionalGeneration"): ("qwen3_5_text",),
    ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"): ("qwen3_5_moe_text",),
    ("gemma3", "Gemma3ForConditionalGeneration"): ("gemma3_text",),
    ("gemma4", "Gemma4ForConditionalGeneration"): ("gemma4_text",),
    ("gemma4_unified", "Gemma4UnifiedForConditionalGeneration"): ("gemma4_unified_text",),
    ("muse_glimmer", "MuseGlimmerForConditionalGeneration"): ("muse_glimmer_text",),
    ("mistral3", "Mistral3ForConditionalGeneration"): ("mistral", "ministral3"),
}
# A text half's class, and the defaults of its fields where they are not those of the class.
_TEXT_HALVES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2_5_vl_text": (
        "Qwen2ForCausalLM",
        {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "max_window_layers": 80, "num_key_value_heads": 8},
    ),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {"rope_theta": 500_000.0, "max_position_embeddings": 128_000}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", {}),
    "gemma3_text": ("Gemma3ForCausalLM", {}),
    "gemma4_text": ("Gemma4ForCausalLM", {}),
    "gemma4_unified_text": ("Gemma4UnifiedForCausalLM", {}),
    "muse_glimmer_text": ("MuseGlimmerForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "ministral3": ("Ministral3ForCausalLM", {}),
}
# How versions of transformers name the tensors of the text half.
_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_TIED = "tie_word_embeddings"
# Fields that stand at the top level or in text_config; names of one field together.
_EITHER = (("dtype", "torch_dtype"), ("eos_token_id",), ("quantization_config", "compression_config"), (_TIED,))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextHalf:
    """config: of a text model. wrapper: the class whose text half it is.

    tie_is_disputed: the two levels differ on whether embedding and head are one. Versions of transformers follow
    one level or the other; the config has what text_config says.
    """

    wrapper: str
    config: dict[str, Any]
    tie_is_disputed: bool


def text_half(config: Mapping[str, Any]) -> TextHalf | None:
    """None: the config is not that of a known wrapper.

    What text_config does not state of the fields that either level may have is taken from the top level. Old files
    of Qwen2.5-VL have no text_config; all is at the top level. Raises ModelError that names an unknown text half.
    """
    named = config.get("architectures") or [config.get("model_type")]
    found = [
        (names, texts)
        for names, texts in _WRAPPERS.items()
        if isinstance(named, list) and any(name in named for name in names)
    ]
    if not found:
        return None
    (_, wrapper), supported = found[0]
    stated = config.get("text_config")
    if stated is not None and not isinstance(stated, dict):
        raise ModelError(f"config.json: text_config is {stated!r}; it must be an object")
    kind = supported[0] if stated is None else stated.get("model_type") or supported[0]
    if kind not in supported:
        raise ModelError(
            f"config.json: the text half of {wrapper} is {kind}; supported are {', '.join(supported)}"
        )
    text = dict(config) if stated is None else stated
    class_name, defaults = _TEXT_HALVES[kind]
    merged = dict(defaults) | text | {"architectures": [class_name], "model_type": kind}
    for names in _EITHER:
        if all(text.get(name) is None for name in names):
            merged |= {name: config[name] for name in names if name in config}
    disputed = None not in (config.get(_TIED), text.get(_TIED)) and config[_TIED] != text[_TIED]
    return TextHalf(wrapper=wrapper, config=merged, tie_is_disputed=disputed)


def named_text_half(config: Mapping[str, Any]) -> str | None:
    """The model_type of the text half of any wrapper, known or not."""
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    return kind if isinstance(kind, str) else None


def text_name(name: str) -> str:
    """Return the name of a tensor of a text half, as a text model has it; another name stays as it is."""
    for stored, text in _TEXT_PREFIXES.items():
        if name.startswith(stored):
            return text + name.removeprefix(stored)
    return name
