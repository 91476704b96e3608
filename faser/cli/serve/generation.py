"""Sampling defaults: those in the model's generation_config.json, or of its card, overridden by the operator's."""

import json
from collections.abc import Mapping
from pathlib import Path

from faser.config.server import GENERATION_KEYS, ServerConfig, sampling_problems
from faser.engine.checkpoints.card_advice import CARD_ADVICE
from faser.errors import ModelError


def sampling_defaults(directory: Path, config: ServerConfig) -> dict[str, float]:
    """Defaults for fields that a request leaves out, by the names of SamplingParams.

    directory: of the model, or a GGUF file, which has no defaults. A model whose generation_config.json has no
    sampling parameter gets the advice of its card, if CARD_ADVICE has it. Raises ModelError for invalid values.
    """
    defaults: dict[str, float] = {}
    if config.generation_config != "none":
        defaults = _model_defaults(directory / "generation_config.json") or dict(_card_advice(directory))
    return defaults | _by_param_name(config.override_generation_config or {})


def _card_advice(directory: Path) -> Mapping[str, float]:
    return CARD_ADVICE.get(directory.resolve().name, {})


def _model_defaults(path: Path) -> dict[str, float]:
    """The keys that are sampling parameters; others, such as special token ids, are ignored. null is absent."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: it must be a JSON object")
    found = _by_param_name({key: value for key, value in content.items() if value is not None})
    known = {key: value for key, value in found.items() if key in GENERATION_KEYS}
    if problems := sampling_problems(known, str(path)):
        raise ModelError(f"{'; '.join(problems)}. Or start with --generation-config none.")
    return known


def _by_param_name(values: Mapping[str, float]) -> dict[str, float]:
    return {"max_tokens" if key == "max_new_tokens" else key: value for key, value in values.items()}
