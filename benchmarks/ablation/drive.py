"""An engine under the arrivals of a real trace: its arms, who asks what and when, and the loops that serve them.

Owns the choice of stretches of a trace and the change of their pace: all times of a stretch are multiplied by one
factor, so bursts and lulls stay what they are relative to each other. Steps are the engine's own; a request that
arrives during one is admitted before the next, and has waited since it arrived.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from benchmarks.engines import StepEngine, Tokens
from benchmarks.simulator.simulation import Outcome, Served
from faser.engine.contract.plan import SequenceDelta
from faser.errors import ConfigError, EngineError
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from faser.types.statistics import EngineStats, SpeculationStats

OFF, _AUTO = "off", "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One setting of the engine, as of Engine.use_policy. gamma: of fixed."""

    name: str
    policy: str
    gamma: int | None = None
    overlap: str = OFF


FLOOR, BASE = "off", "fixed:3"
ARMS = (
    Arm(name=FLOOR, policy="off"),
    Arm(name=BASE, policy="fixed", gamma=3),
    Arm(name="+lengths", policy="faser"),
    Arm(name="+overlap", policy="faser", overlap=_AUTO),
)


DEFAULT = Arm(name="default", policy="faser")
KNOWN = (*ARMS, DEFAULT)


def arms_named(names: Sequence[str]) -> tuple[Arm, ...]:
    """In the order of KNOWN. Raises ConfigError for a name that no arm has."""
    known = [arm.name for arm in KNOWN]
    for name in names:
        if name not in known:
            raise ConfigError(f"--arms names {name!r}; the arms are {', '.join(known)}")
    return tuple(arm for arm in KNOWN if arm.name in names)


def orders(arms: Sequence[Arm], repeats: int, *, seed: int) -> list[tuple[Arm, ...]]:
    """Every arm once in every repeat, each repeat in an order of its own: no arm always follows the same one."""
    shuffler = random.Random(seed)
    return [tuple(shuffler.sample(arms, len(arms))) for _ in range(repeats)]


Trace = Sequence[tuple[float, int, int]]  # seconds, prompt tokens, output tokens; ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. at_s: seconds since the start. seed: of its sampling; in greedy runs without a meaning."""

    at_s: float
    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """asks: ascending in time. pace: how many times as fast as in the trace they come; below 1 is slower."""

    asks: tuple[Ask, ...]
    pace: float

    @property
    def output_tokens(self) -> int:
        return sum(ask.output_tokens for ask in self.asks)


def requests_of(trace: Trace, *, tokens_per_s: float, seconds: float, max_tokens: int) -> int:
    """Return the number of requests, at least 1, whose answers of the trace's mean length make this token rate."""
    return max(round(tokens_per_s * seconds / mean_length(trace, max_tokens)), 1)


def mean_length(trace: Trace, max_tokens: int) -> float:
    """Mean number of output tokens, none above max_tokens."""
    return float(np.mean([min(output, max_tokens) for _, _, output in trace]))


def stretch(
    trace: Trace,
    prompts: Sequence[tuple[int, ...]],
    *,
    first: int,
    count: int,
    seconds: float,
    max_tokens: int,
) -> Stretch:
    """count requests of the trace from number `first` on, all of which come within `seconds`, the first at 0.

    The pace is set by when the request behind the last one came. Prompts are taken in turn from number `first` on.
    Raises ConfigError where the trace is too short, or has no time in it there.
    """
    if first + count >= len(trace):
        raise ConfigError(
            f"{count} requests from number {first} on and the one behind; the trace has {len(trace)}"
        )
    began_s, ended_s = trace[first][0], trace[first + count][0]
    if ended_s <= began_s:
        raise ConfigError(f"requests {first} to {first + count} of the trace came at the same time")
    pace = (ended_s - began_s) / seconds
    asks = tuple(
        Ask(
            at_s=(at_s - began_s) / pace,
            prompt_token_ids=prompts[number % len(prompts)],
            output_tokens=max(min(output, max_tokens), 1),
            seed=number,
        )
        for number, (at_s, _, output) in enumerate(trace[first : first + count], start=first)
    )
    return Stretch(asks=asks, pace=pace)


def firsts(trace: Trace, repeats: int, count: int) -> list[int]:
    """Return where the stretches of the repeats begin: spread evenly over the trace."""
    last = len(trace) - count - 1
    if last < 0:
        raise ConfigError(f"{count} requests and the one behind are wanted; the trace has {len(trace)}")
    return [last * repeat // max(repeats - 1, 1) for repeat in range(repeats)]


_PLAIN, _SERIAL = "plain", "serial"


class LoadedEngine(StepEngine, Protocol):
    """Engine, as far as it is needed here; see faser.engine.engine.Engine."""

    def abort(self, request_id: str, index: int | None = None) -> None: ...

    def stats(self) -> EngineStats: ...

    def use_policy(
        self,
        name: str,
        gamma: int | None = None,
        *,
        forget: bool = True,
        overlap: str | None = None,
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """now: seconds. sleep: for so many seconds."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


WALL = Clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of a run. name: unlike that of any other run. seconds: during which requests come."""

    name: str
    asks: Sequence[Ask]
    seconds: float
    temperature: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """Result of a run. answers: in the order of the asks.

    ahead_steps: of outcome.num_steps, that drafted ahead.
    """

    outcome: Outcome
    answers: tuple[Tokens, ...]
    ahead_steps: int


def use(engine: LoadedEngine, arm: Arm) -> None:
    """From now on the engine is of this arm; what it knows about acceptance stays, as in a server that has run."""
    engine.use_policy(arm.policy, arm.gamma, forget=False, overlap=arm.overlap)


def open_loop(engine: LoadedEngine, load: Load, clock: Clock = WALL) -> Driven:
    """Serve all requests at their times and to their ends. Raises EngineError if one fails."""
    notes = _Notes(load.seconds)
    for number, ask in enumerate(load.asks):
        notes.arrive(number, ask, ask.at_s)
    waiting = deque(enumerate(load.asks))
    before, began_s = engine.stats(), clock.now()
    while waiting or engine.has_work():
        at_s = clock.now() - began_s
        while waiting and waiting[0][1].at_s <= at_s:
            engine.add(_request(load, *waiting.popleft()))
        if not engine.has_work():
            clock.sleep(waiting[0][1].at_s - at_s)
            continue
        step_began_s = clock.now()
        deltas = engine.step()
        notes.step(deltas, clock.now() - began_s, clock.now() - step_began_s)
    return notes.driven(before, engine.stats(), clock.now() - began_s)


def closed_loop(
    engine: LoadedEngine, load: Load, *, clients: int, clock: Clock = WALL
) -> tuple[float, list[Served]]:
    """Output tokens a second with so many requests at a time, and those that ended.

    Runs for load.seconds from the moment when the first request has ended, so that prompts and answers mix; what
    then still runs is dropped. The asks follow each other in a circle, whatever their times.
    """
    notes = _Notes(load.seconds)
    running, number, num_tokens = 0, 0, 0
    began_s, counted_from_s = clock.now(), None
    while counted_from_s is None or clock.now() - counted_from_s < load.seconds:
        while running < clients:
            ask = load.asks[number % len(load.asks)]
            engine.add(_request(load, number, ask))
            notes.arrive(number, ask, clock.now() - began_s)
            running, number = running + 1, number + 1
        deltas = engine.step()
        num_ended = notes.step(deltas, clock.now() - began_s, 0.0)
        running -= num_ended
        if counted_from_s is not None:
            num_tokens += sum(len(delta.token_ids) for delta in deltas)
        elif num_ended:
            counted_from_s = clock.now()
    elapsed_s = clock.now() - counted_from_s
    for dropped in range(number):
        engine.abort(f"{load.name}/{dropped}")
    while engine.has_work():
        engine.step()
    return num_tokens / elapsed_s, [each for each in notes.served.values() if each.finished_s]


def _request(load: Load, number: int, ask: Ask) -> Request:
    """With a salt of its own: it reuses no prompt's blocks, and drafts from no answer that came before."""
    request_id = f"{load.name}/{number}"
    return Request(
        request_id=request_id,
        prompt_token_ids=ask.prompt_token_ids,
        sampling=SamplingParams(
            temperature=load.temperature, seed=ask.seed, max_tokens=ask.output_tokens, ignore_eos=True
        ),
        arrival_s=time.monotonic(),
        cache_salt=request_id,
    )


@dataclass(slots=True)
class _Notes:
    """Observations of requests. seconds: tokens up to then are the window's."""

    seconds: float
    served: dict[int, Served] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_steps: int = 0
    busy_s: float = 0.0
    window_tokens: int = 0

    def arrive(self, number: int, ask: Ask, at_s: float) -> None:
        self.served[number] = Served(number=number, arrival_s=at_s, prompt_len=len(ask.prompt_token_ids))
        self.tokens[number] = []

    def step(self, deltas: Iterable[SequenceDelta], at_s: float, took_s: float) -> int:
        """at_s: when the step was over. Returns how many requests ended in it."""
        self.num_steps += 1
        self.busy_s += took_s
        num_ended = 0
        for delta in deltas:
            if delta.error is not None:
                raise EngineError(f"{delta.request_id} failed: {delta.error}")
            number = int(delta.request_id.rpartition("/")[2])
            served = self.served[number]
            if delta.token_ids and not served.num_tokens:
                served.first_s = at_s
            served.num_tokens += len(delta.token_ids)
            self.tokens[number] += delta.token_ids
            if at_s <= self.seconds:
                self.window_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                served.finished_s = at_s
                num_ended += 1
        return num_ended

    def driven(self, before: EngineStats, after: EngineStats, elapsed_s: float) -> Driven:
        then, now = _speculation(before), _speculation(after)
        outcome = Outcome(
            served=[*self.served.values()],
            elapsed_s=elapsed_s,
            busy_s=self.busy_s,
            num_steps=self.num_steps,
            window_tokens=self.window_tokens,
            turns=_turns(now) - _turns(then),
            drafted=_total(now, "drafted") - _total(then, "drafted"),
            verified=_total(now, "verified") - _total(then, "verified"),
            accepted=_total(now, "accepted") - _total(then, "accepted"),
            num_preemptions=after.num_preemptions - before.num_preemptions,
        )
        return Driven(
            outcome=outcome,
            answers=tuple(map(tuple, self.tokens.values())),
            ahead_steps=_ahead(now) - _ahead(then),
        )


def _speculation(stats: EngineStats) -> SpeculationStats:
    if stats.speculation is None:
        raise EngineError("the engine was built without a drafter; there is no speculation to measure")
    return stats.speculation


def _total(stats: SpeculationStats, counter: str) -> int:
    return sum(getattr(each, counter) for each in stats.methods)


def _turns(stats: SpeculationStats) -> int:
    """Sequences that decoded, summed over steps."""
    return sum(sum(counts) for _, counts in stats.gammas)


def _ahead(stats: SpeculationStats) -> int:
    """Steps that drafted ahead, on whatever partition."""
    return sum(steps for mode, steps in stats.mode_steps if mode not in (_PLAIN, _SERIAL))
