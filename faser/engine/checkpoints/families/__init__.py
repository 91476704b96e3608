"""The model families: from a checkpoint's config.json, or a GGUF file, to a DecoderSpec.

A family is one module: how its config.json is read, its GGUF names and keys, the parsers of its calls. To add one,
write its module with FAMILIES and GGUF and list it in _MODULES: `faser models`, docs/models.md and the
architectures of GGUF files follow. Start with family.py and architecture.py.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.families import (
    drafters,
    gemma,
    gemma4,
    glm4,
    gpt_oss,
    granite,
    lfm2,
    llama,
    mistral,
    mixtures,
    muse_glimmer,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    smollm3,
)
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.family import Family, GgufArchitecture
from faser.engine.checkpoints.families.wrappers import named_text_half, text_half
from faser.errors import ModelError

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile

_MODULES = (
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    smollm3,
    phi3,
    granite,
    gemma,
    gemma4,
    glm4,
    mixtures,
    gpt_oss,
    lfm2,
    muse_glimmer,
)
FAMILIES: tuple[Family, ...] = tuple(family for module in _MODULES for family in module.FAMILIES)
GGUF_ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    name: found for module in _MODULES for name, found in module.GGUF.items()
}

# What a model of another architecture may have, by the field of its config.json that shows it.
_FOREIGN = {
    "vision_config": "it reads images",
    "audio_config": "it reads sound",
    "num_experts": "it is a mixture of experts",
    "num_local_experts": "it is a mixture of experts",
    "n_routed_experts": "it is a mixture of experts",
}


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder that a config.json describes; of a vision-language wrapper, that of its text half.

    Raises ModelError as find_family does, or for a field.
    """
    family, half = find_family(config), text_half(config)
    return family.to_spec(config if half is None else half.config)


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a config.json: that of its architecture, or without one that of its model_type.

    Of a vision-language wrapper: the family of its text half. Raises ModelError that names the unknown
    architecture, and a field that shows why it is none of ours.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(each, str) for each in architectures):
        raise ModelError(f"config.json: architectures is {architectures!r}; it must be a list of names")
    if (half := text_half(config)) is not None:
        return find_family(half.config)
    by_class = {each.architecture: each for each in FAMILIES}
    by_type = {each.model_type: each for each in FAMILIES}
    model_type = config.get("model_type")
    known = [by_class[each] for each in architectures if each in by_class]
    if not architectures and isinstance(model_type, str) and model_type in by_type:
        known = [by_type[model_type]]
    if not known:
        unknown = ", ".join(architectures) or f"model_type {model_type}"
        if (text := named_text_half(config)) is not None:
            unknown += f" with the text half {text}"
        why = next((f" ({name}: {what})" for name, what in _FOREIGN.items() if config.get(name)), "")
        raise ModelError(
            f"architecture {unknown} is not supported{why}; supported are {', '.join(by_class)}, and the encoders "
            "that `faser models` lists"
        )
    return known[0]


def gguf_architecture(file: "GgufFile") -> GgufArchitecture:
    """Raises ModelError that names an architecture that is not supported."""
    name = file.require("general.architecture", str)
    if found := GGUF_ARCHITECTURES.get(name) or drafters.DRAFTERS.get(name):
        return found
    if name in drafters.REFUSED:
        raise ModelError(
            f"{file.path} is of architecture {name}, which is not supported: {drafters.REFUSED[name]}"
        )
    raise ModelError(f"{file.path} is of architecture {name}; supported are {', '.join(GGUF_ARCHITECTURES)}")
