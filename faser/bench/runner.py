"""run: answers all requests of a cell with one policy, at a fixed concurrency, and measures every step.

Owns the closed loop and takes differences of the engine's counters. Reads time from the caller's clock. Knows
neither models nor files.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from faser.bench.workload import BenchRequest
from faser.engine.contract.plan import SequenceDelta
from faser.errors import EngineError
from faser.types import EngineStats, FinishReason, Request, SpeculationStats

Tokens = tuple[int, ...]

_STEP = "step"  # the cost model's name for a whole step of the target model


class SteppedEngine(Protocol):
    """An engine in this process whose caller runs each step; see faser.engine.engine.Engine."""

    def add(self, request: Request) -> None: ...

    def step(self) -> tuple[SequenceDelta, ...]: ...

    def has_work(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def use_policy(
        self, name: str, gamma: int | None = None, *, forget: bool = True, overlap: str | None = None
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How a run asks its requests. include_prefill: prompts are not taken from the prefix cache."""

    concurrency: int
    temperature: float
    output_tokens: int
    include_prefill: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One step of the target model. at_s: since the start of the run. gamma: mean over its sequences."""

    at_s: float
    gamma: float
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Measurements of one run. answers: in the order of the requests. decide_s: host time of the policy.

    draft_counts[k - 1]: drafts of k or more tokens; accepted_counts[k - 1]: those whose first k tokens were
    accepted. window_tokens, window_s: of the steps at full concurrency, up to the step that first leaves fewer
    requests than that. Beyond the window the speed would depend on which answers happen to end last.
    """

    answers: tuple[Tokens, ...]
    wall_s: float
    window_tokens: int
    window_s: float
    num_steps: int
    gamma_mean: float
    drafted: int
    verified: int
    accepted: int
    draft_counts: tuple[int, ...]
    accepted_counts: tuple[int, ...]
    decide_s: float
    points: tuple[StepPoint, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def tokens_per_s(self) -> float:
        return self.window_tokens / self.window_s


@dataclass(slots=True)
class _Window:
    """The steps at full concurrency. Open while that many requests are unfinished."""

    concurrency: int
    num_tokens: int = 0
    seconds: float = 0.0
    is_open: bool = True

    def step(self, num_tokens: int, num_left: int, at_s: float) -> None:
        """num_left: unfinished requests, including those not yet submitted."""
        if self.is_open:
            self.num_tokens += num_tokens
            self.seconds = at_s
            self.is_open = num_left >= self.concurrency


def run(
    engine: SteppedEngine,
    requests: Sequence[BenchRequest],
    conditions: Conditions,
    *,
    name: str,
    now: Callable[[], float] = time.perf_counter,
) -> RunResult:
    """Answer all requests, `concurrency` at a time. name: unique to the run.

    Raises EngineError if an answer fails or the engine has no drafter.
    """
    salt = name if conditions.include_prefill else None
    waiting = iter(enumerate(requests))
    answers: dict[str, list[int]] = {}
    before = _speculation(engine)
    recorder = _StepRecorder(before)
    began_s, num_steps, num_ended = now(), 0, 0
    window = _Window(min(conditions.concurrency, len(requests)))

    def admit(count: int) -> None:
        for index, each in islice(waiting, count):
            request = each.request(
                f"{name}/{index}",
                temperature=conditions.temperature,
                output_tokens=conditions.output_tokens,
                cache_salt=salt,
            )
            answers[request.request_id] = []
            engine.add(request)

    admit(conditions.concurrency)
    while engine.has_work():
        deltas = engine.step()
        num_steps += 1
        for delta in deltas:
            answers[delta.request_id] += delta.token_ids
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise EngineError(f"{delta.request_id} ended with {delta.finish_reason}: {delta.error}")
        num_ended += sum(delta.finish_reason is not None for delta in deltas)
        window.step(sum(len(delta.token_ids) for delta in deltas), len(requests) - num_ended, now() - began_s)
        recorder.step(
            _speculation(engine),
            num_sequences=sum(bool(delta.token_ids) for delta in deltas),
            at_s=now() - began_s,
        )
        admit(sum(delta.finish_reason is not None for delta in deltas))
    wall_s = now() - began_s
    return _result(
        before,
        recorder.last,
        tuple(map(tuple, answers.values())),
        wall_s,
        window,
        num_steps,
        tuple(recorder.points),
    )


def _result(
    before: SpeculationStats,
    after: SpeculationStats,
    answers: tuple[Tokens, ...],
    wall_s: float,
    window: _Window,
    num_steps: int,
    points: tuple[StepPoint, ...],
) -> RunResult:
    gammas = _difference(_gammas(before), _gammas(after))
    return RunResult(
        answers=answers,
        wall_s=wall_s,
        window_tokens=window.num_tokens,
        window_s=window.seconds,
        num_steps=num_steps,
        gamma_mean=sum(gamma * times for gamma, times in enumerate(gammas)) / max(sum(gammas), 1),
        drafted=_total(after, "drafted") - _total(before, "drafted"),
        verified=_total(after, "verified") - _total(before, "verified"),
        accepted=_total(after, "accepted") - _total(before, "accepted"),
        draft_counts=tuple(sum(gammas[depth:]) for depth in range(1, len(gammas))),
        accepted_counts=_difference(before.accepted_per_position, after.accepted_per_position),
        decide_s=after.decide_s - before.decide_s,
        points=points,
    )


@dataclass(slots=True)
class _StepRecorder:
    """Records a StepPoint per step, from differences of the counters. last: the latest counters."""

    last: SpeculationStats
    points: list[StepPoint] = field(default_factory=list)

    def step(self, stats: SpeculationStats, *, num_sequences: int, at_s: float) -> None:
        """num_sequences: those that received tokens in this step."""
        (predicted, measured), (predicted_now, measured_now) = _step_s(self.last), _step_s(stats)
        verified = _total(stats, "verified") - _total(self.last, "verified")
        self.points.append(
            StepPoint(
                at_s=at_s,
                gamma=verified / max(num_sequences, 1),
                predicted_s=predicted_now - predicted,
                measured_s=measured_now - measured,
            )
        )
        self.last = stats


def _speculation(engine: SteppedEngine) -> SpeculationStats:
    stats = engine.stats().speculation
    if stats is None:
        raise EngineError("the engine was built without a drafter; there is no speculation to measure")
    return stats


def _total(stats: SpeculationStats, counter: str) -> int:
    return sum(getattr(each, counter) for each in stats.methods)


def _gammas(stats: SpeculationStats) -> Tokens:
    """[cap + 1] how often each gamma was verified, summed over the classes."""
    return tuple(map(sum, zip(*(counts for _, counts in stats.gammas), strict=True)))


def _difference(before: Tokens, after: Tokens) -> Tokens:
    """after - before, element by element; missing elements of before are 0."""
    return tuple(now - then for then, now in zip(_padded(before, len(after)), after, strict=True))


def _padded(values: Tokens, size: int) -> Iterator[int]:
    yield from values
    yield from [0] * (size - len(values))


def _step_s(stats: SpeculationStats) -> tuple[float, float]:
    """(predicted, measured) seconds of all steps of the target model so far."""
    found = next((role for role in stats.roles if role.role == _STEP), None)
    return (0.0, 0.0) if found is None else (found.predicted_s, found.measured_s)
