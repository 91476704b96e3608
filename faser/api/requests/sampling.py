"""From the fields of a body to SamplingParams.

Order of precedence: the body, the server's generation defaults, OpenAI's defaults. SamplingParams checks its
limits itself; this module adds only those of HTTP. A parameter that needs no translation is not named here: its
declaration in SamplingParams makes the field of the bodies (bodies/fields.py), which is taken as it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from faser.api.bodies.body import shown
from faser.api.bodies.fields import SAMPLING_FIELDS, GenerationBody
from faser.api.requests.structured_output import structured_output_of
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import RequestError
from faser.optional import given, or_else, present
from faser.types.sampling import MAX_BAD_WORDS, MAX_STOP_CHARS, SAMPLING_DEFAULTS, SamplingParams

_TAKEN = (*SAMPLING_FIELDS, "temperature", "top_p")  # from bodies, which call them as SamplingParams does
_MAX_ID_DIGITS = 20
_MAX_NAMED = 20  # of the wrong keys in one message


class SamplingSettings(Protocol):
    """The operator's part: defaults of fields that a request leaves out, and a limit of log probabilities."""

    @property
    def generation_defaults(self) -> Mapping[str, float]: ...

    @property
    def max_logprobs(self) -> int: ...


def sampling_params(
    body: GenerationBody,
    settings: SamplingSettings,
    tokenizer: Tokenizer | None,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    scores_prompt: bool = False,
) -> SamplingParams:
    """Return the engine's parameters of a checked body.

    tokenizer: None where the body has no bad_words. max_tokens, logprobs: as the route means them. scores_prompt:
    logprobs are those of the prompt as well.
    """
    n = or_else(body.n, 1)
    if body.best_of not in (None, n):
        raise RequestError(f"best_of is {body.best_of}; it must be absent or equal to n, {n}", param="best_of")
    check_alternatives("prompt_logprobs", body.prompt_logprobs, settings)
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError(
            f"prompt_logprobs is {body.prompt_logprobs}; it must be absent when stream is true",
            param="prompt_logprobs",
        )
    scored = present((body.prompt_logprobs, logprobs if scores_prompt else None))
    taken: dict[str, Any] = {name: server_default(name, settings) for name in SAMPLING_DEFAULTS}
    taken |= given({name: getattr(body, name) for name in _TAKEN})
    if taken["top_k"] == -1:
        taken["top_k"] = 0
    taken |= {
        "n": n,
        "logit_bias": _read_logit_bias(body.logit_bias or {}),
        "bad_words": read_bad_words(body.bad_words, tokenizer),
        "stop": tuple(body.stop or ()),
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": max(scored, default=None),
        "structured_output": structured_output_of(body),
    }
    values: dict[str, Any] = {
        name: tuple(each) if isinstance(each, list) else each for name, each in taken.items()
    }
    return SamplingParams(**values)


def server_default(name: str, settings: SamplingSettings) -> int | float:
    """The number for requests without the field: the operator's or the model's, else OpenAI's."""
    fallback: int | float = SAMPLING_DEFAULTS[name]
    return type(fallback)(settings.generation_defaults.get(name, fallback))


def check_alternatives(name: str, asked: int | None, settings: SamplingSettings) -> None:
    if asked is not None and not 0 <= asked <= settings.max_logprobs:
        raise RequestError(
            f"{name} is {asked}; it must be at least 0 and at most {settings.max_logprobs}", param=name
        )


def _read_logit_bias(by_id: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """Keys of a JSON object are strings."""
    wrong = [key for key in by_id if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS)]
    if wrong:
        named = ", ".join(map(shown, wrong[:_MAX_NAMED])) + (", …" if len(wrong) > _MAX_NAMED else "")
        raise RequestError(
            f"logit_bias has the key{'s' * (len(wrong) > 1)} {named}; keys must be token ids", param="logit_bias"
        )
    return tuple((int(key), bias) for key, bias in by_id.items())


def read_bad_words(words: Sequence[str] | None, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Sequences of tokens: a word is banned as it is tokenised at the beginning of a text, and after a space.

    Raises RequestError for a word that is empty or too long.
    """
    if not words:
        return ()
    assert tokenizer is not None, "words are tokens of a vocabulary"
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(words)} strings; at most {MAX_BAD_WORDS} are allowed", param="bad_words"
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise RequestError("bad_words contains an empty string; it would ban every token", param="bad_words")
        if len(word) > MAX_STOP_CHARS:
            raise RequestError(
                f"bad_words has a string of {len(word)} characters; at most {MAX_STOP_CHARS} are allowed",
                param="bad_words",
            )
        for spelled in (bare, f" {bare}"):
            found[tuple(tokenizer.encode(spelled, add_special_tokens=False))] = None
    return tuple(found)
