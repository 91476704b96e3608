"""The numbers of the live view: what the last two minutes were like, second by second.

LiveRecorder takes note of what Metrics reports; make_sample turns two of its snapshots into a LiveSample: a second
of the server in numbers. Counts are those of the interval, so viewers add up samples and subtract nothing. Holds
numbers and names that the operator or FASER chose: no request's id, text or key. Knows neither HTTP nor JSON.
"""

import itertools
import math
import operator
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from faser.types.answer import FinishReason
from faser.types.engine import EngineState
from faser.types.outlook import Decision, Outlook, Target
from faser.types.statistics import NO_SPECULATION, EngineStats, MethodStats, RoleStats, SpeculationStats

_FIRST_S = 1e-4
_PER_DOUBLING = 16
_NUM_BINS = _PER_DOUBLING * 24  # the last one begins at 1,606 s
RESOLUTION = 2 ** (0.5 / _PER_DOUBLING) - 1
HISTORY_S = 120
INTERVAL_S = 1.0
LATENCY_WINDOW_S = 30


class Latencies:
    """Values of one kind, counted in bins, whose percentiles can be told for each window of the last HISTORY_S."""

    def __init__(self) -> None:
        # One entry for each second with values: its begin, and how many values each bin had by its end.
        self._totals: deque[tuple[float, list[int]]] = deque([(-math.inf, [0] * _NUM_BINS)])

    def add(self, seconds: float, at_s: float) -> None:
        """at_s: when the value was measured; never before that of the last call."""
        began_s, counts = self._totals[-1]
        if at_s >= began_s + INTERVAL_S:
            while len(self._totals) > 1 and self._totals[1][0] <= at_s - HISTORY_S - LATENCY_WINDOW_S:
                self._totals.popleft()
            counts = counts.copy()
            self._totals.append((at_s, counts))
        place = int(_PER_DOUBLING * math.log2(seconds / _FIRST_S)) if seconds > _FIRST_S else 0
        counts[place if place < _NUM_BINS else _NUM_BINS - 1] += 1

    def percentiles(self, shares: Sequence[float], at_s: float) -> tuple[int, list[float]]:
        """Return the number of values in the window that ends at at_s, and the least value that covers each share.

        Values are seconds; without any there is none to return. shares: rising, above 0 to 1. at_s: at most
        HISTORY_S ago.
        """
        then, now = self._totals_at(at_s - LATENCY_WINDOW_S), self._totals_at(at_s)
        if then is now:
            return 0, []
        counts = list(map(operator.sub, now, then))
        total = sum(counts)
        found, covered, place = [], counts[0], 0
        for share in shares:
            while covered < math.ceil(share * total):
                place += 1
                covered += counts[place]
            found.append(_FIRST_S * 2 ** ((place + 0.5) / _PER_DOUBLING))
        return total, found

    def _totals_at(self, at_s: float) -> list[int]:
        return next(counts for began_s, counts in reversed(self._totals) if began_s <= at_s)


MOST_STEPS = 64  # of one interval, the last ones

SloKey = tuple[str, str, bool]  # class, target, met
DecisionKey = tuple[str, Decision, Target]  # class, what became of a request, the target that cannot be met


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
    decisions: Counter[DecisionKey]
    outlook: Outlook | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedStep:
    """The engine's statistics after one step. at_s: when the front-end received them."""

    at_s: float
    stats: EngineStats


def _ignore(*_: object) -> None:
    """Do nothing where there is no listener."""


class LiveRecorder:
    """One engine and those that replace it. clock: seconds that never jump."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_change: Callable[[], None] = _ignore  # the engine has changed its state
        self.on_watch: Callable[[bool], None] = _ignore  # statistics of every step are wanted, or no more
        self._clock = clock
        self._began_s = clock()
        self._engine = 0
        self._state = EngineState.LOADING
        self._stats = EngineStats()
        self._finished: Counter[FinishReason] = Counter()
        self._rejected = 0
        self._slo: Counter[SloKey] = Counter()
        self._decisions: Counter[DecisionKey] = Counter()
        self._outlook: Outlook | None = None
        self._past: deque[Snapshot] = deque(maxlen=HISTORY_S + 1)
        self._noted_s = self._began_s
        self._steps: deque[ReportedStep] = deque(maxlen=MOST_STEPS + 1)
        self._latencies = {name: Latencies() for name in ("ttft", "itl", "tpot")}
        self._watched = False

    @property
    def past(self) -> list[Snapshot]:
        """About one snapshot a second of the last HISTORY_S seconds, the oldest first."""
        since_s = self._clock() - HISTORY_S
        return [each for each in self._past if each.at_s >= since_s]

    @property
    def watched(self) -> bool:
        return self._watched

    @property
    def latencies(self) -> dict[str, Latencies]:
        """ttft: arrival to first token. itl: between two chunks of a sample. tpot: mean of a request."""
        return self._latencies

    def uptime_s(self, at_s: float) -> float:
        return at_s - self._began_s

    def watch(self) -> None:
        """Note single steps from now on, until `unwatch`. The caller takes the snapshots."""
        self._watched = True
        self.on_watch(True)

    def unwatch(self) -> None:
        self._watched = False
        self._steps.clear()
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
            decisions=self._decisions.copy(),
            outlook=self._outlook,
        )
        self._past.append(taken)
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
        if self._watched:
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
        self._outlook = None
        self._steps.clear()

    def engine_state(self, state: EngineState) -> None:
        self._state = state
        self.on_change()

    def latency(self, name: str, seconds: float) -> None:
        self._latencies[name].add(seconds, self._clock())

    def finished(self, reason: FinishReason) -> None:
        self._finished[reason] += 1

    def rejected(self) -> None:
        self._rejected += 1

    def decided(self, class_name: str, decision: Decision, target: Target) -> None:
        """A request with a latency target has arrived."""
        self._decisions[class_name, decision, target] += 1

    def expect(self, outlook: Outlook) -> None:
        """Note what the latency model expects now."""
        self._outlook = outlook

    def slo_result(self, class_name: str, target: str, met: bool) -> None:
        """A request with a latency target has ended."""
        self._slo[class_name, target, met] += 1


PERCENTILES = (0.5, 0.95, 0.99)

_DRAFTING = ("draft", "pass", "text")  # roles; passes of a draft model and look-ups in text are both drafting


class DrafterSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Draft tokens of one drafter. drafted = pruned + verified. expected: to be accepted, as predicted."""

    drafted: int = 0
    pruned: int = 0
    verified: int = 0
    accepted: int = 0
    expected: float = 0.0


class SpeculationSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """gammas: how often each number 0, 1, … of draft tokens was verified for a sequence in a step.

    accepted_at: drafts whose token at depth 1, 2, … was accepted. modes: steps by mode; mode: of the last step.
    draft_share: of the processors, in an overlapped step. bypasses: sequences in a step without a draft, by
    reason. paid: by load (fewest and most sequences), times the tokens per second that drafts were measured to
    bring, with its interval, and whether sequences draft for it; null while that is being measured. saved: seconds
    that drafts have saved since the start, and the most that they can have cost. The rest are
    milliseconds: of drafting, of verifying, of both at once, of deciding; and of whole steps, as predicted and as
    measured.
    """

    policy: str
    method: str
    mode: str
    draft_share: float = 0.0
    modes: dict[str, int] = {}
    gammas: list[int] = []
    accepted_at: list[int] = []
    drafters: dict[str, DrafterSample] = {}
    bypasses: dict[str, int] = {}
    paid: list[tuple[int, int, float, float, float, bool | None]] = []
    saved: tuple[float, float] | None = None
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    overlap_ms: float = 0.0
    decide_ms: float = 0.0
    predicted_ms: float = 0.0
    measured_ms: float = 0.0


class OutlookSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Expectations of the latency model at the present rate of requests a second; times in milliseconds.

    known: false: it does not know at such a load, and says no times. headroom: by class, requests a second that
    may come in addition until 90 %, and until 99 %, of the class's meet their targets. attainment: by class.
    """

    rate: float
    capacity: float
    known: bool
    ttft: float = 0.0
    ttft_p99: float = 0.0
    tpot: float = 0.0
    latency: float = 0.0
    headroom: dict[str, list[float]] = {}
    attainment: dict[str, float] = {}


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """One step, in milliseconds. end_ms: its end, before the end of the interval; so 0 or less."""

    end_ms: float
    step_ms: float
    draft_ms: float
    verify_ms: float
    sequences: int
    rows: int
    mode: str


class LiveSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One interval; most of what is zero or empty is left out.

    t: its end, in seconds since the start of the server. dt: its length.
    kv: share of the KV blocks in use. prompt: tokens of prompts, `cached` of them from the prefix cache. output:
    tokens generated. queries, hits: prompt tokens that were looked up in the prefix cache, and found.
    finished: requests, by reason. rejected: requests refused because of load, limits or state.
    latencies: by kind (ttft, itl, tpot) how many values the window has, then their PERCENTILES in milliseconds;
    a kind without values is left out. slo: by class and target, requests that met it and missed it.
    admission: by class, how many requests with targets came, by what became of them (met, waits ttft, …).
    outlook: None before enough requests have ended. speculation: None in an engine without. timeline: the last
    steps.
    """

    t: float
    dt: float
    state: str
    running: int = 0
    waiting: int = 0
    kv: float = 0.0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    queries: int = 0
    hits: int = 0
    steps: int = 0
    preemptions: int = 0
    finished: dict[str, int] = {}
    rejected: int = 0
    latencies: dict[str, list[float]] = {}
    slo: dict[str, dict[str, tuple[int, int]]] = {}
    admission: dict[str, dict[str, int]] = {}
    outlook: OutlookSample | None = None
    speculation: SpeculationSample | None = None
    timeline: list[StepSample] = []


def make_sample(
    before: Snapshot,
    after: Snapshot,
    *,
    uptime_s: float,
    latencies: Mapping[str, Latencies],
    steps: Sequence[ReportedStep] = (),
) -> LiveSample:
    """Return the sample between two snapshots. uptime_s: of the later one. steps: as LiveRecorder.take_steps."""
    now = after.stats
    then = before.stats if before.engine == after.engine else EngineStats()
    return LiveSample(
        t=round(uptime_s, 3),
        dt=round(after.at_s - before.at_s, 3),
        state=after.state.value,
        running=now.num_running,
        waiting=now.num_waiting,
        kv=round(now.kv_usage, 4),
        prompt=now.prompt_tokens - then.prompt_tokens,
        cached=now.prompt_tokens_cached - then.prompt_tokens_cached,
        output=now.generation_tokens - then.generation_tokens,
        queries=now.prefix_cache_queries - then.prefix_cache_queries,
        hits=now.prefix_cache_hits - then.prefix_cache_hits,
        steps=now.num_steps - then.num_steps,
        preemptions=now.num_preemptions - then.num_preemptions,
        finished={
            reason.value: count
            for reason in FinishReason
            if (count := after.finished[reason] - before.finished[reason])
        },
        rejected=after.rejected - before.rejected,
        latencies={name: found for name, each in latencies.items() if (found := _percentiles(each, after.at_s))},
        slo=_attainment(before, after),
        admission=_decided(before, after),
        outlook=_outlook(after.outlook),
        speculation=None
        if now.speculation is None
        else _speculation(then.speculation or NO_SPECULATION, now.speculation),
        timeline=_timeline(steps, after.at_s),
    )


def _percentiles(latencies: Latencies, at_s: float) -> list[float]:
    count, found = latencies.percentiles(PERCENTILES, at_s)
    return [count, *(_ms(each) for each in found)] if count else []


def _decided(before: Snapshot, after: Snapshot) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (name, decision, target), count in after.decisions.items():
        if grown := count - before.decisions[name, decision, target]:
            what = decision.value if target is Target.NONE else f"{decision.value} {target.value}"
            found.setdefault(name, {})[what] = grown
    return found


def _outlook(outlook: Outlook | None) -> OutlookSample | None:
    if outlook is None:
        return None
    return OutlookSample(
        rate=round(outlook.rate, 3),
        capacity=round(outlook.capacity, 3),
        known=outlook.is_known,
        ttft=_ms(outlook.ttft_s),
        ttft_p99=_ms(outlook.ttft_p99_s),
        tpot=_ms(outlook.tpot_s),
        latency=_ms(outlook.latency_s),
        headroom={each.class_name: [round(rate, 3) for _, rate in each.headroom] for each in outlook.classes},
        attainment={each.class_name: round(each.attainment, 4) for each in outlook.classes},
    )


def _attainment(before: Snapshot, after: Snapshot) -> dict[str, dict[str, tuple[int, int]]]:
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name, target, _ in after.slo:
        met, missed = (after.slo[name, target, each] - before.slo[name, target, each] for each in (True, False))
        if met or missed:
            found.setdefault(name, {})[target] = (met, missed)
    return found


def _speculation(then: SpeculationStats, now: SpeculationStats) -> SpeculationSample:
    drafters = {
        each.method: sample
        for each, sample in _drafters(then.methods, now.methods)
        if sample.drafted or sample.verified
    }
    predicted, measured = (
        [getattr(each, name) for each in (_role(now.roles, "step"), _role(then.roles, "step"))]
        for name in ("predicted_s", "measured_s")
    )
    return SpeculationSample(
        policy=now.policy,
        method=now.method,
        mode=now.mode,
        draft_share=round(now.draft_share, 3),
        modes=_growth(then.mode_steps, now.mode_steps),
        gammas=_trimmed(_minus(_all_classes(now.gammas), _all_classes(then.gammas))),
        accepted_at=_trimmed(_minus(now.accepted_per_position, then.accepted_per_position)),
        drafters=drafters,
        bypasses=_growth(then.bypasses, now.bypasses),
        paid=[
            (*each.sequences, round(each.ratio, 3), round(each.low, 3), round(each.high, 3), each.drafts)
            for each in now.paid
            if each.sequences is not None
        ],
        saved=None if now.balance is None else (round(now.balance.saved_s, 1), round(now.balance.most_lost_s, 1)),
        draft_ms=_ms(_drafting_s(now) - _drafting_s(then)),
        verify_ms=_ms(_role(now.roles, "verify").measured_s - _role(then.roles, "verify").measured_s),
        overlap_ms=_ms(now.overlap_s - then.overlap_s),
        decide_ms=_ms(now.decide_s - then.decide_s),
        predicted_ms=_ms(predicted[0] - predicted[1]),
        measured_ms=_ms(measured[0] - measured[1]),
    )


def _drafters(
    then: Iterable[MethodStats], now: Iterable[MethodStats]
) -> Iterable[tuple[MethodStats, DrafterSample]]:
    earlier = {each.method: each for each in then}
    for each in now:
        old = earlier.get(each.method, MethodStats(method=each.method))
        yield (
            each,
            DrafterSample(
                drafted=each.drafted - old.drafted,
                pruned=each.pruned - old.pruned,
                verified=each.verified - old.verified,
                accepted=each.accepted - old.accepted,
                expected=round(each.expected - old.expected, 2),
            ),
        )


def _timeline(steps: Sequence[ReportedStep], end_s: float) -> list[StepSample]:
    """The steps after the first, each against the one before it."""
    found = []
    for before, step in itertools.pairwise(steps):
        then, now = before.stats.speculation or NO_SPECULATION, step.stats.speculation or NO_SPECULATION
        draft_s = _drafting_s(now) - _drafting_s(then)
        verify_s = _role(now.roles, "verify").measured_s - _role(then.roles, "verify").measured_s
        found.append(
            StepSample(
                _ms(step.at_s - end_s),
                _ms(step.stats.last_step_s),
                _ms(draft_s),
                _ms(verify_s),
                step.stats.num_running,
                step.stats.last_step_rows,
                now.mode,
            )
        )
    return found


def _drafting_s(stats: SpeculationStats) -> float:
    return sum(each.measured_s for each in stats.roles if each.role in _DRAFTING)


def _role(roles: Iterable[RoleStats], name: str) -> RoleStats:
    """Steps with concurrent drafting are reported apart from the others."""
    parts = [each for each in roles if each.role == name]
    return RoleStats(
        role=name,
        predicted_s=sum(each.predicted_s for each in parts),
        measured_s=sum(each.measured_s for each in parts),
    )


def _all_classes(gammas: Iterable[tuple[str, Sequence[int]]]) -> list[int]:
    return [sum(each) for each in zip(*(counts for _, counts in gammas), strict=True)]


def _minus(now: Sequence[int], then: Sequence[int]) -> list[int]:
    return [one - other for one, other in zip(now, [*then, *[0] * (len(now) - len(then))], strict=True)]


def _trimmed(counts: list[int]) -> list[int]:
    """Without the zeros at its end."""
    while counts and not counts[-1]:
        counts.pop()
    return counts


def _growth(then: Iterable[tuple[str, int]], now: Iterable[tuple[str, int]]) -> dict[str, int]:
    earlier = dict(then)
    return {name: grown for name, count in now if (grown := count - earlier.get(name, 0))}


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
