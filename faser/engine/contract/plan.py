"""StepPlan and StepResult: what crosses between the control plane and the data plane.

A step that speculates asks for drafts first: DraftPlan goes out and Drafts come back, before the StepPlan that
says which of the drafted tokens are verified. A step that does not has neither.

    position     0 ........ n - 2 | n - 1   | n ........ n + γ - 1 |
    tokens       |    computed    | pending | drafted, γ of them   |
    rows         |                | row 0   | row 1 ....... row γ  |      row r judges drafted token r + 1

SequenceDelta is what a committed step says upwards. Plain values, no tensors. A slot is a sequence's line in
the data plane's tables (block table, sampling state); it belongs to one sequence from the plan that starts it
until a plan that releases it.

Nobody writes to any of these. Those that every sequence has in every step are not frozen: that would triple the
host's time for making them.
"""

from dataclasses import dataclass

from faser.types import FinishReason, PositionLogprobs, PruneStats, SamplingParams, SpeculationSummary

PLACEHOLDER = -1  # a row's input that nobody knows yet: what the step in flight chooses for the slot


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStart:
    """A sequence enters the data plane: first admission, or again after a preemption.

    seed: the effective one; it and a position determine every random choice of the sequence.
    token_ids: prompt, then what was generated before a preemption. prompt_len: where the prompt ends.
    salt: sequences with different salts learn nothing from each other's text. predicted_token_ids: text to draft
    from that the sequence has not, and that is never computed.
    """

    slot: int
    sampling: SamplingParams
    seed: int
    prompt_len: int
    token_ids: tuple[int, ...]
    salt: str | None = None
    predicted_token_ids: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class SequenceRows:
    """The rows of one sequence in a step.

    start: position of the first row; token_ids: the rows' inputs, at start, start + 1, … In a plan made while
        another step is in flight there is one, PLACEHOLDER.
    new_blocks: appended to the slot's block table before the step.
    samples: the rows reach the end of the known tokens, so the last row yields a new token.
    num_drafts: γ; so many of the last inputs are drafted. Then the γ + 1 last rows all sample.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    new_blocks: tuple[int, ...]
    samples: bool
    num_drafts: int = 0


@dataclass(slots=True, kw_only=True)
class DraftRequest:
    """A sequence that may draft, started in an earlier step and with exactly its last token not computed.

    max_tokens: most tokens to propose, at least 1. behind: tokens of an earlier draft that a step is verifying
    meanwhile; the new draft continues them as if they were known. new_blocks: appended to the slot's table before
    drafting, so that it holds all known tokens, those behind them and max_tokens more.
    """

    slot: int
    max_tokens: int
    new_blocks: tuple[int, ...]
    unverified: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """When one more drafted token is not worth its cost. Prices are in expected tokens.

    acceptance of a drafted token is sigmoid(intercept + slope * confidence); survival is its product over the
    draft so far. A sequence goes on to the next token while its survival exceeds row_price; all together go on
    while their summed excess exceeds pass_prices[m - 1], m being how many would go on. The confidence must be
    known before the token is sampled, or the token be a point mass: otherwise the rule would bias the output.
    """

    row_price: float
    pass_prices: tuple[float, ...]
    intercept: float
    slope: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """What to draft before step `step`. stop: of drafters that need a pass a token; None: draft max_tokens.

    released: slots given up since the last plan, applied first; the StepPlan does not name them again.
    wants_top_ids: models name the likeliest tokens beside each that they draft; the data plane's own request.
    share: of the processors, for drafting beside step `step`, whose own drafts are behind the requests; None: it
    is before the step, on all of them.
    """

    step: int
    requests: tuple[DraftRequest, ...]
    released: tuple[int, ...] = ()
    stop: StopRule | None = None
    share: float | None = None
    wants_top_ids: bool = False


@dataclass(slots=True, kw_only=True)
class Draft:
    """Proposed continuation of one sequence; empty where there is nothing to propose.

    method: who proposed: draft_model, layer_skip, suffix or ngram. confidences: one per token, of a scale of the
    method's own: the margin in nats between the two largest logits (models), an estimated probability (suffix),
    the length of the match (ngram).
    """

    slot: int
    method: str
    token_ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """In the order of the requests. run_s: wall time of drafting, from began_s on.

    passes: of a draft model. catchup_tokens: rows that only refilled the draft model's KV.
    """

    step: int
    drafts: tuple[Draft, ...]
    run_s: float
    began_s: float = 0.0
    passes: int = 0
    catchup_tokens: int = 0


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
        return sum([len(each.token_ids) for each in self.rows])


@dataclass(slots=True, kw_only=True)
class SequenceResult:
    """What one sequence of the plan got: token_ids is empty where nothing was sampled.

    With drafts it has the accepted ones and one of the target's own: 1 … num_drafts + 1 tokens.
    num_cut: drafted tokens, the last ones, that the step gave up before it verified them. If the tokens before
    them were all accepted, the bonus token judges the first of these; nothing judges the others.
    logprobs: one per token, if the request asked. prompt_logprobs: of the prompt positions start + 1 …
    start + rows (as far as they are prompt), if the request asked.
    error: the sequence cannot go on (its logits are not numbers); the others can.
    """

    slot: int
    token_ids: tuple[int, ...] = ()
    num_cut: int = 0
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results in the order of plan.rows. run_s: wall time of the data plane, from began_s on.

    saved_s: seconds that the step took less, as predicted, because it cut drafts. pruning: counters of what cuts
    drafts, since the start; None in an engine where nothing does.
    """

    step: int
    sequences: tuple[SequenceResult, ...]
    run_s: float
    began_s: float = 0.0
    saved_s: float = 0.0
    pruning: PruneStats | None = None


@dataclass(slots=True, kw_only=True)
class SequenceDelta:
    """What one committed step added to one sample of a request.

    token_ids: in order; the token that ended the sample (end-of-sequence, stop id) is among them, last.
    logprobs: one per token, if the request asked. prompt_logprobs: the whole prompt, None at position 0; in
    the first sample's delta that completes the prompt, if the request asked.
    stop_reason: the stop token id that ended it, None for end-of-sequence and length.
    num_cached_tokens, first_scheduled_s: of the sample's first admission; seconds of the scheduler's clock.
    error: why finish_reason is ERROR. speculation: with the finish_reason, where the engine speculates.
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
    speculation: SpeculationSummary | None = None
