"""The model families: from a checkpoint's config.json to a DecoderSpec.

A family is one module with a function `spec(config)`, named after the config's model_type. To add a family,
write its module and add a line here. Imports only faser.errors; start with architecture.py.
"""

from collections.abc import Callable, Mapping
from typing import Any

from faser.engine.checkpoints.families import gemma, glm4, granite, llama, mistral, phi3, qwen2, qwen3, smollm3
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.wrappers import named_text_half, text_half
from faser.errors import ModelError

ToSpec = Callable[[Mapping[str, Any]], DecoderSpec]

# By model_type and by class.
_FAMILIES: dict[tuple[str, str], ToSpec] = {
    ("llama", "LlamaForCausalLM"): llama.spec,
    ("mistral", "MistralForCausalLM"): mistral.spec,
    ("qwen2", "Qwen2ForCausalLM"): qwen2.spec,
    ("qwen3", "Qwen3ForCausalLM"): qwen3.spec,
    ("smollm3", "SmolLM3ForCausalLM"): smollm3.spec,
    ("ministral3", "Ministral3ForCausalLM"): mistral.ministral3_spec,
    ("phi3", "Phi3ForCausalLM"): phi3.spec,
    ("granite", "GraniteForCausalLM"): granite.spec,
    ("gemma2", "Gemma2ForCausalLM"): gemma.gemma2_spec,
    ("gemma3_text", "Gemma3ForCausalLM"): gemma.gemma3_spec,
    ("glm4", "Glm4ForCausalLM"): glm4.spec,
}


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder that a config.json describes. Its architecture selects the family, else its model_type.

    Of a vision-language wrapper: the decoder of its text half.
    Raises ModelError that names the unknown architecture or the unsupported field.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(each, str) for each in architectures):
        raise ModelError(f"config.json: architectures is {architectures!r}; it must be a list of names")
    if (half := text_half(config)) is not None:
        return decoder_spec(half.config)
    by_class = {name: to_spec for (_, name), to_spec in _FAMILIES.items()}
    by_type = {name: to_spec for (name, _), to_spec in _FAMILIES.items()}
    model_type = config.get("model_type")
    known = [by_class[each] for each in architectures if each in by_class]
    if not architectures and isinstance(model_type, str) and model_type in by_type:
        known = [by_type[model_type]]
    if not known:
        unknown = ", ".join(architectures) or f"model_type {model_type}"
        if (text := named_text_half(config)) is not None:
            unknown += f" with the text half {text}"
        raise ModelError(f"architecture {unknown} is not supported; supported are {', '.join(by_class)}")
    return known[0](config)
