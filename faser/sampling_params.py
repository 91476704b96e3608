"""Parameters of the offline API, with vLLM's names, defaults and tolerance.

The fields of SamplingParams are those of a request body (api/bodies/fields.py), checked and translated by the
same code, so that a value means the same here as over HTTP, and an error says the same.
"""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from faser.api.bodies.body import checked
from faser.api.bodies.fields import (
    SAMPLING_FIELDS,
    UNSUPPORTED_IN_COMPLETIONS,
    FieldChecker,
    GenerationBody,
    Integer,
    StructuredOutputsBody,
    UnsupportedField,
)
from faser.api.requests.sampling import sampling_params
from faser.engine.text.tokenizer import Tokenizer
from faser.types import sampling as types

_KNOWN = (
    *("n", "best_of", "temperature", "top_p", "max_tokens", "stop", "logprobs", "prompt_logprobs"),
    *SAMPLING_FIELDS,
    "structured_outputs",
)
_NUMBERS = {each.name: each.default for each in fields(types.SamplingParams) if each.default is not None}
_DEFAULTS = {name: _NUMBERS[name] if type(_NUMBERS.get(name)) in (int, float, bool) else None for name in _KNOWN}
_UNSUPPORTED = UNSUPPORTED_IN_COMPLETIONS | {
    "detokenize": UnsupportedField("answers always have their text", (True,)),
    "output_kind": UnsupportedField("answers are returned whole", (0, 2)),
    "guided_decoding": UnsupportedField("vLLM renamed it; use structured_outputs=StructuredOutputsParams(…)"),
    "truncate_prompt_tokens": UnsupportedField("cut the token ids, and pass them as the prompt", (-1,)),
    "extra_args": UnsupportedField("there are no custom arguments", ({},)),
    "flat_logprobs": UnsupportedField("log probabilities are a dict for each token", (False,)),
}
_CHECKER = FieldChecker(strict=True)


class _Body(GenerationBody):
    logprobs: Integer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The operator's part: a script's own parameters have vLLM's defaults, not the model's."""

    max_logprobs: int
    generation_defaults: dict[str, float] = field(default_factory=dict)


class StructuredOutputsParams(StructuredOutputsBody):
    """The structure of an answer: one of json, regex, choice, grammar, json_object and structural_tag."""

    def __init__(self, **kinds: Any) -> None:
        checked(kinds, StructuredOutputsBody)
        super().__init__(**kinds)


class SamplingParams:
    """Parameters of sampling with vLLM's names and defaults, such as temperature 1 and max_tokens 16.

    Attributes may be changed later, as vLLM's; they are checked again when they are used.
    Raises RequestError that names the field, its value and the limit.
    """

    def __init__(self, **parameters: Any) -> None:
        vars(self).update(_DEFAULTS | parameters)
        self.resolve(None, max_logprobs=types.MAX_LOGPROBS)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __repr__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != _DEFAULTS.get(name)}
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def resolve(self, tokenizer: Tokenizer | None, *, max_logprobs: int) -> types.SamplingParams:
        """Return the engine's parameters. tokenizer: None leaves bad_words out, which only it can read."""
        given = {name: _as_json(value) for name, value in vars(self).items()}
        _CHECKER.check({name: given.pop(name) for name in [*given] if name not in _KNOWN}, _UNSUPPORTED)
        if tokenizer is None:
            del given["bad_words"]
        body = checked(given, _Body)
        settings = _Settings(max_logprobs=max_logprobs)
        return sampling_params(body, settings, tokenizer, max_tokens=body.max_tokens, logprobs=body.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Parameters of vectors and scores.

    dimensions: numbers of each vector, fewer for a model that is trained for it.
    use_activation: False gives vectors that are not scaled to length 1, and the raw logits of a model that judges;
        None: as the checkpoint says.
    truncate_prompt_tokens: how many of the first tokens are read; -1: as many as the model can; None: all, and a
        longer text is an error.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None


def _as_json(value: Any) -> Any:
    """The value as JSON has it: lists, and objects whose keys are text."""
    if isinstance(value, tuple | set | frozenset):
        return [*value]
    if isinstance(value, dict):
        return {str(key): each for key, each in value.items()}
    return value
