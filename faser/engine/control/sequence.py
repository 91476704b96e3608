"""Sequence: the changing state of one sample of a request, and the rule that ends it.

Only the scheduler writes it. A sequence knows no other one and no policy. Its tenant is one of those who share the
engine, with the service it has had; what a tenant is, the front-end decides.
"""

import struct
from dataclasses import replace
from enum import Enum
from hashlib import blake2b

from faser.engine.contract.plan import NO_ADAPTER
from faser.engine.control.kv_cache import SequenceBlocks
from faser.errors import RequestError
from faser.types.answer import FinishReason, PositionLogprobs, SpeculationSummary
from faser.types.request import Request
from faser.types.sampling import SamplingParams

# How much more a generated token counts than a computed prompt token; as in the evaluation of the VTC paper.
_GENERATED_WEIGHT = 2


class Tenant:
    """service: weighted tokens; only grows. num_sequences: its unfinished ones."""

    __slots__ = ("name", "num_sequences", "service")

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_sequences = 0
        self.service = 0

    def prefilled(self, num_tokens: int) -> None:
        """A sequence of its own is admitted. num_tokens: known tokens that are not in the cache."""
        self.service += num_tokens

    def generated(self, num_tokens: int) -> None:
        self.service += _GENERATED_WEIGHT * num_tokens


class Status(Enum):
    """WAITING has no blocks and no slot; RUNNING has both; FINISHED has been reported, or aborted."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


# (priority, seconds when the first token is due, order of arrival): smaller is served sooner; no two are equal.
PriorityKey = tuple[int, float, int]


class Sequence:
    """One sample of a request. It wants a row for every known token that is not computed:

        token_ids   |──────── prompt ────────|──── output ────|
        position    0 ..... num_computed ........ num_tokens
                    | in the cache  | uncomputed |

    The last known token of a sequence that still generates is never computed: its row yields the next one.
    priority_key: its place in the order of service. tenant: whose service its tokens count as. max_total: tokens,
    prompt included, at which it ends. seed: the effective one. generates: False for a request that only scores its
    prompt. needs_only_logits: as in SamplingParams. speculated: what speculation did for it in the slots that it
    has left. decoding_since: seconds of the clock and known tokens from which on its time per token counts; 0
    tokens: not yet. may_end_with: tokens that may end it. reports_only_tokens: until it ends, its deltas
    have nothing but tokens. may_load: its prefix has not been looked for on disk since it began to wait.
    adapter_slot: that its rows use, or used last; NO_ADAPTER: none.
    """

    __slots__ = (
        "adapter_slot",
        "decoding_since",
        "eos_token_ids",
        "finish_reason",
        "first_scheduled_s",
        "generates",
        "index",
        "max_total",
        "may_end_with",
        "may_load",
        "needs_only_logits",
        "num_cached",
        "num_computed",
        "num_preemptions",
        "priority_key",
        "prompt_len",
        "prompt_logprobs",
        "reports_only_tokens",
        "request",
        "sampling",
        "seed",
        "slot",
        "speculated",
        "status",
        "stop_reason",
        "table",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        *,
        priority_key: PriorityKey,
        tenant: Tenant,
        seed: int,
        table: SequenceBlocks,
        max_total: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.request = request
        self.index = index
        self.priority_key = priority_key
        self.tenant = tenant
        self.seed = seed
        self.table = table
        self.max_total = max_total
        self.eos_token_ids = eos_token_ids
        self.sampling = _sampling_of(request, index)
        self.needs_only_logits = self.sampling.needs_only_logits
        self.may_end_with = eos_token_ids.union(self.sampling.stop_token_ids)
        self.reports_only_tokens = (
            self.needs_only_logits and not self.sampling.stop and not request.speculation.trace
        )
        self.prompt_len = len(request.prompt_token_ids)
        self.generates = max_total > self.prompt_len
        self.token_ids = list(request.prompt_token_ids)
        self.num_computed = 0
        self.slot: int | None = None
        self.adapter_slot = NO_ADAPTER
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.first_scheduled_s: float | None = None
        self.num_cached = 0
        self.may_load = True
        self.num_preemptions = 0
        self.prompt_logprobs: list[PositionLogprobs | None] = [None]
        self.speculated: SpeculationSummary | None = None
        self.decoding_since = (0.0, 0)

    @property
    def held_slot(self) -> int:
        """Its slot; only a running sequence has one."""
        assert self.slot is not None
        return self.slot

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def may_draft(self) -> bool:
        """At least two tokens are missing; a step without a draft brings the last one."""
        return self.max_total - len(self.token_ids) > 1

    @property
    def scores_prompt(self) -> bool:
        """Prompt log probabilities are still owed."""
        return self.sampling.prompt_logprobs is not None

    @property
    def needs_prompt(self) -> bool:
        """Every prompt token must be computed: something is still owed that all of their rows go into."""
        pooling = self.sampling.pooling
        return self.scores_prompt or (pooling is not None and pooling.reads_all)

    def advance(self, num_computed: int, token_ids: tuple[int, ...]) -> int:
        """Take a step's tokens up to the one that ends the sequence; returns how many were taken.

        num_computed: where this step's rows ended. Sets finish_reason at the token that ends the sequence and
        drops the tokens after it.
        """
        known, taken = self.token_ids, len(token_ids)
        if len(known) + taken < self.max_total and self.may_end_with.isdisjoint(token_ids):
            known.extend(token_ids)
        else:
            taken = self._take_one_by_one(token_ids)
        last = len(known) - 1 if self.generates else len(known)
        self.num_computed = num_computed if num_computed < last else last
        if not self.generates and self.num_computed == self.prompt_len:
            self.finish_reason = FinishReason.LENGTH
        return taken

    def take_prompt_logprobs(self, scored: tuple[PositionLogprobs, ...]) -> None:
        """Add the log probabilities of the next prompt positions."""
        self.prompt_logprobs.extend(scored)
        assert len(self.prompt_logprobs) <= self.prompt_len, "more scores than prompt tokens"

    def hand_over_prompt_logprobs(self) -> tuple[PositionLogprobs | None, ...] | None:
        """The log probabilities of the whole prompt, once; None while incomplete, or if not requested."""
        if not self.scores_prompt or len(self.prompt_logprobs) < self.prompt_len:
            return None
        scores = tuple(self.prompt_logprobs)
        self.prompt_logprobs = [None]
        self.sampling = replace(self.sampling, prompt_logprobs=None)
        self.needs_only_logits = self.sampling.needs_only_logits
        return scores

    def start_over(self) -> None:
        """Wait again after a preemption: the tokens stay, their KV is lost."""
        self.status = Status.WAITING
        self.num_preemptions += 1
        self.slot = None
        self.num_computed = 0
        self.may_load = True
        self.prompt_logprobs = [None]

    def _take_one_by_one(self, token_ids: tuple[int, ...]) -> int:
        """Up to the one that ends the sequence; how many these are."""
        for taken, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            if self._ends_with(token_id):
                return taken
        return len(token_ids)

    def _ends_with(self, token_id: int) -> bool:
        """Decide whether the token just appended ends it: end-of-sequence first, then stop ids, then length."""
        sampling = self.sampling
        num_before = len(self.token_ids) - 1 - self.prompt_len
        if sampling.structured_output is not None and token_id in self.eos_token_ids:
            self.finish_reason = FinishReason.STOP  # the mask lets it through once it may, or has to, end
        elif num_before >= sampling.min_tokens:
            if token_id in self.eos_token_ids and not sampling.ignore_eos:
                self.finish_reason = FinishReason.STOP
            elif token_id in sampling.stop_token_ids:
                self.finish_reason, self.stop_reason = FinishReason.STOP, token_id
        if self.finish_reason is None and len(self.token_ids) >= self.max_total:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason is not None


def total_tokens(request: Request, *, max_model_len: int, room: int) -> int:
    """Tokens, prompt included, at which each sequence of the request ends. room: tokens that fit into all blocks.

    Without max_tokens a sequence ends at the context length or when all blocks are full. The last token of a
    sequence is never computed, so it needs no block.

    Raises RequestError, with the numbers, when the prompt and the requested tokens cannot fit.
    """
    sampling, prompt_len = request.sampling, len(request.prompt_token_ids)
    if prompt_len == 0:
        raise RequestError("the prompt is empty; it must have at least 1 token", param="prompt")
    if sampling.max_tokens is None:
        param, wanted = "min_tokens", max(1, sampling.min_tokens)
    else:
        param, wanted = "max_tokens", sampling.max_tokens
    asked = f"the prompt has {prompt_len} tokens and at least {wanted} more are asked for"
    if prompt_len + wanted > max_model_len:
        raise RequestError(f"{asked}; the context is {max_model_len} tokens", param=param)
    if prompt_len + max(wanted - 1, 0) > room:
        raise RequestError(f"{asked}; the KV cache has room for {room} tokens", param=param)
    return min(max_model_len, room + 1) if sampling.max_tokens is None else prompt_len + wanted


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request, 63 bits. seed: any signed 64-bit number."""
    digest = blake2b(struct.pack("<qI", seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _sampling_of(request: Request, index: int) -> SamplingParams:
    """Only the first sample reports the log probabilities of the prompt."""
    if index == 0 or request.sampling.prompt_logprobs is None:
        return request.sampling
    return replace(request.sampling, prompt_logprobs=None)
