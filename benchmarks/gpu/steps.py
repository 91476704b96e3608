"""Steps of a runner and of an engine, timed on the device's own clock: what is timed need not be waited for.

Of a runner: a forward of a made-up layout, and the choice of a token a row. One is launched before the one before
it is read, as an engine with steps in flight does it, so that times are the device's as long as the host is
faster. This writes into blocks of the cache: no sequence may be running, and what the prefix cache holds of them
is void afterwards.

Of an engine: sequences that run without an end, a fixed number at a time, and the steps that they take while
measured. Prompts are computed when sequences start, or come from the prefix cache.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from faser.engine.engine import Engine
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.tokens import PendingTokens
from faser.errors import EngineError
from faser.kernels.interface.sampling import SamplingMetadata
from faser.kernels.interface.shapes import RowLayout
from faser.types.answer import FinishReason
from faser.types.request import Request
from faser.types.sampling import MAX_LOGPROBS, SamplingParams


class DeviceClock(Protocol):
    """Marks stand in the order of the work that is given to the device."""

    def mark(self) -> Any:
        """Behind all that was given so far. Does not wait."""
        ...

    def between_s(self, marks: Sequence[Any]) -> list[float]:
        """Seconds from each mark to the next; waits for the last one."""
        ...

    def wait(self) -> None:
        """Until all that was given is done."""
        ...


class CudaClock:
    """Clock of events on the current CUDA stream, which the marked work has to be given to."""

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between_s(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        self.wait()
        return [1e-3 * before.elapsed_time(after) for before, after in pairwise(marks)]

    def wait(self) -> None:
        torch.cuda.synchronize()


class HostClock:
    """Clock of a CPU, where all work is done by the time a call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def between_s(self, marks: Sequence[float]) -> list[float]:
        return [after - before for before, after in pairwise(marks)]

    def wait(self) -> None:
        pass


def clock_of(device: str) -> DeviceClock:
    return HostClock() if device == "cpu" else CudaClock()


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Median and the deciles at both ends, in milliseconds."""
    low, middle, high = np.percentile(np.array(seconds) * 1e3, (10, 50, 90))
    return {"median": round(float(middle), 4), "p10": round(float(low), 4), "p90": round(float(high), 4)}


WARM_STEPS = 3  # that are not measured


def batch_of(
    *, sequences: int, rows_each: int, context: int, num_blocks: int, block_size: int, vocab_size: int
) -> RowBatch:
    """Sequences with context tokens in the cache, the last rows_each of them computed in this step.

    As long as there are enough blocks, no block is in two sequences.
    """
    rows = sequences * rows_each
    starts = np.arange(sequences + 1, dtype=np.int32) * rows_each
    width = -(-context // block_size)
    blocks = np.arange(sequences * width, dtype=np.int32) % num_blocks
    positions = np.tile(np.arange(context - rows_each, context, dtype=np.int32), sequences)
    token_ids = np.arange(rows, dtype=np.int64) * 7919 % vocab_size
    return RowBatch(
        token_ids=torch.from_numpy(token_ids),
        layout=RowLayout(
            query_start=torch.from_numpy(starts),
            seq_len=torch.full((sequences,), context, dtype=torch.int32),
            positions=torch.from_numpy(positions),
            block_table=torch.from_numpy(blocks.reshape(sequences, width)),
        ),
        last_rows=starts[1:].astype(np.int64) - 1,
    )


def greedy_requests(positions: np.ndarray[tuple[int], np.dtype[np.int64]]) -> SamplingMetadata:
    count = len(positions)
    return SamplingMetadata(
        temperature=np.zeros(count, np.float32),
        min_p=np.zeros(count),
        top_k=np.zeros(count, np.int64),
        top_p=np.ones(count),
        seeds=np.arange(count, dtype=np.uint64),
        positions=positions,
    )


def steps_s(
    runner: Runner, batch: RowBatch, clock: DeviceClock, repeats: int, *, drafts: bool = False
) -> list[float]:
    """Time steps that run one behind the other, in seconds of the device each. drafts: passes of a draft model."""
    sample = runner.sample_drafts if drafts else runner.sample
    rows = np.arange(len(batch.token_ids), dtype=np.int64)
    requests = greedy_requests(batch.layout.positions.numpy().astype(np.int64) + 1)
    marks = []
    pending: PendingTokens | None = None
    for _ in range(WARM_STEPS + repeats):
        marks.append(clock.mark())
        runner.forward(batch)
        behind = sample(rows, requests)
        if pending is not None:
            pending.wait()
        pending = behind
    marks.append(clock.mark())
    return clock.between_s(marks)[WARM_STEPS:]


Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps of one stretch. host_s: wall time of each call; device_s: from one step's end to the next one's there.

    num_tokens: that came out in wall_s.
    """

    num_tokens: int
    wall_s: float
    host_s: tuple[float, ...]
    device_s: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


class ClosedLoop:
    """One set of sequences at a time: start, look at steps, stop."""

    def __init__(self, engine: Engine, clock: DeviceClock, now: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._clock = clock
        self._now = now
        self._numbers = itertools.count()
        self._running: list[str] = []

    def start(self, prompts: Sequence[Tokens], sampling: Callable[[int], SamplingParams]) -> None:
        """Until every sequence has said its first token. sampling: of the i-th of them."""
        assert not self._running, "the sequences before these are still running"
        turn = next(self._numbers)
        for place, prompt in enumerate(prompts):
            self._add(f"{turn}-{place}", prompt, sampling(place), turn)
        silent = set(self._running)
        while silent:
            silent -= {request_id for request_id, _ in self._step()}

    def _add(self, name: str, prompt: Tokens, sampling: SamplingParams, turn: int) -> None:
        self._engine.add(
            Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, arrival_s=float(turn))
        )
        self._running.append(name)

    def join(self, prompt: Tokens, sampling: SamplingParams) -> Steps:
        """Add one sequence to those that run: the steps until it has said its first token."""
        turn = next(self._numbers)
        self._add(name := f"{turn}-joined", prompt, sampling, turn)
        return self._measured(lambda came, _steps, _spent_s: name not in came)

    def keep_first(self, count: int) -> None:
        """The others are dropped."""
        for name in self._running[count:]:
            self._engine.abort(name)
        del self._running[count:]

    def warm(self) -> None:
        """A few steps that are not measured."""
        for _ in range(WARM_STEPS):
            self._step()

    def look(self, *, seconds: float, steps: int | None = None) -> Steps:
        """Steps until so many are done or so long has gone by."""
        return self._measured(lambda _, done, spent_s: spent_s < seconds and (steps is None or done < steps))

    def _measured(self, goes_on: Callable[[set[str], int, float], bool]) -> Steps:
        """goes_on: by the requests that a step gave tokens to, the number of steps, and their seconds so far."""
        host_s: list[float] = []
        marks, num_tokens, came = [self._clock.mark()], 0, set[str]()
        began_s = ended_s = self._now()
        while not host_s or goes_on(came, len(host_s), ended_s - began_s):
            said = self._step()
            num_tokens += sum(count for _, count in said)
            came = {request_id for request_id, count in said if count}
            marks.append(self._clock.mark())
            last_s, ended_s = ended_s, self._now()
            host_s.append(ended_s - last_s)
        return Steps(
            num_tokens=num_tokens,
            wall_s=ended_s - began_s,
            host_s=tuple(host_s),
            device_s=tuple(self._clock.between_s(marks)),
        )

    def stop(self) -> None:
        self.keep_first(0)
        while self._engine.has_work():
            self._engine.step()

    def _step(self) -> list[tuple[str, int]]:
        """(request, number of its new tokens). Raises EngineError when one ends that should not."""
        came = []
        for delta in self._engine.step():
            if delta.finish_reason is not None and delta.finish_reason is not FinishReason.ABORT:
                raise EngineError(
                    f"{delta.request_id} ended while it was measured: {delta.finish_reason} {delta.error or ''}"
                )
            came.append((delta.request_id, len(delta.token_ids)))
        return came


def answers(engine: Engine, prompts: Sequence[Tokens], sampling: Callable[[int], SamplingParams]) -> list[Tokens]:
    """Return the engine's answers to all prompts, asked at once. Raises EngineError if an answer fails."""
    said: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        request = Request(request_id=f"answer-{place}", prompt_token_ids=prompt, sampling=sampling(place))
        said[request.request_id] = []
        engine.add(request)
    while engine.has_work():
        for delta in engine.step():
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise EngineError(f"{delta.request_id} ended with {delta.finish_reason}: {delta.error}")
            said[delta.request_id] += delta.token_ids
    return [tuple(each) for each in said.values()]


def top_tokens(engine: Engine, prompt: Tokens) -> dict[int, float]:
    """The likeliest next tokens with their log probabilities. Raises EngineError if the engine does not answer."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=MAX_LOGPROBS)
    engine.add(Request(request_id="top", prompt_token_ids=prompt, sampling=sampling))
    found: dict[int, float] = {}
    while engine.has_work():
        for delta in engine.step():
            for each in delta.logprobs or ():
                found = dict(each.top)
    if not found:
        raise EngineError("the engine gave no log probabilities")
    return found


def greedy(_place: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


def sampled(place: int) -> SamplingParams:
    """Return the sampling that chats ask for; every sequence with a seed of its own."""
    return SamplingParams(temperature=0.8, top_p=0.95, seed=place, max_tokens=None, ignore_eos=True)


def made_up_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[Tokens]:
    """No two of them share a block, as far as chance goes."""
    return [
        tuple(np.random.default_rng((seed, place)).integers(vocab_size, size=length).tolist())
        for place in range(count)
    ]
