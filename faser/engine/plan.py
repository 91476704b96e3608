"""StepPlan and StepResult: the only two things that cross between the control plane and the data plane.

SequenceDelta is what a committed step says upwards. Plain values, no tensors. A slot is a sequence's line in
the data plane's tables (block table, sampling state); it belongs to one sequence from the plan that starts it
until a plan that releases it.
"""

from dataclasses import dataclass

from faser.types import FinishReason, PositionLogprobs, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStart:
    """A sequence enters the data plane: first admission, or again after a preemption.

    seed: the effective one; it and a position determine every random choice of the sequence.
    token_ids: prompt, then what was generated before a preemption. prompt_len: where the prompt ends.
    """

    slot: int
    sampling: SamplingParams
    seed: int
    prompt_len: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """The rows of one sequence in a step.

    start: position of the first row; token_ids: the rows' inputs, at start, start + 1, …
    new_blocks: appended to the slot's block table before the step.
    samples: the rows reach the end of the known tokens, so the last row yields a new token.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    new_blocks: tuple[int, ...]
    samples: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. Applied in this order: released, started, rows. A slot may be released and started in one plan.

    A plan without rows is only sent to release slots.
    """

    step: int
    released: tuple[int, ...]
    started: tuple[SequenceStart, ...]
    rows: tuple[SequenceRows, ...]

    @property
    def num_rows(self) -> int:
        return sum(len(each.token_ids) for each in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceResult:
    """What one sequence of the plan got: token_ids is empty where nothing was sampled.

    logprobs: one per token, if the request asked. prompt_logprobs: of the prompt positions start + 1 …
    start + rows (as far as they are prompt), if the request asked.
    error: the sequence cannot go on (its logits are not numbers); the others can.
    """

    slot: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results in the order of plan.rows. run_s: wall time of the data plane."""

    step: int
    sequences: tuple[SequenceResult, ...]
    run_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDelta:
    """What one committed step added to one sample of a request.

    token_ids: in order; the token that ended the sample (end-of-sequence, stop id) is among them, last.
    logprobs: one per token, if the request asked. prompt_logprobs: the whole prompt, None at position 0; in
    the first sample's delta that completes the prompt, if the request asked.
    stop_reason: the stop token id that ended it, None for end-of-sequence and length.
    num_cached_tokens, first_scheduled_s: of the sample's first admission; seconds of the scheduler's clock.
    error: why finish_reason is ERROR.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    first_scheduled_s: float | None = None
    error: str | None = None
