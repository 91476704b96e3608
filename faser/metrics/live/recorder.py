"""LiveRecorder: what the live view needs of the past, noted as the engine reports it.

While the feed is unwatched it keeps a reference to the engine's statistics about once a second and counts requests
that end. Single steps and latencies are noted only for viewers. Knows neither HTTP nor JSON.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from faser.metrics.live.latencies import Latencies
from faser.types import EngineState, EngineStats, FinishReason

HISTORY_S = 120
INTERVAL_S = 1.0
LATENCY_WINDOW_S = 30
MOST_STEPS = 64  # of one interval, the last ones

SloKey = tuple[str, str, bool]  # class, target, met


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Counters at one time. engine: how many engines there were before; each counts from zero."""

    at_s: float
    engine: int
    state: EngineState
    stats: EngineStats
    finished: Counter[FinishReason]
    rejected: int
    slo: Counter[SloKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedStep:
    """The engine's statistics after one step. at_s: when the front-end received them."""

    at_s: float
    stats: EngineStats


class LiveRecorder:
    """One engine and those that replace it. clock: seconds that never jump."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_change: Callable[[], None] | None = None  # the engine has changed its state
        self.on_watch: Callable[[bool], None] | None = None  # statistics of every step are wanted, or no more
        self._clock = clock
        self._began_s = clock()
        self._engine = 0
        self._state = EngineState.LOADING
        self._stats = EngineStats()
        self._finished: Counter[FinishReason] = Counter()
        self._rejected = 0
        self._slo: Counter[SloKey] = Counter()
        self._past: deque[Snapshot] = deque(maxlen=HISTORY_S + 1)
        self._noted_s = self._began_s
        self._steps: deque[ReportedStep] = deque(maxlen=MOST_STEPS + 1)
        self._latencies: dict[str, Latencies] = {}  # empty while nobody watches

    @property
    def past(self) -> list[Snapshot]:
        """About one snapshot a second of the last HISTORY_S seconds, the oldest first."""
        since_s = self._clock() - HISTORY_S
        return [each for each in self._past if each.at_s >= since_s]

    @property
    def watched(self) -> bool:
        return bool(self._latencies)

    @property
    def latencies(self) -> dict[str, Latencies]:
        """ttft: arrival to first token. itl: between two chunks of a sample. tpot: mean of a request."""
        return self._latencies

    def uptime_s(self, at_s: float) -> float:
        return at_s - self._began_s

    def watch(self) -> None:
        """Note single steps and latencies from now on, until `unwatch`. The caller takes the snapshots."""
        self._latencies = {name: Latencies(LATENCY_WINDOW_S) for name in ("ttft", "itl", "tpot")}
        if self.on_watch is not None:
            self.on_watch(True)

    def unwatch(self) -> None:
        self._latencies = {}
        self._steps.clear()
        if self.on_watch is not None:
            self.on_watch(False)

    def snapshot(self) -> Snapshot:
        """The counters now; `past` ends with it."""
        self._noted_s = now_s = self._clock()
        taken = Snapshot(
            at_s=now_s,
            engine=self._engine,
            state=self._state,
            stats=self._stats,
            finished=self._finished.copy(),
            rejected=self._rejected,
            slo=self._slo.copy(),
        )
        self._past.append(taken)
        for each in self._latencies.values():
            each.tick()
        return taken

    def take_steps(self) -> list[ReportedStep]:
        """The steps since the last call, at most MOST_STEPS, after one that is older than them."""
        taken = list(self._steps)
        while len(self._steps) > 1:
            self._steps.popleft()
        return taken

    # Metrics calls these

    def engine(self, stats: EngineStats) -> None:
        """The engine's statistics after a step, or after a while without one."""
        now_s = self._clock()
        if self._latencies:
            if stats.num_steps > self._stats.num_steps:
                self._steps.append(ReportedStep(at_s=now_s, stats=stats))
            self._stats = stats
            return
        self._stats = stats
        if now_s >= self._noted_s + INTERVAL_S:
            self.snapshot()

    def engine_ended(self) -> None:
        """The next statistics are those of another engine."""
        self._engine += 1
        self._stats = EngineStats()
        self._steps.clear()

    def engine_state(self, state: EngineState) -> None:
        self._state = state
        if self.on_change is not None:
            self.on_change()

    def latency(self, name: str, seconds: float) -> None:
        if self._latencies:
            self._latencies[name].add(seconds)

    def finished(self, reason: FinishReason) -> None:
        self._finished[reason] += 1

    def rejected(self) -> None:
        self._rejected += 1

    def judged(self, class_name: str, target: str, met: bool) -> None:
        """A request with a latency target has ended."""
        self._slo[class_name, target, met] += 1
