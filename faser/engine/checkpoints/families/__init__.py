"""The model families: from a checkpoint's config.json to a DecoderSpec.

A family is one module with a function `spec(config)`, named after the config's model_type. To add a family,
write its module and add a line here. Imports only faser.errors; start with architecture.py.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.errors import ModelError

_MODULE_OF = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder that a config.json describes. Its architecture selects the family, else its model_type.

    Raises ModelError that names the unknown architecture or the unsupported field.
    """
    module = import_module(f"{__name__}.{_module_name(config)}")
    to_spec: Callable[[Mapping[str, Any]], DecoderSpec] = module.spec
    return to_spec(config)


def _module_name(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(each, str) for each in architectures):
        raise ModelError(f"config.json: architectures is {architectures!r}; it must be a list of names")
    if not architectures and config.get("model_type") in _MODULE_OF.values():
        return str(config["model_type"])
    for architecture in architectures:
        if architecture in _MODULE_OF:
            return _MODULE_OF[architecture]
    unknown = ", ".join(map(str, architectures)) or f"model_type {config.get('model_type')}"
    raise ModelError(f"architecture {unknown} is not supported; supported are {', '.join(_MODULE_OF)}")
