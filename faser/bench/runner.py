"""One run: a policy answers the jobs of a cell, so many at a time, while its steps are watched.

Owns the closed loop and the differences of the engine's counters. Knows the engine by what it can do, and takes
wall time from the caller's clock; neither models nor files.
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

_STEP = "step"  # the role of a whole step of the target in the cost model


class SteppedEngine(Protocol):
    """An engine in this process, stepped by hand: see faser.engine.engine.Engine."""

    def add(self, request: Request) -> None: ...

    def step(self) -> tuple[SequenceDelta, ...]: ...

    def has_work(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def use_policy(
        self, name: str, gamma: int | None = None, *, forget: bool = True, overlap: str | None = None
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How the jobs of a run are asked. include_prefill: no prompt is taken from the prefix cache."""

    concurrency: int
    temperature: float
    output_tokens: int
    include_prefill: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One step. at_s: since the run began. gamma: mean of its sequences. *_s: of the target's step."""

    at_s: float
    gamma: float
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run. answers: in the order of the jobs. decide_s: host time of the policy.

    draft_counts[k - 1]: drafts that had k tokens or more; accepted_counts[k - 1]: those of which the first k were
    accepted. window_tokens, window_s: of the steps with all places taken, up to the one that leaves a place empty
    for good: answers that end at different times would else be counted against who is fast with some of them.
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
    """places: requests at a time. Open while as many are running."""

    places: int
    num_tokens: int = 0
    seconds: float = 0.0
    is_open: bool = True

    def step(self, num_tokens: int, num_left: int, at_s: float) -> None:
        """num_left: requests that have not ended, those that were just admitted among them."""
        if self.is_open:
            self.num_tokens += num_tokens
            self.seconds = at_s
            self.is_open = num_left >= self.places


def run(
    engine: SteppedEngine,
    jobs: Sequence[BenchRequest],
    conditions: Conditions,
    *,
    name: str,
    now: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """Answer all jobs, `concurrency` at a time. name: unlike that of any other run.

    Raises EngineError if an answer fails or the engine has no speculation to watch.
    """
    salt = name if conditions.include_prefill else None
    waiting = iter(enumerate(jobs))
    answers: dict[str, list[int]] = {}
    before = _speculation(engine)
    watch = _Watch(before)
    began_s, num_steps, num_ended = now(), 0, 0
    window = _Window(min(conditions.concurrency, len(jobs)))

    def admit(count: int) -> None:
        for place, job in islice(waiting, count):
            request = job.request(
                f"{name}/{place}",
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
        window.step(sum(len(delta.token_ids) for delta in deltas), len(jobs) - num_ended, now() - began_s)
        watch.step(
            _speculation(engine),
            num_sequences=sum(bool(delta.token_ids) for delta in deltas),
            at_s=now() - began_s,
        )
        admit(sum(delta.finish_reason is not None for delta in deltas))
    wall_s = now() - began_s
    return _outcome(
        before, watch.last, tuple(map(tuple, answers.values())), wall_s, window, num_steps, tuple(watch.points)
    )


def _outcome(
    before: SpeculationStats,
    after: SpeculationStats,
    answers: tuple[Tokens, ...],
    wall_s: float,
    window: _Window,
    num_steps: int,
    points: tuple[StepPoint, ...],
) -> Outcome:
    gammas = _difference(_gammas(before), _gammas(after))
    return Outcome(
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
class _Watch:
    """Follows the counters from step to step. last: the newest snapshot."""

    last: SpeculationStats
    points: list[StepPoint] = field(default_factory=list)

    def step(self, stats: SpeculationStats, *, num_sequences: int, at_s: float) -> None:
        """num_sequences: that got tokens in this step."""
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
    """How often each gamma was verified, over all classes."""
    return tuple(map(sum, zip(*(counts for _, counts in stats.gammas), strict=True)))


def _difference(before: Tokens, after: Tokens) -> Tokens:
    """Element by element; what was not there before was 0."""
    return tuple(now - then for then, now in zip(_padded(before, len(after)), after, strict=True))


def _padded(values: Tokens, size: int) -> Iterator[int]:
    yield from values
    yield from [0] * (size - len(values))


def _step_s(stats: SpeculationStats) -> tuple[float, float]:
    """(predicted, measured) seconds of all steps of the target so far."""
    found = next((role for role in stats.roles if role.role == _STEP), None)
    return (0.0, 0.0) if found is None else (found.predicted_s, found.measured_s)
