"""Auditor: replays finished answers without drafts while the engine is idle, and compares token for token.

Speculation must not change a token. The Auditor checks that on the requests of a running server: it decodes the
same prompt again, one token per step, and compares what comes with what was answered.

It stays out of the way of requests. A replay runs only in steps of an engine that has had nothing to do for a
while, a few rows at a time, so a request that arrives waits for one such step at most. A replay pauses whenever
there is work, and starts over if its slot is needed. Its KV blocks are its own, and its steps go past the
scheduler: no request's prefix is evicted, no counter counts them, and neither the policy nor the cost model nor a
drafter learns from them. The number of answers that wait for a replay is bounded.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from faser.engine.contract.plan import Executor, SequenceStart, StepPlan, StepRows
from faser.engine.control.scheduler import Scheduler
from faser.engine.control.sequence import Sequence
from faser.types import AuditStats, FinishReason, SamplingParams

_log = logging.getLogger("faser.audit")

_IDLE_S = 0.05  # a client that asks again at once is not kept waiting
_ROWS = 16  # of a step; about as fast as a step with one
_MAX_WAITING = 64  # answers that wait for their replay


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """One sample of a finished request. token_ids: prompt and answer."""

    request_id: str
    index: int
    sampling: SamplingParams
    seed: int
    prompt_len: int
    token_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Replay:
    """A replay that has a slot. num_computed: of the answer's tokens. num_blocks: that its slot has."""

    answer: _Answer
    slot: int
    num_computed: int = 0
    num_blocks: int = 0


class Auditor:
    """rate: share of the comparable answers that are replayed, 0 to 1. blocks: KV blocks that no sequence uses.

    compares_sampled: sampled answers are equal with and without drafts; else only greedy ones are compared.
    backend: the name of the kernels, for the statistics. clock: seconds.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        rate: float,
        blocks: tuple[int, ...],
        block_size: int,
        compares_sampled: bool,
        backend: str,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._rate = rate
        self._blocks = blocks
        self._block_size = block_size
        self._compares_sampled = compares_sampled
        self._random = random.Random(seed)
        self._clock = clock
        self._waiting: deque[_Answer] = deque()
        self._replay: _Replay | None = None
        self._idle_since: float | None = None
        self._stats = AuditStats(backend=backend)
        scheduler.on_finished = self.note

    @property
    def stats(self) -> AuditStats:
        return self._stats

    def note(self, sequence: Sequence) -> None:
        """A sequence has ended: replay it later, if it is one to compare and the draw says so."""
        if not self._is_comparable(sequence) or self._random.random() >= self._rate:
            return
        if len(self._waiting) >= _MAX_WAITING or sequence.num_tokens > len(self._blocks) * self._block_size:
            self._stats = replace(self._stats, skipped=self._stats.skipped + 1)
            return
        request = sequence.request
        self._waiting.append(
            _Answer(
                request_id=request.request_id,
                index=sequence.index,
                sampling=replace(request.sampling, n=1, logprobs=None, prompt_logprobs=None),
                seed=sequence.seed,
                prompt_len=sequence.prompt_len,
                token_ids=tuple(sequence.token_ids),
            )
        )

    def wait_s(self) -> float | None:
        """Seconds until a step may run, if no request arrives; None: there is nothing to replay."""
        if self._replay is None and not self._waiting:
            return None
        if self._idle_since is None:
            return _IDLE_S
        return max(0.0, self._idle_since + _IDLE_S - self._clock())

    def pause(self) -> None:
        """There is work: the engine is not idle."""
        self._idle_since = None

    def step(self) -> None:
        """The engine has no work: after a while, run one step of a replay."""
        now = self._clock()
        if self._idle_since is None:
            self._idle_since = now
        if (self._replay is None and not self._waiting) or now - self._idle_since < _IDLE_S:
            return
        replay = self._current()
        end = min(replay.num_computed + _ROWS, max(replay.num_computed + 1, replay.answer.prompt_len))
        result = self._executor.run(self._plan(replay, end))
        replay.num_computed = end
        if end >= replay.answer.prompt_len:
            self._compare(replay, tuple(result.token_ids))

    def _is_comparable(self, sequence: Sequence) -> bool:
        """It was drafted for, it ended as requests do, and its tokens follow from prompt, parameters and seed."""
        drafted = sequence.speculated is not None and sequence.speculated.verified > 0
        reason = sequence.finish_reason
        # The front-end finds stop strings, and then aborts.
        ended = reason in (FinishReason.STOP, FinishReason.LENGTH) or bool(sequence.sampling.stop)
        determined = self._compares_sampled or sequence.sampling.greedy
        return drafted and determined and ended and sequence.num_tokens > sequence.prompt_len

    def _current(self) -> _Replay:
        """The replay that goes on. One whose slot the scheduler has taken back starts over."""
        lent = self._scheduler.lent_slot
        if self._replay is None or self._replay.slot != lent:
            answer = self._waiting.popleft() if self._replay is None else self._replay.answer
            self._replay = _Replay(answer=answer, slot=self._scheduler.lend_slot() if lent is None else lent)
        return self._replay

    def _plan(self, replay: _Replay, end: int) -> StepPlan:
        answer, begin = replay.answer, replay.num_computed
        missing = -(-end // self._block_size) - replay.num_blocks
        new_blocks = self._blocks[replay.num_blocks : replay.num_blocks + missing]
        replay.num_blocks += missing
        start = SequenceStart(
            slot=replay.slot,
            sampling=answer.sampling,
            seed=answer.seed,
            prompt_len=answer.prompt_len,
            token_ids=answer.token_ids[: answer.prompt_len],
            drafts=False,
        )
        rows = StepRows()
        rows.add(
            replay.slot,
            begin,
            answer.token_ids[begin:end],
            new_blocks=new_blocks,
            samples=end >= answer.prompt_len,
        )
        step, saves, released = self._scheduler.begin_idle_step()
        return StepPlan(step=step, saves=saves, released=released, started=() if begin else (start,), rows=rows)

    def _compare(self, replay: _Replay, token_ids: tuple[int, ...]) -> None:
        answer, at = replay.answer, replay.num_computed
        equal = token_ids == answer.token_ids[at : at + 1]
        if equal and at + 1 < len(answer.token_ids):
            return
        self._stats = replace(self._stats, checks=self._stats.checks + 1)
        if not equal:
            self._stats = replace(self._stats, divergences=self._stats.divergences + 1)
            _log.warning(
                "request %s, sample %d: the answer with drafts differs from the one without at token %d of %d "
                "(%s kernels)",
                answer.request_id,
                answer.index,
                at - answer.prompt_len,
                len(answer.token_ids) - answer.prompt_len,
                self._stats.backend,
            )
        self._scheduler.take_slot_back()
        self._replay = None
