"""StepPlan and StepResult: what crosses between control plane and data plane, and the Executor between them.

A step that speculates requests drafts first: a DraftPlan goes out and Drafts come back (drafts.py), then the
StepPlan says which of the drafted tokens the step verifies. A step without speculation has only a StepPlan.

    position     0 ........ n - 2 | n - 1   | n ........ n + γ - 1 |
    tokens       |    computed    | pending | drafted, γ of them   |
    rows         |                | row 0   | row 1 ....... row γ  |      row r verifies drafted token r + 1

What every sequence has in every step is a column: a list with an entry for each sequence. What few have is kept by
position or by slot. All of it is read only once it is made. A slot is a sequence's line in the data plane's tables
(block table, sampling state); it belongs to one sequence from the plan that starts it until a plan that releases
it. StepDeltas are what a committed step reports to the front-end. All are plain values without tensors.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from faser.engine.contract.cache_salt import NO_SALT
from faser.engine.contract.drafts import Drafts
from faser.types.adapter import Adapter
from faser.types.answer import FinishReason, PositionLogprobs, SequenceError, SpeculationSummary, StepTrace
from faser.types.arrays import Ints
from faser.types.pooling import PoolingKind
from faser.types.sampling import SamplingParams
from faser.types.statistics import PruneStats

# A row's input that is not known yet: the token that the step in flight samples for the slot, or a draft token
# that was launched ahead of the step.
PLACEHOLDER = -1
# The adapter slot of a sequence without an adapter.
NO_ADAPTER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStart:
    """A sequence enters the data plane: first admission, or again after a preemption.

    seed: the effective one; the seed and a position determine every random choice of the sequence.
    token_ids: the prompt, then the tokens generated before a preemption. prompt_len: length of the prompt.
    salt: digest of the request's cache_salt and adapter; sequences of different ones never draft from each
    other's text. predicted_token_ids: extra text to draft from, given by the request; it is never computed.
    snapshot: of the recurrent state after the tokens before its first row; None: its first row is its first
    token, or the model has no such states. adapter: slot of its adapter, which stays there as long as the sequence
    has its own slot; NO_ADAPTER: it has none.
    """

    slot: int
    sampling: SamplingParams
    seed: int
    prompt_len: int
    token_ids: tuple[int, ...]
    salt: bytes = NO_SALT
    predicted_token_ids: tuple[int, ...] = ()
    snapshot: int | None = None
    adapter: int = NO_ADAPTER


class StateSave(NamedTuple):
    """A slot's recurrent state, which is after num_tokens tokens, goes into a snapshot."""

    slot: int
    snapshot: int
    num_tokens: int


class AdapterPlacement(NamedTuple):
    """An adapter, by its digest, is in an adapter slot from this plan on; it has been prepared before."""

    slot: int
    digest: str


@dataclass(slots=True)
class SequenceRows:
    """The rows of one sequence of StepRows."""

    slot: int
    start: int
    token_ids: tuple[int, ...]
    samples: bool
    num_drafts: int = 0
    new_blocks: tuple[int, ...] = ()


@dataclass(slots=True)
class StepRows:
    """The rows of a step: S sequences, R rows. Iteration yields SequenceRows: for traces and tests, not for steps.

    slots: [S].
    starts: [S] position of the first row.
    counts: [S] rows, at least 1.
    num_drafts: [S] γ; the last γ inputs are drafted. Then the last γ + 1 rows all sample.
    samples: [S] the rows reach the end of the known tokens, so the last row yields a new token.
    token_ids: [R] the rows' inputs, sequence after sequence, at start, start + 1, … PLACEHOLDER: alone, of a
        sequence for which the step in flight samples a token; else of draft tokens that were launched ahead.
    new_blocks: by slot, blocks to append to the slot's block table before the step.
    """

    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    new_blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[SequenceRows]:
        ends = accumulate(self.counts)
        columns = zip(self.slots, self.starts, self.counts, ends, self.samples, self.num_drafts, strict=True)
        for slot, start, count, end, samples, num_drafts in columns:
            token_ids, new_blocks = tuple(self.token_ids[end - count : end]), self.new_blocks.get(slot, ())
            yield SequenceRows(slot, start, token_ids, samples, num_drafts, new_blocks)

    @classmethod
    def of(cls, *sequences: SequenceRows) -> "StepRows":
        """The columns of these."""
        rows = cls()
        for each in sequences:
            rows.add(
                each.slot,
                each.start,
                each.token_ids,
                samples=each.samples,
                num_drafts=each.num_drafts,
                new_blocks=each.new_blocks,
            )
        return rows

    def add(
        self,
        slot: int,
        start: int,
        token_ids: list[int] | tuple[int, ...],
        *,
        samples: bool,
        num_drafts: int = 0,
        new_blocks: tuple[int, ...] = (),
    ) -> None:
        """Rows of one more sequence, after all others."""
        self.slots.append(slot)
        self.starts.append(start)
        self.counts.append(len(token_ids))
        self.num_drafts.append(num_drafts)
        self.samples.append(samples)
        self.token_ids += token_ids
        if new_blocks:
            self.new_blocks[slot] = new_blocks

    def remove(self, at: int) -> int:
        """Take back the rows of the sequence at this position. Returns how many they were."""
        count, end = self.counts[at], sum(self.counts[: at + 1])
        del self.token_ids[end - count : end]
        self.new_blocks.pop(self.slots[at], None)
        for column in (self.slots, self.starts, self.counts, self.num_drafts, self.samples):
            del column[at]
        return count


class DraftRequest(NamedTuple):
    """Asks for a draft for a sequence that started in an earlier step and has computed all but its last token.

    max_tokens: most tokens to propose, at least 1. unverified: tokens of an earlier draft that a step verifies
    concurrently; the new draft continues them as if they were known. new_blocks: appended to the slot's table
    before drafting, so that a model that drafts finds room for all known tokens, the unverified ones and
    max_tokens more.
    """

    slot: int
    max_tokens: int
    new_blocks: tuple[int, ...] = ()
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
    """Plan of the drafts for step `step`.

    released: slots to release first; the StepPlan does not name them again. stop: for drafters that need a pass
    per token; None: draft max_tokens. share: the part of the processors that drafting gets while step `step`
    verifies the tokens that the drafts continue; None: drafting precedes the step, on all processors. width:
    columns of the table that the drafts come in. from_text: every method of the text look-up drafts for every
    request, and no other drafter does.
    """

    step: int
    width: int
    requests: tuple[DraftRequest, ...]
    released: tuple[int, ...] = ()
    stop: StopRule | None = None
    share: float | None = None
    from_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCheck:
    """Asks whether a drafter's state is what it would be if it were computed anew.

    method: of the drafter. slot: None: what slots share.
    """

    method: str
    slot: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, applied in this order: saves, released, adapters, started, rows. One plan may release and
    start one slot.

    saves: of states as the step before left them, also in slots that are released. is_async: planned while the
    step before it is in flight. Then it releases and starts no slot that has rows in that step.
    """

    step: int
    released: tuple[int, ...]
    started: tuple[SequenceStart, ...]
    rows: StepRows
    saves: tuple[StateSave, ...] = ()
    adapters: tuple[AdapterPlacement, ...] = ()
    is_async: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.rows.token_ids)

    @property
    def num_drafts(self) -> int:
        """Drafted tokens of all its sequences."""
        return sum(self.rows.num_drafts)

    @property
    def kv_tokens(self) -> int:
        """Cached tokens of all its sequences before the step."""
        return sum(self.rows.starts)

    @property
    def kv_row_tokens(self) -> int:
        """Tokens before the second and every further row of each sequence, added up over these rows.

        Row i of a sequence attends to start + i tokens before it, so n rows add (n - 1) (2 start + n) / 2.
        """
        counted = [(n, start) for n, start in zip(self.rows.counts, self.rows.starts, strict=True) if n > 1]
        return sum([(count - 1) * (2 * start + count) for count, start in counted]) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Tokens that a step sampled for the S sequences of plan.rows, in their order, and its timings.

    counts: [S] tokens of each; 0 where no row samples, and where the mask of an answer's structure is not ready:
        without an error, its last row is computed again. With drafts it has the accepted ones and one of the
        target's own: 1 … num_drafts + 1 tokens. A sequence that fails has the accepted ones alone.
    token_ids: sequence after sequence.
    drafts: the drafts that were launched ahead for this step, one for each request of their plan; None: it had
        none. run_s of them ends where they were there.
    run_s: wall time of the data plane, from began_s on.
    prepared_s: the part of run_s in which the host prepared inputs and the device had no work yet; 0 where the
        host computes.
    experts: how many experts' weights it read, those of each layer by themselves; 0 where it has not counted.
    pruning: statistics of early pruning since the start; None without it.
    draft_kv: leading tokens of each sequence of plan.started that a draft model's cache holds already, or whose
        states a head will never get; empty without either.

    By position, of the few sequences that have any:
    errors: why the sequence cannot go on behind its tokens, if none of them ends it.
    num_cut: drafted tokens, the last ones, that the step gave up before it verified them. If the tokens before
        them were all accepted, the bonus token decides the first of these; nothing decides the others.
    logprobs: one per token, if the request asked.
    prompt_logprobs: of the prompt positions start + 1 … start + rows (as far as they are prompt), if the request
    asked.
    pooled: the vector [D] float32 of the prompt that ends with this step, if the request asked.
    """

    step: int
    counts: list[int]
    token_ids: list[int]
    run_s: float
    drafts: Drafts | None = None
    began_s: float = 0.0
    prepared_s: float = 0.0
    experts: int = 0
    pruning: PruneStats | None = None
    draft_kv: tuple[int, ...] = ()
    errors: Mapping[int, SequenceError] = field(default_factory=dict)
    num_cut: Mapping[int, int] = field(default_factory=dict)
    logprobs: Mapping[int, tuple[PositionLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[PositionLogprobs, ...]] = field(default_factory=dict)
    pooled: Mapping[int, bytes] = field(default_factory=dict)

    def by_sequence(self) -> list[tuple[int, ...]]:
        """The tokens of each sequence."""
        token_ids, counts = self.token_ids, self.counts
        if len(token_ids) == len(counts) and 0 not in counts:
            return [*zip(token_ids)]
        found: list[tuple[int, ...]] = []
        begin = 0
        for at, count in [(at, count) for at, count in enumerate(counts) if count != 1]:
            ones = begin + at - len(found)
            found += zip(token_ids[begin:ones])
            begin = ones + count
            found.append(tuple(token_ids[ones:begin]))
        found += zip(token_ids[begin:])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDelta:
    """Addition of one committed step to one sample of a request.

    token_ids: in order; a token that ends the sample (end-of-sequence, stop id) is the last of them.
    logprobs: one per token, if the request asked. prompt_logprobs: of the whole prompt, None at position 0, if the
    request asked; in the delta of the first sample that completes the prompt.
    stop_reason: the stop token id that ended it, None for end-of-sequence and length.
    num_cached_tokens, first_scheduled_s: of the sample's first admission; seconds of the scheduler's clock.
    num_preemptions: of the sample so far.
    error: why finish_reason is ERROR. speculation: with the finish_reason, in an engine that speculates.
    trace: if the request asks, and there are tokens. pooled: with the finish_reason, of a request for a vector.
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
    pooled: bytes | None = None


class StepSpan(NamedTuple):
    """Duration of a step, from its beginning to that of the next one. gap_s: without work for the device."""

    seconds: float
    gap_s: float


@dataclass(slots=True, kw_only=True)
class StepDeltas:
    """Additions of one committed step to S samples. They cross between processes by columns; iterating gives rows.

    counts: [S] tokens of each sample. token_ids: sample after sample. The other lists have S entries, and each
    mapping is by position, of the samples that have such a thing; all as in SequenceDelta.
    """

    request_ids: list[str] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)
    num_preemptions: list[int] = field(default_factory=list)
    first_scheduled_s: list[float | None] = field(default_factory=list)
    logprobs: dict[int, tuple[PositionLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[PositionLogprobs | None, ...]] = field(default_factory=dict)
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)
    stop_reasons: dict[int, int] = field(default_factory=dict)
    errors: dict[int, SequenceError] = field(default_factory=dict)
    speculation: dict[int, SpeculationSummary] = field(default_factory=dict)
    traces: dict[int, StepTrace] = field(default_factory=dict)
    pooled: dict[int, bytes] = field(default_factory=dict)

    def reported(self) -> tuple[list[Any], ...]:
        """Return the columns of what every delta has, but for its tokens."""
        columns = self.request_ids, self.indices, self.num_cached_tokens, self.num_preemptions
        return *columns, self.first_scheduled_s

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[SequenceDelta]:
        begin = 0
        for at, count in enumerate(self.counts):
            end = begin + count
            yield SequenceDelta(
                request_id=self.request_ids[at],
                index=self.indices[at],
                token_ids=tuple(self.token_ids[begin:end]),
                logprobs=self.logprobs.get(at),
                prompt_logprobs=self.prompt_logprobs.get(at),
                finish_reason=self.finish_reasons.get(at),
                stop_reason=self.stop_reasons.get(at),
                num_cached_tokens=self.num_cached_tokens[at],
                num_preemptions=self.num_preemptions[at],
                first_scheduled_s=self.first_scheduled_s[at],
                error=self.errors.get(at),
                speculation=self.speculation.get(at),
                trace=self.traces.get(at),
                pooled=self.pooled.get(at),
            )
            begin = end


class AdapterMemory(Protocol):
    """The data plane's adapters, which plans put into adapter slots. An Executor of adapters has these too."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Read an adapter's files and pack its weights, in any thread, also while steps run.

        It is kept, by its digest, until drop_adapter. Raises RequestError that says why the adapter is unusable:
        a file, field or tensor that is missing, damaged, or not for this model.
        """
        ...

    def drop_adapter(self, digest: str) -> None:
        """Free an adapter that no sequence uses, between two steps; the slot that it is in becomes empty."""
        ...


class Executor(Protocol):
    """Runs plans, one at a time, in the order of their step numbers."""

    def draft(self, plan: DraftPlan, *, during: StepPlan | None = None) -> Drafts:
        """Draft tokens for the requests of the plan. Changes no sequence.

        during: the step that the drafts overlap; it is applied first, and run_overlapped follows with it.
        """
        ...

    def rebuild(self, check: DrafterCheck) -> bool:
        """Compare a drafter's state with a cold one, and take that where they differ. Returns whether they did.

        Called while no step is in flight.
        """
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Apply the plan's releases and starts and run its rows. Results come in the order of plan.rows."""
        ...

    def run_overlapped(self, plan: StepPlan, draft_plan: DraftPlan) -> tuple[StepResult, Drafts]:
        """Run the plan and concurrently draft tokens that continue its own drafts; returns when both are done."""
        ...

    def launch(self, plan: StepPlan) -> "LaunchedStep":
        """Begin a plan that scores no prompt and, if it has drafts, needs only logits; do not wait for it.

        PLACEHOLDER inputs are tokens of the launch before, which need not have been collected, or draft tokens
        that were launched ahead.
        """
        ...

    @property
    def drafts_ahead(self) -> bool:
        """Return whether plans with drafts may be launched, and drafts behind them."""
        ...

    def draft_ahead(self, plan: DraftPlan) -> bool:
        """Launch drafts that go on behind what the plan launched last will bring, and do not wait for either.

        The blocks of each request have room for that as well. The next plan verifies these drafts, or none. False:
        they can be made only once that step has been collected; nothing was launched.
        """
        ...

    def end_drafts(self) -> Ints:
        """Return how many tokens each of the drafts launched ahead has, once the step before has been collected.

        Launches what is left of them, as far as their rule allows. Their tokens come with the result of the step.
        """
        ...

    def collect(self, launched: "LaunchedStep") -> StepResult:
        """Wait for a launched plan. Plans are collected in the order of their launches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A step in flight. Executors add fields for what they need to end it."""

    plan: StepPlan
    began_s: float

    @property
    def late(self) -> Collection[int]:
        """Return the slots that have no row in the next step if that is planned while this one is in flight.

        This step brings them no token, or the mask of their next one is still being computed. Known once the step
        before has been collected.
        """
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingBatch:
    """N texts, R tokens side by side.

    token_ids: [R]. counts: [N] tokens of each text. kinds: [N] how each gets its vector. seconds: [N] where the
    second text of a pair begins; None: it is no pair, or its tokens have one type.
    """

    token_ids: list[int]
    counts: list[int]
    kinds: list[PoolingKind]
    seconds: list[int | None]
