"""The values that cross layers: frozen, plain, without torch.

A Request never changes after it is accepted; the engine answers it with RequestOutputs. Nothing here knows
HTTP, tensors or processes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from faser.errors import RequestError

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

# Reports progress: the name of a stage, how much of it is done, and how much there is; 0 of 0 where unknown.
ProgressCallback = Callable[[str, int, int], None]


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


class EngineState(StrEnum):
    """The states of an engine, in order. RESTARTING: after READY, an engine died or hung and is started again."""

    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    DEAD = "dead"


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
    def needs_only_logits(self) -> bool:
        """A token follows from its logits, seed and position, and nothing but the token is reported."""
        scored = self.logprobs is not None or self.prompt_logprobs is not None
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


DEFAULT_CLASS = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency targets of one request, in milliseconds; None: no target. Raises RequestError unless above 0."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("ttft_ms", self.ttft_ms), ("tpot_ms", self.tpot_ms)):
            if value is not None and not 0 < value < math.inf:
                param = f"speculative.slo.{name}"
                raise RequestError(f"{param} is {value}; it must be a number of milliseconds above 0", param=param)


NO_TARGETS = Slo()


WAIT, REFUSE = "wait", "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """Speculation and targets of one request. max_tokens: draft tokens per step, at most; None: the server's cap;
    0: off.

    trace: its outputs say where each token comes from. admission: what becomes of it if a target cannot be met:
    WAIT, REFUSE, or the name of the class as which it runs instead.
    """

    enabled: bool = True
    max_tokens: int | None = None
    class_name: str = DEFAULT_CLASS
    slo: Slo = NO_TARGETS
    trace: bool = False
    admission: str = WAIT


DEFAULT_SPECULATION = SpeculationParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One accepted request, tokenised. arrival_s: its arrival, by time.monotonic().

    cache_salt: requests with different salts share neither prefix blocks nor past answers to draft from.
    shares_cache: clients that know nothing of each other share those of this request. So its outputs must say
    nothing about them: they come token by token, however many a step accepted, and drafts and cached tokens are
    not reported.
    predicted_token_ids: a text that the answer may repeat; only drafts are copied from it.
    tenant: who shares the engine fairly with others: an API key, or a connection; opaque to the engine.
    deadline_s: by time.monotonic(); an unfinished request is aborted then. None: never.
    due_s: by the same clock, when its first token is due. None: it has no target, or none that can be met.
    is_patient: its targets are out of reach, so the engine serves it as one without.
    expected_tokens: that the client expects of the answer; None: it does not say.
    may_record: its tokens may be kept after its end, in a record of the traffic.
    prompt_tail: tokens at the end of the prompt which later turns of a conversation lack; None: it is not known.

    Raises RequestError for a priority that does not fit 64 bits.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    arrival_s: float = 0.0
    cache_salt: str | None = None
    shares_cache: bool = False
    speculation: SpeculationParams = DEFAULT_SPECULATION
    predicted_token_ids: tuple[int, ...] = ()
    tenant: str = ""
    deadline_s: float | None = None
    due_s: float | None = None
    is_patient: bool = False
    expected_tokens: int | None = None
    may_record: bool = True
    prompt_tail: int | None = None

    def __post_init__(self) -> None:
        PRIORITY_LIMITS.check("priority", self.priority)

    @property
    def token_target_ms(self) -> float | None:
        """Per token after the first, that the engine is to keep; None: there is none."""
        return None if self.is_patient else self.speculation.slo.tpot_ms


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Properties of the loaded model for the front-end. kv_cache_bytes, weight_bytes: sizes in memory.

    separate_layers: how many layers run in single operations, since the backend's own calls do not take them.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    backend: str
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    kv_cache_dtype: str
    weight_bytes: int
    num_parameters: int
    separate_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodStats:
    """Draft tokens of one method since the start. drafted = pruned + verified.

    dropped: pruned tokens that overlapped drafting made useless: they follow a rejected token, or the bonus token
    took their position before they could be verified. cut: pruned tokens that early pruning cut between layers.
    expected: sum of the predicted survival of the verified tokens, to compare with accepted.
    """

    method: str
    drafted: int = 0
    pruned: int = 0
    dropped: int = 0
    cut: int = 0
    verified: int = 0
    accepted: int = 0
    expected: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStats:
    """Seconds spent in one role (draft, verify, step) since the start, predicted by the cost model and measured.

    errors: number of steps with |predicted - measured| / measured up to each of STEP_ERROR_EDGES, then above.
    """

    role: str
    predicted_s: float = 0.0
    measured_s: float = 0.0
    errors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneStats:
    """Early pruning since the start.

    shadow_steps: looked at drafted tokens to learn, and cut no row.
    pruned_steps: looked, and cut flagged rows.
    drafted_rows: of both kinds of steps.
    pruned_rows: drafted rows that were cut.
    wasted_rows: drafted rows that were kept in steps that cut, and rejected.
    verified: drafted tokens that were looked at and then verified.
    flagged: of these, tokens that looked bad.
    false_prunes: flagged tokens that were right.
    """

    shadow_steps: int = 0
    pruned_steps: int = 0
    drafted_rows: int = 0
    pruned_rows: int = 0
    wasted_rows: int = 0
    verified: int = 0
    flagged: int = 0
    false_prunes: int = 0


STEP_ERROR_EDGES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)


class PaidRatio(NamedTuple):
    """Factor by which drafts raise the tokens per second at a load, as measured in groups of steps.

    sequences: the fewest and the most that decode at this load; None: of steps with prompts. low, high: of the
    95 % interval of ratio. drafts: whether sequences draft for it; None: it is being measured.
    """

    sequences: tuple[int, int] | None
    ratio: float
    low: float
    high: float
    drafts: bool | None

    @property
    def load(self) -> str:
        """Its name in reports: 4-7, 1, or prompts."""
        if self.sequences is None:
            return "prompts"
        fewest, most = self.sequences
        return str(fewest) if fewest == most else f"{fewest}-{most}"


class SpeculationBalance(NamedTuple):
    """Seconds that drafts have saved since the engine started, and by how much the estimate may be off.

    At all times it is off by less, with a probability of 95 %: drafts cannot have cost more than most_lost_s.
    """

    saved_s: float
    error_s: float

    @property
    def most_lost_s(self) -> float:
        return max(self.error_s - self.saved_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Counters since the start of the engine.

    num_drafts: sequence-steps with at least one verified draft token. accepted_at: by class, [cap] how often the
    i-th token of a draft was accepted. gammas: by class, how often each verified gamma 0 … cap was chosen. mode:
    of the last step: plain, serial, or the name of the partition on which drafting overlapped it. draft_share: the
    drafter's share of the processors in an overlapped step; 0 otherwise. overlap_s: time in which both lanes were
    busy. partition: what divides the processors; serial: they are not divided. partition_fallback: why it is not
    the configured one; else empty. mode_steps: steps by mode. switches: (from, to, times). bypasses: (reason,
    sequence-steps) without a draft, reason one of load, gain, memory, request. decide_s: host time of policy and
    bookkeeping. catchup_tokens: draft KV recomputed after a pause. pruning: None if early pruning is off. paid: by
    load, lowest first. balance: what drafts have saved; None: it is not measured. rebuilds: (drafter, cause, how
    many of its states were damaged and replaced).
    """

    policy: str
    method: str
    num_drafts: int = 0
    methods: tuple[MethodStats, ...] = ()
    accepted_at: tuple[tuple[str, tuple[int, ...]], ...] = ()
    gammas: tuple[tuple[str, tuple[int, ...]], ...] = ()
    mode: str = "plain"
    mode_steps: tuple[tuple[str, int], ...] = ()
    switches: tuple[tuple[str, str, int], ...] = ()
    bypasses: tuple[tuple[str, int], ...] = ()
    roles: tuple[RoleStats, ...] = ()
    decide_s: float = 0.0
    catchup_tokens: int = 0
    draft_share: float = 0.0
    overlap_s: float = 0.0
    partition: str = "serial"
    partition_fallback: str = ""
    pruning: PruneStats | None = None
    paid: tuple[PaidRatio, ...] = ()
    balance: SpeculationBalance | None = None
    rebuilds: tuple[tuple[str, str, int], ...] = ()

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Count how often the i-th token of a draft was accepted, in all classes: [cap]."""
        return tuple(map(sum, zip(*(counts for _, counts in self.accepted_at), strict=True)))


class Decision(StrEnum):
    """Decisions on a request with targets when it arrives. MET: all of them should be met.

    RESTORED: later; targets that were given up should be met after all.
    """

    MET = "met"
    WAITS = "waits"
    REFUSED = "refused"
    DEGRADED = "degraded"
    RESTORED = "restored"


class Target(StrEnum):
    """The target that a decision is about. NONE: all are met."""

    NONE = "none"
    TTFT = "ttft"
    TPOT = "tpot"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassOutlook:
    """Share of the requests of one class with targets that should meet them at the present rate.

    headroom: by share of requests that meet their targets, how many more requests a second of all classes may come
    until only that share of this class does; below 0 where fewer do already.
    """

    class_name: str
    attainment: float
    headroom: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Expectations of the latency model at the present rate, in requests a second; times in seconds.

    is_known: False: the load is beyond what the model knows, and times are not reported.
    """

    rate: float
    capacity: float
    is_known: bool
    ttft_s: float = 0.0
    ttft_p99_s: float = 0.0
    tpot_s: float = 0.0
    latency_s: float = 0.0
    latency_p99_s: float = 0.0
    classes: tuple[ClassOutlook, ...] = ()

    @property
    def utilisation(self) -> float:
        return self.rate / self.capacity if self.capacity else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditStats:
    """Replays of answers without drafts since the start. backend: the name of the kernels.

    checks: finished replays. divergences: those whose tokens differed. skipped: answers that were drawn for a
    replay and are too long for one, or found the queue full.
    """

    backend: str
    checks: int = 0
    divergences: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDiskStats:
    """KV on disk. queries, hits: tokens that were looked up there, because the prefix cache did not have them.

    num_bytes: that it takes now. read_bytes, written_bytes: since the start of the engine.
    """

    queries: int = 0
    hits: int = 0
    num_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot after a step. Counters count from the start of the engine; the other values are current.

    prompt_tokens: of the prompts that are computed, each request's once. prompt_tokens_cached: those of them that
    the prefix cache had.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    last_step_rows: int = 0
    last_step_s: float = 0.0
    speculation: SpeculationStats | None = None
    audit: AuditStats | None = None
    kv_disk: KvDiskStats | None = None
