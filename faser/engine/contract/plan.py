"""StepPlan and StepResult: what crosses between the control plane and the data plane.

A step that speculates requests drafts first: a DraftPlan goes out and Drafts come back, then the StepPlan says
which of the drafted tokens the step verifies. A step without speculation has only a StepPlan.

    position     0 ........ n - 2 | n - 1   | n ........ n + γ - 1 |
    tokens       |    computed    | pending | drafted, γ of them   |
    rows         |                | row 0   | row 1 ....... row γ  |      row r judges drafted token r + 1

SequenceDelta is what a committed step reports to the front-end. All are plain values without tensors. A slot is a
sequence's line in the data plane's tables (block table, sampling state); it belongs to one sequence from the plan
that starts it until a plan that releases it.

All of these are read-only. Those that every sequence has in every step are not declared frozen, because that would
triple the host time of making them.
"""

from dataclasses import dataclass

from faser.types import (
    FinishReason,
    PositionLogprobs,
    PruneStats,
    SamplingParams,
    SequenceError,
    SpeculationSummary,
    StepTrace,
)

PLACEHOLDER = -1  # a row's input that is not known yet: the token that the step in flight samples for the slot


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStart:
    """A sequence enters the data plane: first admission, or again after a preemption.

    seed: the effective one; the seed and a position determine every random choice of the sequence.
    token_ids: the prompt, then the tokens generated before a preemption. prompt_len: length of the prompt.
    salt: sequences with different salts never draft from each other's text. predicted_token_ids: extra text to
    draft from, given by the request; it is never computed. drafts: False: no drafter hears of the sequence.
    """

    slot: int
    sampling: SamplingParams
    seed: int
    prompt_len: int
    token_ids: tuple[int, ...]
    salt: str | None = None
    predicted_token_ids: tuple[int, ...] = ()
    drafts: bool = True


@dataclass(slots=True, kw_only=True)
class SequenceRows:
    """The rows of one sequence in a step.

    start: position of the first row. token_ids: the rows' inputs, at start, start + 1, … PLACEHOLDER, alone: of a
        sequence for which the step in flight samples a token.
    new_blocks: appended to the slot's block table before the step.
    samples: the rows reach the end of the known tokens, so the last row yields a new token.
    num_drafts: γ; the last γ inputs are drafted. Then the last γ + 1 rows all sample.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    new_blocks: tuple[int, ...]
    samples: bool
    num_drafts: int = 0


@dataclass(slots=True, kw_only=True)
class DraftRequest:
    """Asks for a draft for a sequence that started in an earlier step and has computed all but its last token.

    max_tokens: most tokens to propose, at least 1. unverified: tokens of an earlier draft that a step verifies
    concurrently; the new draft continues them as if they were known. new_blocks: appended to the slot's table
    before drafting, so that it holds all known tokens, the unverified ones and max_tokens more.
    """

    slot: int
    max_tokens: int
    new_blocks: tuple[int, ...]
    unverified: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """When one more drafted token is not worth its cost. Prices are in expected tokens.

    The acceptance of a drafted token is sigmoid(intercept + slope * confidence); survival is the product of these
    over the draft so far. A sequence continues to the next token while its survival exceeds row_price; all
    together continue while their summed excess exceeds pass_prices[m - 1], where m sequences would continue. The
    confidence must be known before the token is sampled, or the token must be a point mass: otherwise the rule
    would bias the output.
    """

    row_price: float
    pass_prices: tuple[float, ...]
    intercept: float
    slope: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """What to draft for step `step`.

    released: slots to release first; the StepPlan does not name them again. stop: for drafters that need a pass
    per token; None: draft max_tokens. share: the part of the processors that drafting gets while step `step`
    verifies the tokens that the drafts continue; None: drafting precedes the step, on all processors. from_text:
    every method of the text look-up drafts for every request, and no other drafter does.
    """

    step: int
    requests: tuple[DraftRequest, ...]
    released: tuple[int, ...] = ()
    stop: StopRule | None = None
    share: float | None = None
    from_text: bool = False


@dataclass(slots=True, kw_only=True)
class Draft:
    """A proposed continuation of one sequence; empty where the drafter has nothing to propose.

    method: the drafter, by its name in config/drafters.py. confidences: one per token, on the method's own
    scale: the margin in nats between the two largest logits (models), an estimated probability (suffix), the
    length of the match (ngram).
    """

    slot: int
    method: str
    token_ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """One draft per request, in their order; of a plan from_text, this for one text method after the other.

    run_s: wall time of drafting, from began_s on. passes: forwards of a draft model. catchup_tokens: rows that
    only refilled the draft model's KV cache. drawn: the tokens were drawn from probabilities; else each is a point
    mass.
    """

    step: int
    drafts: tuple[Draft, ...]
    run_s: float
    began_s: float = 0.0
    passes: int = 0
    catchup_tokens: int = 0
    drawn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, applied in this order: released, started, rows. One plan may release and start the same slot.

    is_async: planned while the step before it is in flight. Then it releases and starts no slot that has rows in
    that step.
    """

    step: int
    released: tuple[int, ...]
    started: tuple[SequenceStart, ...]
    rows: tuple[SequenceRows, ...]
    is_async: bool = False

    @property
    def num_rows(self) -> int:
        return sum([len(each.token_ids) for each in self.rows])

    @property
    def kv_tokens(self) -> int:
        """Cached tokens of all its sequences before the step."""
        return sum([each.start for each in self.rows])

    @property
    def kv_row_tokens(self) -> int:
        """Tokens before the second and every further row of each sequence, added up over these rows.

        Row i of a sequence attends to start + i tokens before it, so n rows add (n - 1) (2 start + n) / 2.
        """
        counted = [(len(each.token_ids), each.start) for each in self.rows if len(each.token_ids) > 1]
        return sum([(count - 1) * (2 * start + count) for count, start in counted]) // 2


@dataclass(slots=True, kw_only=True)
class SequenceResult:
    """The tokens of one sequence of the plan; empty where no row samples.

    With drafts it has the accepted ones and one of the target's own: 1 … num_drafts + 1 tokens.
    num_cut: drafted tokens, the last ones, that the step gave up before it verified them. If the tokens before
    them were all accepted, the bonus token judges the first of these; nothing judges the others.
    logprobs: one per token, if the request asked. prompt_logprobs: of the prompt positions start + 1 …
    start + rows (as far as they are prompt), if the request asked.
    error: why the sequence cannot go on.
    """

    slot: int
    token_ids: tuple[int, ...] = ()
    num_cut: int = 0
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
    error: SequenceError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results in the order of plan.rows. run_s: wall time of the data plane, from began_s on.

    prepared_s: the part of run_s in which the host prepared inputs and the device had no work yet; 0 where the
    host computes. saved_s: seconds that the step is predicted to have taken less because it cut drafts. pruning:
    statistics of early pruning since the start; None without it. draft_kv: leading tokens of each sequence of
    plan.started that a draft model's cache holds already, or whose states a head will never get; empty without
    either.
    """

    step: int
    sequences: tuple[SequenceResult, ...]
    run_s: float
    began_s: float = 0.0
    prepared_s: float = 0.0
    saved_s: float = 0.0
    pruning: PruneStats | None = None
    draft_kv: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class SequenceDelta:
    """What one committed step added to one sample of a request.

    token_ids: in order; a token that ends the sample (end-of-sequence, stop id) is the last of them.
    logprobs: one per token, if the request asked. prompt_logprobs: of the whole prompt, None at position 0, if the
    request asked; in the delta of the first sample that completes the prompt.
    stop_reason: the stop token id that ended it, None for end-of-sequence and length.
    num_cached_tokens, first_scheduled_s: of the sample's first admission; seconds of the scheduler's clock.
    num_preemptions: of the sample so far.
    error: why finish_reason is ERROR. speculation: with the finish_reason, in an engine that speculates.
    trace: if the request asks, and there are tokens.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    error: SequenceError | None = None
    speculation: SpeculationSummary | None = None
    trace: StepTrace | None = None
