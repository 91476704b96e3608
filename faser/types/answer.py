"""Answers to requests: additions to samples, why they end, and what speculation did for them."""

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Reasons why a sample ended. The values appear in a metrics label and in the HTTP field."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SequenceError(StrEnum):
    """Reasons why a sequence cannot go on although others of its step can: there is no token to choose next."""

    NOT_FINITE = "the model's logits are not finite numbers"
    NONE_ALLOWED = "no token is allowed"
    GRAMMAR_TOO_SLOW = "its grammar takes longer than 10 s for a token"


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """Log probabilities at one position, before temperature.

    token_id, logprob, rank: of the chosen token; rank 1 is the most likely.
    top: (token id, logprob), most likely first; as many as the request asks for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSummary:
    """Speculation of one finished sample. Counts are numbers of tokens unless stated otherwise.

    steps: steps that gave it tokens. gamma_sum: sum of the gammas verified in them. drafts: steps that verified
    at least one draft token. drafted = pruned + verified; verified = accepted + wasted. accepted_per_position:
    how often the i-th token of a draft was accepted. per_step: (verified, accepted) of each draft, in order;
    empty unless details are requested.
    """

    policy: str
    steps: int = 0
    gamma_sum: int = 0
    drafts: int = 0
    drafted: int = 0
    pruned: int = 0
    verified: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    per_step: tuple[tuple[int, int], ...] = ()

    @property
    def wasted(self) -> int:
        return self.verified - self.accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """Sources of one step's tokens for one sample: first accepted draft tokens, then one of the target's.

    drafter: None: there was no draft. gamma: draft tokens that the step verified. accepted: how many of them. A
    sample that ends within the step has fewer tokens than accepted + 1.
    texts: what each token that the sample takes makes visible; empty until the front-end has the text.
    """

    drafter: str | None = None
    gamma: int = 0
    accepted: int = 0
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """Addition of one step to one sample. index: which of the n samples.

    text can be shorter than the text of token_ids (an unfinished code point, a possible stop string); later deltas
    make up for it. stop_reason: the stop string or token id that ended the sample; None for end-of-sequence and
    length. speculation: in the sample's last delta, if the engine has a drafter. trace: if the request asks.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    speculation: SpeculationSummary | None = None
    trace: StepTrace | None = None

    @property
    def is_last(self) -> bool:
        """Return whether the sample ends with it."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """Everything that one step added to one request.

    num_cached_tokens: prompt tokens of the first sample whose KV came from the prefix cache.
    prompt_logprobs: in the output that completes the prompt, if requested; None at position 0.
    """

    request_id: str
    deltas: tuple[OutputDelta, ...]
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
