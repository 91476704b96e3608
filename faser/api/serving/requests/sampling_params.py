"""From the fields of a body to SamplingParams.

Order of precedence: the body, the server's generation defaults, OpenAI's defaults. SamplingParams checks
its limits itself; this module adds only those of HTTP.
"""

from typing import TypeVar

from faser.api.protocol.body import shown
from faser.api.protocol.chat import ChatBody
from faser.api.protocol.common import GenerationBody
from faser.api.protocol.completions import CompletionBody
from faser.api.serving.requests.bad_words import read_bad_words
from faser.api.serving.requests.settings import ApiSettings
from faser.api.serving.requests.structured_output import structured_output_of
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import RequestError
from faser.types import SamplingParams

_Number = TypeVar("_Number", int, float)

_TEXT_MAX_TOKENS = 16
_MAX_ID_DIGITS = 20
_MAX_NAMED = 20  # of the wrong keys in one message


def chat_sampling(body: ChatBody, settings: ApiSettings, tokenizer: Tokenizer) -> SamplingParams:
    """Raises RequestError. Without max_tokens the answer may fill the rest of the context."""
    asks_alternatives = body.top_logprobs or 0
    if asks_alternatives and not body.logprobs:
        raise RequestError(
            f"top_logprobs is {asks_alternatives}; it needs logprobs to be true", param="top_logprobs"
        )
    _check_alternatives("top_logprobs", body.top_logprobs, settings)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is None:
        default = settings.generation_defaults.get("max_tokens")
        max_tokens = None if default is None else int(default)
    elif max_tokens < 1:
        raise RequestError(f"{name} is {max_tokens}; it must be at least 1", param=name)
    logprobs = asks_alternatives if body.logprobs else None
    return _sampling(body, settings, tokenizer, max_tokens=max_tokens, logprobs=logprobs)


def text_sampling(body: CompletionBody, settings: ApiSettings, tokenizer: Tokenizer) -> SamplingParams:
    """Raises RequestError. echo with logprobs asks for the prompt's as well."""
    _check_alternatives("logprobs", body.logprobs, settings)
    max_tokens = _choose(body.max_tokens, "max_tokens", _TEXT_MAX_TOKENS, settings)
    if max_tokens < 1 and not (max_tokens == 0 and (body.echo or body.prompt_logprobs is not None)):
        raise RequestError(
            f"max_tokens is {max_tokens}; it must be at least 1, or 0 with echo or prompt_logprobs",
            param="max_tokens",
        )
    return _sampling(
        body, settings, tokenizer, max_tokens=max_tokens, logprobs=body.logprobs, echo=bool(body.echo)
    )


def _sampling(
    body: GenerationBody,
    settings: ApiSettings,
    tokenizer: Tokenizer,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool = False,
) -> SamplingParams:
    n = 1 if body.n is None else body.n
    if body.best_of not in (None, n):
        raise RequestError(f"best_of is {body.best_of}; it must be absent or equal to n, {n}", param="best_of")
    _check_alternatives("prompt_logprobs", body.prompt_logprobs, settings)
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError(
            f"prompt_logprobs is {body.prompt_logprobs}; it must be absent when stream is true",
            param="prompt_logprobs",
        )
    asked = [each for each in (body.prompt_logprobs, logprobs if echo else None) if each is not None]
    top_k = _choose(body.top_k, "top_k", 0, settings)
    return SamplingParams(
        n=n,
        temperature=_choose(body.temperature, "temperature", 1.0, settings),
        top_p=_choose(body.top_p, "top_p", 1.0, settings),
        top_k=0 if top_k == -1 else top_k,
        min_p=_choose(body.min_p, "min_p", 0.0, settings),
        seed=body.seed,
        presence_penalty=_choose(body.presence_penalty, "presence_penalty", 0.0, settings),
        frequency_penalty=_choose(body.frequency_penalty, "frequency_penalty", 0.0, settings),
        repetition_penalty=_choose(body.repetition_penalty, "repetition_penalty", 1.0, settings),
        logit_bias=_read_logit_bias(body.logit_bias or {}),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words=read_bad_words(body.bad_words, tokenizer),
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=max(asked, default=None),
        skip_special_tokens=body.skip_special_tokens is not False,
        structured_output=structured_output_of(body),
    )


def _choose(given: _Number | None, name: str, fallback: _Number, settings: ApiSettings) -> _Number:
    if given is not None:
        return given
    default = settings.generation_defaults.get(name)
    return fallback if default is None else type(fallback)(default)


def _check_alternatives(name: str, asked: int | None, settings: ApiSettings) -> None:
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
