"""An engine under load: requests come when their time has come, or as soon as another one has ended.

Owns the loop of the engine's thread and the times that requests saw. Steps are the engine's own; a request that
arrives during one is admitted before the next, and has waited since it arrived.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.ablation.arms import OFF, Arm
from benchmarks.ablation.arrivals import Ask
from benchmarks.simulator.simulation import Outcome, Served
from faser.engine.contract.plan import SequenceDelta
from faser.errors import ConfigError, EngineError
from faser.types import EngineStats, Request, SamplingParams, SpeculationStats

Tokens = tuple[int, ...]
_PLAIN, _SERIAL = "plain", "serial"


class LoadedEngine(Protocol):
    """What of an Engine is needed here; see faser.engine.engine.Engine."""

    def add(self, request: Request) -> None: ...

    def step(self) -> tuple[SequenceDelta, ...]: ...

    def has_work(self) -> bool: ...

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


class PruningSwitch(Protocol):
    """What of EarlyPruning is needed here; see faser.engine.execution.pruning.early_pruning."""

    def use(self, mode: str | None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """now: seconds. sleep: for so many seconds."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


WALL = Clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a run is asked. name: unlike that of any other run. seconds: during which requests come."""

    name: str
    asks: Sequence[Ask]
    seconds: float
    temperature: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """What came of a run. answers: in the order of the asks.

    outcome.verified: drafted tokens that went through all layers; pruned_rows: those that left before the last.
    ahead_steps: of outcome.num_steps, that drafted ahead.
    """

    outcome: Outcome
    answers: tuple[Tokens, ...]
    pruned_rows: int
    ahead_steps: int


def use(engine: LoadedEngine, pruning: PruningSwitch | None, arm: Arm) -> None:
    """From now on the engine is of this arm; what it knows about acceptance stays, as in a server that has run.

    pruning: None in an engine whose drafts cannot be pruned. Raises ConfigError for an arm that would.
    """
    if pruning is not None:
        pruning.use(arm.early_prune)
    elif arm.early_prune != OFF:
        raise ConfigError(f"arm {arm.name} prunes drafts, which takes a draft model")
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
    """What requests saw. seconds: tokens up to then are the window's."""

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
            pruned_rows=_pruned(now) - _pruned(then),
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


def _pruned(stats: SpeculationStats) -> int:
    return 0 if stats.pruning is None else stats.pruning.pruned_rows


def _ahead(stats: SpeculationStats) -> int:
    """Steps that drafted ahead, on whatever partition."""
    return sum(steps for mode, steps in stats.mode_steps if mode not in (_PLAIN, _SERIAL))
