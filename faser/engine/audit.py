"""Auditor: replays answers without drafts while the engine is idle, and compares token for token.

Speculation must not change a token. The Auditor checks that on the requests of a running server: it decodes the
same prompt again, one token per step, and compares what comes with what was answered.

It stays out of the way of requests. A replay runs only in steps of an engine that has had nothing to do for a
while, a few rows at a time, so a request that arrives waits for one such step at most, and pauses whenever there
is work. Its slot and its KV blocks are its own, and its steps go past the scheduler and the drafter: no request's
prefix is evicted, no counter counts them, and nothing learns from them. The number of answers that wait for a
replay is bounded."""

import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from faser.engine.contract.companion import Companion
from faser.engine.contract.plan import (
    NO_ADAPTER,
    AdapterPlacement,
    Executor,
    SequenceDelta,
    SequenceStart,
    StepDeltas,
    StepPlan,
    StepRows,
)
from faser.engine.control.adapters import AdapterSlots
from faser.engine.control.sequence import sample_seed
from faser.types.answer import FinishReason
from faser.types.request import Request
from faser.types.statistics import AuditStats, EngineStats

_log = logging.getLogger("faser.audit")

_IDLE_S = 0.05  # a client that asks again at once is not kept waiting
_ROWS = 16  # of a step; about as fast as a step with one
_MAX_WAITING = 64  # answers that wait for their replay


@dataclass(slots=True, kw_only=True)
class _Answer:
    """One sample of a request. token_ids: prompt and answer, as far as it has come."""

    request: Request
    index: int
    token_ids: list[int]


@dataclass(slots=True, kw_only=True)
class _Replay:
    """num_computed: of the answer's tokens. num_blocks: that the slot has."""

    answer: _Answer
    num_computed: int = 0
    num_blocks: int = 0


class Auditor(Companion):
    """rate: share of the comparable requests that are replayed, 0 to 1.

    executor: runs steps of which no drafter hears. slot, blocks: that no sequence uses. compares_sampled: sampled
    answers are equal with and without drafts; else only greedy ones are compared. backend: the name of the
    kernels, for the statistics. adapters: while the engine is idle, none of their slots is in use, and a replay
    takes the first; None: requests have no adapters. clock: seconds.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        rate: float,
        slot: int,
        blocks: tuple[int, ...],
        block_size: int,
        compares_sampled: bool,
        backend: str,
        adapters: AdapterSlots | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._rate = rate
        self._slot = slot
        self._blocks = blocks
        self._block_size = block_size
        self._compares_sampled = compares_sampled
        self._adapters = adapters
        self._random = random.Random(seed)
        self._clock = clock
        self._open: dict[str, dict[int, _Answer]] = {}  # drawn requests that run, by id and sample
        self._waiting: deque[_Answer] = deque()
        self._replay: _Replay | None = None
        self._idle_since: float | None = None
        self._num_steps = 0
        self._stats = AuditStats(backend=backend)

    def add_to(self, stats: EngineStats) -> EngineStats:
        return replace(stats, audit=self._stats)

    def admit(self, request: Request) -> Request:
        """Pause for a request, and follow it if the draw says so; returns it with the seed that a replay needs."""
        self._idle_since = None
        sampling = request.sampling
        if not (self._compares_sampled or sampling.greedy) or self._random.random() >= self._rate:
            return request
        if sampling.seed is None:
            request = replace(request, sampling=replace(sampling, seed=self._random.getrandbits(63)))
        self._open[request.request_id] = {
            index: _Answer(request=request, index=index, token_ids=[*request.prompt_token_ids])
            for index in range(sampling.n)
        }
        return request

    def stepped(self, deltas: StepDeltas) -> None:
        """Take in the tokens of a step."""
        if not self._open:
            return
        for delta in deltas:
            answer = self._open.get(delta.request_id, {}).get(delta.index)
            if answer is not None:
                answer.token_ids += delta.token_ids
                if delta.finish_reason is not None:
                    self._close(answer, is_comparable=_is_comparable(delta))

    def abort(self, request_id: str, index: int | None) -> None:
        """Close an answer that the front-end drops: at a stop string, or because its client has left."""
        for answer in list(self._open.get(request_id, {}).values()):
            if index in (None, answer.index):
                self._close(answer, is_comparable=bool(answer.request.sampling.stop))

    def adapter_dropped(self, digest: str) -> None:
        """Skip the answers of an adapter that has left the memory."""
        kept = deque(each for each in self._waiting if _adapter_digest(each) != digest)
        num_skipped, self._waiting = len(self._waiting) - len(kept), kept
        if self._replay is not None and _adapter_digest(self._replay.answer) == digest:
            num_skipped, self._replay = num_skipped + 1, None
        self._stats = replace(self._stats, skipped=self._stats.skipped + num_skipped)

    def wait_s(self) -> float | None:
        """Seconds until a step may run, if no request arrives; None: there is nothing to replay."""
        if self._replay is None and not self._waiting:
            return None
        if self._idle_since is None:
            return _IDLE_S
        return max(0.0, self._idle_since + _IDLE_S - self._clock())

    def idle(self) -> None:
        """Once the engine has been idle for a while, run one step of a replay."""
        now = self._clock()
        if self._idle_since is None:
            self._idle_since = now
        if (self._replay is None and not self._waiting) or now - self._idle_since < _IDLE_S:
            return
        replay = self._replay = self._replay or _Replay(answer=self._waiting.popleft())
        prompt_len = len(replay.answer.request.prompt_token_ids)
        end = min(replay.num_computed + _ROWS, max(replay.num_computed + 1, prompt_len))
        result = self._executor.run(self._plan(replay, end, samples=end >= prompt_len))
        replay.num_computed = end
        if end >= prompt_len and self._compare(replay.answer, end, tuple(result.token_ids)):
            self._replay = None

    def _close(self, answer: _Answer, *, is_comparable: bool) -> None:
        """Keep an answer that has ended for its replay, if there is room for it."""
        request_id, num_tokens = answer.request.request_id, len(answer.token_ids)
        del self._open[request_id][answer.index]
        if not self._open[request_id]:
            del self._open[request_id]
        if not is_comparable or num_tokens == len(answer.request.prompt_token_ids):
            return
        if len(self._waiting) >= _MAX_WAITING or num_tokens > len(self._blocks) * self._block_size:
            self._stats = replace(self._stats, skipped=self._stats.skipped + 1)
            return
        self._waiting.append(answer)

    def _plan(self, replay: _Replay, end: int, *, samples: bool) -> StepPlan:
        """Plan the next rows of a replay; its first step releases what the replay before it left in the slot."""
        request, index, begin = replay.answer.request, replay.answer.index, replay.num_computed
        missing = -(-end // self._block_size) - replay.num_blocks
        new_blocks = self._blocks[replay.num_blocks : replay.num_blocks + missing]
        replay.num_blocks += missing
        prompt_len, given = len(request.prompt_token_ids), request.sampling.seed
        assert given is not None, "admit has given it a seed"
        adapter: int = NO_ADAPTER
        placed: tuple[AdapterPlacement, ...] = ()
        if request.adapter is not None and self._adapters is not None:  # others may have had the slot meanwhile
            adapter, placed = 0, self._adapters.put(0, request.adapter.digest)
        start = SequenceStart(
            slot=self._slot,
            sampling=replace(request.sampling, n=1, logprobs=None, prompt_logprobs=None),
            seed=sample_seed(given, index),
            prompt_len=prompt_len,
            token_ids=request.prompt_token_ids,
            adapter=adapter,
        )
        rows = StepRows()
        rows.add(
            self._slot,
            begin,
            tuple(replay.answer.token_ids[begin:end]),
            new_blocks=new_blocks,
            samples=samples,
        )
        self._num_steps += 1
        first = not begin
        return StepPlan(
            step=self._num_steps,
            released=(self._slot,) if first and self._num_steps > 1 else (),
            adapters=placed,
            started=(start,) if first else (),
            rows=rows,
        )

    def _compare(self, answer: _Answer, at: int, token_ids: tuple[int, ...]) -> bool:
        """Compare the token at a position; returns whether the replay has ended."""
        equal = token_ids == tuple(answer.token_ids[at : at + 1])
        if equal and at + 1 < len(answer.token_ids):
            return False
        self._stats = replace(self._stats, checks=self._stats.checks + 1)
        if not equal:
            self._stats = replace(self._stats, divergences=self._stats.divergences + 1)
            prompt_len = len(answer.request.prompt_token_ids)
            _log.warning(
                "request %s, sample %d: the answer with drafts differs from the one without at token %d of %d "
                "(%s kernels)",
                answer.request.request_id,
                answer.index,
                at - prompt_len,
                len(answer.token_ids) - prompt_len,
                self._stats.backend,
            )
        return True


def _adapter_digest(answer: _Answer) -> str | None:
    adapter = answer.request.adapter
    return None if adapter is None else adapter.digest


def _is_comparable(delta: SequenceDelta) -> bool:
    """Return whether an answer was drafted for, and ended as requests do."""
    ended = delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    return ended and delta.speculation is not None and delta.speculation.verified > 0
