"""Results of the offline API: answers, vectors and scores, with vLLM's names."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from faser.engine.text.tokenizer import Tokenizer
from faser.types.answer import FinishReason, OutputDelta, PositionLogprobs, SpeculationSummary

_T = TypeVar("_T")
_Other = TypeVar("_Other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log probability of one token, before temperature. rank: 1 is the most likely; None: not known."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt. logprobs: of each token, by token id. speculation: None without drafts."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    speculation: SpeculationSummary | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, delta: OutputDelta, tokenizer: Tokenizer) -> None:
        """Append what has been generated since."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs = (self.logprobs or []) + [by_token(each, tokenizer) for each in delta.logprobs]
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(
                each.logprob for each in delta.logprobs
            )
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.speculation = delta.speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt, SamplingParams.n of them. prompt: None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    finished: bool = True

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """The vector of one text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Return how many numbers the vector has."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOutput:
    """The vector of one text as an array. data: [D] float32."""

    data: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOutput:
    """The score of one pair of texts."""

    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequestOutput(Generic[_T]):
    """The result of one text or pair.

    prompt_token_ids: of both texts of a pair whose vectors are compared.
    """

    request_id: str
    outputs: _T
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True

    def with_outputs(self, outputs: _Other) -> "PoolingRequestOutput[_Other]":
        """Return the result with other numbers."""
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=outputs,
            prompt_token_ids=self.prompt_token_ids,
            num_cached_tokens=self.num_cached_tokens,
        )


def by_token(found: PositionLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The chosen token, then the likeliest ones."""
    chosen = Logprob(logprob=found.logprob, rank=found.rank, decoded_token=tokenizer.token_text(found.token_id))
    top = {
        token_id: Logprob(logprob=logprob, rank=rank, decoded_token=tokenizer.token_text(token_id))
        for rank, (token_id, logprob) in enumerate(found.top, start=1)
    }
    return {found.token_id: chosen} | top
