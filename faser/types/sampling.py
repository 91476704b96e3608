"""Sampling parameters of a request, with their limits, and the structure that its answers may have."""

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from typing import Any, TypeVar

from faser.errors import RequestError
from faser.types.pooling import Pooling

MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_STRUCTURE_CHARS = 1 << 18

_MOST_NEGATIVE, _MOST_POSITIVE = -(2**63), 2**63 - 1  # integers in messages between processes

_Number = TypeVar("_Number", int, float, int | None)


class StructureKind(StrEnum):
    """Kinds of a StructuredOutput's text; the values are the keys of `structured_outputs`.

    JSON_OBJECT: empty, any JSON object. JSON: a JSON Schema, as JSON. REGEX: a regular expression. CHOICE: the
    possible answers, as a JSON list of strings. GRAMMAR: a context-free grammar in Lark's or GBNF's notation.
    STRUCTURAL_TAG: free text with structured parts, as JSON: {"triggers": [...], "tags": [{"begin": ...,
    "schema": ..., "end": ...}], "at_least_one": false, "stop_after_first": false}, or {"format": ...} with a tree
    of formats; engine/structure/structural_tags.py lists them.
    """

    JSON_OBJECT = "json_object"
    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class StructuredOutput:
    """Structure that every answer to a request must match. param: the field that asks for it, for messages.

    Raises RequestError for a text that is too long.
    """

    kind: StructureKind
    text: str = ""
    param: str = "structured_outputs"

    def __post_init__(self) -> None:
        if len(self.text) > MAX_STRUCTURE_CHARS:
            raise RequestError(
                f"{self.param} has {len(self.text)} characters; at most {MAX_STRUCTURE_CHARS} are allowed",
                param=self.param,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """Tokens that an answer may think; then it is made to close its thinking.

    begin: the token ids that open the thinking. end: the one that closes it. is_open: the prompt has opened it.
    repeats: an answer may open it several times; all of them share the budget.
    """

    max_tokens: int
    begin: tuple[int, ...]
    end: int
    is_open: bool
    repeats: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a number: [low, high], or (low, high] if above. high: None: no limit but infinity."""

    low: float
    high: float | None
    above: bool

    def __str__(self) -> str:
        edge = "above" if self.above else "at least"
        return f"{edge} {self.low}" if self.high is None else f"{edge} {self.low} and at most {self.high}"

    def check(self, name: str, value: float) -> None:
        """Raises RequestError for NaN, infinities and values outside."""
        fits = value < math.inf and (value > self.low if self.above else value >= self.low)
        if not fits or (self.high is not None and value > self.high):
            raise RequestError(f"{name} is {value}; it must be {self}", param=name)


def _number(
    default: _Number,
    low: float,
    high: float | None = None,
    *,
    above: bool = False,
    edits: bool = False,
    has_default: bool = False,
) -> _Number:
    """A number among SamplingParams, with its limits.

    edits: any other value than the default changes what the model would say. has_default: operators and files of
    models may set what holds for requests without the field.
    """
    metadata = {"limits": Limits(low=low, high=high, above=above), "edits": edits, "has_default": has_default}
    number: _Number = field(default=default, metadata=metadata)
    return number


_EDITS = {"edits": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters by which one request's tokens are sampled. Checked when built.

    The bodies of all dialects follow from these declarations (api/bodies/fields.py), and so does docs/api.md.

    temperature: 0 is greedy. top_k: 0 is off. max_tokens: None: the rest of the context.
    seed: None draws one. Equal seeds give equal tokens, whatever else is in the batch.
    logit_bias: (token id, bias) pairs. allowed_token_ids: None allows all.
    bad_words: sequences of token ids that the output must not contain.
    logprobs: number of alternatives to report in addition to the sampled token; None: no log probabilities.
    structured_output: None: free text. With it min_tokens and ignore_eos hold until the structure is complete and
    allows nothing else.
    thinking_budget: None: the model decides when it has thought enough.
    pooling: of a prompt that gets a vector in place of an answer; None: it gets an answer.
    Order of application: bias, penalties, allowed tokens, bad words, min_tokens, thinking budget, structured
    output, temperature, min_p, top_k, top_p.

    Raises RequestError that names the field, its value and the limit.
    """

    n: int = _number(1, 1, MAX_SAMPLES)
    temperature: float = _number(1.0, 0.0, 2.0, has_default=True)
    top_p: float = _number(1.0, 0.0, 1.0, above=True, has_default=True)
    min_tokens: int = _number(0, 0, edits=True)
    top_k: int = _number(0, 0, _MOST_POSITIVE, has_default=True)
    min_p: float = _number(0.0, 0.0, 1.0, has_default=True)
    seed: int | None = _number(None, _MOST_NEGATIVE, _MOST_POSITIVE)
    presence_penalty: float = _number(0.0, -2.0, 2.0, edits=True, has_default=True)
    frequency_penalty: float = _number(0.0, -2.0, 2.0, edits=True, has_default=True)
    repetition_penalty: float = _number(1.0, 0.0, above=True, edits=True, has_default=True)
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), metadata=_EDITS)
    allowed_token_ids: tuple[int, ...] | None = field(default=None, metadata=_EDITS)
    bad_words: tuple[tuple[int, ...], ...] = field(default=(), metadata=_EDITS)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = _number(16, 0, has_default=True)
    logprobs: int | None = _number(None, 0, MAX_LOGPROBS)
    prompt_logprobs: int | None = _number(None, 0, MAX_LOGPROBS)
    skip_special_tokens: bool = True
    structured_output: StructuredOutput | None = field(default=None, metadata=_EDITS)
    thinking_budget: ThinkingBudget | None = None
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        if not all(self.bad_words):
            raise RequestError("bad_words contains an empty sequence of tokens", param="bad_words")
        for name, limits in SAMPLING_LIMITS.items():
            if (value := getattr(self, name)) is not None:
                limits.check(name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; it must not exceed max_tokens, {self.max_tokens}",
                param="min_tokens",
            )
        _at_most("logit_bias", len(self.logit_bias), "entries", MAX_LOGIT_BIAS)
        _at_most("stop_token_ids", len(self.stop_token_ids), "token ids", MAX_STOP_TOKEN_IDS)
        for token_id, bias in self.logit_bias:
            BIAS_LIMITS.check(f"logit_bias.{token_id}", bias)
        _at_most("stop", len(self.stop), "strings", MAX_STOP_STRINGS)
        if any(not text for text in self.stop):
            raise RequestError("stop contains an empty string; it would match everywhere", param="stop")
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARS:
            raise RequestError(
                f"stop has a string of {longest} characters; at most {MAX_STOP_CHARS} are allowed", param="stop"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty; no token could be chosen", param="allowed_token_ids")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def edits_logits(self) -> bool:
        """The request changes what the model would say: bias, penalties, allowed or banned tokens, structure."""
        edits: bool = _edits(self) != _NO_EDITS
        return edits

    @property
    def scores_prompt(self) -> bool:
        """Something is read off the forward of the prompt: log probabilities, or a vector."""
        return self.prompt_logprobs is not None or self.pooling is not None

    @property
    def needs_only_logits(self) -> bool:
        """A token follows from its logits, seed and position, and nothing but the token is reported."""
        scored = self.logprobs is not None or self.scores_prompt
        return not self.edits_logits and not scored and self.thinking_budget is None


_DECLARED = fields(SamplingParams)
_EDITING = [each for each in _DECLARED if each.metadata.get("edits")]
_edits = attrgetter(*(each.name for each in _EDITING))
_NO_EDITS = tuple(each.default for each in _EDITING)
BIAS_LIMITS = Limits(low=-100.0, high=100.0, above=False)
PRIORITY_LIMITS = Limits(low=_MOST_NEGATIVE, high=_MOST_POSITIVE, above=False)

# By name: the limits of the numbers; and ours of those that may have a default of the server's.
SAMPLING_LIMITS: dict[str, Limits] = {
    each.name: each.metadata["limits"] for each in _DECLARED if "limits" in each.metadata
}
SAMPLING_DEFAULTS: dict[str, Any] = {
    each.name: each.default for each in _DECLARED if each.metadata.get("has_default")
}


def _at_most(name: str, count: int, what: str, limit: int) -> None:
    if count > limit:
        raise RequestError(f"{name} has {count} {what}; at most {limit} are allowed", param=name)
