"""The whole measurement with one engine: what it can bear, then every arm over the same arrivals, in turn.

Knows neither models nor files. Before anything counts, every arm serves some requests: what an arm needs to know
(acceptance, times) is known when its runs begin, as in a server that has run for a while.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.ablation.drive import (
    ARMS,
    FLOOR,
    WALL,
    Arm,
    Clock,
    Driven,
    Load,
    LoadedEngine,
    Stretch,
    Trace,
    closed_loop,
    firsts,
    open_loop,
    orders,
    requests_of,
    stretch,
    use,
)
from benchmarks.ablation.report import Run
from benchmarks.engines import Tokens
from benchmarks.simulator.contest import summarise
from faser.types.request import Slo

_SLACK = 2.0  # target of time per token: so many times that of a request that is alone
_SEED = 1
_WARMING = "warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Settings of a campaign. seconds: in which the requests of a run come. loads: of what arm off can bear.

    clients: as many as the engine serves at a time. warm_s: of every arm before anything counts. capacity: tokens
    a second that arm off can bear; None: measured.
    """

    arms: tuple[Arm, ...]
    seconds: float
    repeats: int
    loads: tuple[float, ...]
    max_tokens: int
    clients: int
    warm_s: float
    temperature: float = 0.0
    capacity: float | None = None

    @property
    def num_runs(self) -> int:
        return len(self.arms) * self.repeats * len(self.loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bearing:
    """Capacity of arm off: tokens a second with all places taken, and time per token of a lone request."""

    tokens_per_s: float
    tpot_s: float

    @property
    def slo(self) -> Slo:
        return Slo(tpot_ms=1000 * _SLACK * self.tpot_s)


@dataclass(slots=True, kw_only=True)
class Campaign:
    """trace, prompts: as in arrivals."""

    engine: LoadedEngine
    wanted: Wanted
    trace: Trace
    prompts: Sequence[tuple[int, ...]]
    clock: Clock = field(default=WALL)

    def bearing(self) -> Bearing:
        """Runs arm off, alone and in a crowd."""
        wanted = self.wanted
        use(self.engine, next(arm for arm in ARMS if arm.name == FLOOR))
        alone = self._warming_load(f"{_WARMING}/alone")
        _, ended = closed_loop(self.engine, alone, clients=1, clock=self.clock)
        tpot_s = float(np.median([each.tpot_s for each in ended if each.num_tokens > 1]))
        if wanted.capacity is not None:
            return Bearing(tokens_per_s=wanted.capacity, tpot_s=tpot_s)
        crowd = self._warming_load(f"{_WARMING}/crowd")
        tokens_per_s, _ = closed_loop(self.engine, crowd, clients=wanted.clients, clock=self.clock)
        return Bearing(tokens_per_s=tokens_per_s, tpot_s=tpot_s)

    def warm(self, announce: Callable[[str], None]) -> None:
        """Every arm for some seconds with all places taken."""
        for arm in self.wanted.arms:
            announce(f"warming up {arm.name}")
            use(self.engine, arm)
            load = self._warming_load(f"{_WARMING}/{arm.name}")
            closed_loop(self.engine, load, clients=self.wanted.clients, clock=self.clock)

    def runs(self, bearing: Bearing, announce: Callable[[str], None]) -> Iterator[Run]:
        """Every arm in every repeat at every load."""
        wanted = self.wanted
        for load in wanted.loads:
            count = requests_of(
                self.trace,
                tokens_per_s=load * bearing.tokens_per_s,
                seconds=wanted.seconds,
                max_tokens=wanted.max_tokens,
            )
            begins = firsts(self.trace, wanted.repeats, count)
            for repeat, arms in enumerate(orders(wanted.arms, wanted.repeats, seed=_SEED)):
                asked = self._stretch(begins[repeat], count)
                expected: tuple[Tokens, ...] | None = None
                for arm in arms:
                    announce(f"load {load:g}, repeat {repeat + 1}: {arm.name}, {count} requests")
                    run, answers = self._run(
                        arm, asked, load=load, repeat=repeat, slo=bearing.slo, expected=expected
                    )
                    expected = expected or answers
                    yield run

    def _run(
        self,
        arm: Arm,
        asked: Stretch,
        *,
        load: float,
        repeat: int,
        slo: Slo,
        expected: tuple[Tokens, ...] | None,
    ) -> tuple[Run, tuple[Tokens, ...]]:
        """expected: answers of the arm before; None: this is the first."""
        use(self.engine, arm)
        driven = open_loop(
            self.engine,
            Load(
                name=f"{load:g}/{repeat}/{arm.name}",
                asks=asked.asks,
                seconds=self.wanted.seconds,
                temperature=self.wanted.temperature,
            ),
            self.clock,
        )
        served = driven.outcome.served
        run = Run(
            arm=arm.name,
            repeat=repeat,
            load=load,
            cell=summarise(driven.outcome, arm.name, load, duration_s=self.wanted.seconds, slo=slo),
            ahead_steps=driven.ahead_steps,
            different=_different(driven, expected),
            pace=asked.pace,
            latencies_s=tuple(each.finished_s - each.arrival_s for each in served),
            tpots_s=tuple(each.tpot_s for each in served if each.num_tokens > 1),
        )
        return run, driven.answers

    def _stretch(self, first: int, count: int) -> Stretch:
        return stretch(
            self.trace,
            self.prompts,
            first=first,
            count=count,
            seconds=self.wanted.seconds,
            max_tokens=self.wanted.max_tokens,
        )

    def _warming_load(self, name: str) -> Load:
        """The first requests of the trace, enough of them that their lengths mix."""
        count = min(max(4 * self.wanted.clients, len(self.prompts)), len(self.trace) - 1)
        asks = self._stretch(0, count).asks
        return Load(name=name, asks=asks, seconds=self.wanted.warm_s, temperature=self.wanted.temperature)


def _different(driven: Driven, expected: tuple[Tokens, ...] | None) -> int:
    if expected is None:
        return 0
    return sum(answer != other for answer, other in zip(driven.answers, expected, strict=True))
