"""LiveSample: one second of the server in numbers, as the live view receives it.

Counts are those of the interval, so viewers add up samples and subtract nothing. Holds numbers and names that the
operator or FASER chose: no request's id, text or key.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from faser.metrics.live.latencies import Latencies
from faser.metrics.live.recorder import ReportedStep, Snapshot
from faser.types import EngineStats, FinishReason, MethodStats, RoleStats, SpeculationStats

PERCENTILES = (0.5, 0.95, 0.99)

_DRAFTING = ("draft", "pass", "text")  # roles; passes of a draft model and look-ups in text are both drafting
_NO_SPECULATION = SpeculationStats(policy="", method="")


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
    draft_share: of the processors, in an overlapped step. bypasses: sequences in a step without a draft, by reason
    The rest are milliseconds: of drafting, of verifying, of both at once, of deciding; and of whole steps, as
    predicted and as measured.
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
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    overlap_ms: float = 0.0
    decide_ms: float = 0.0
    predicted_ms: float = 0.0
    measured_ms: float = 0.0


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
    empty for seconds that passed without a viewer. slo: by class and target, requests that met it and missed it.
    speculation: None in an engine without. timeline: the last steps.
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
    """What happened between two snapshots. uptime_s: of the later one. steps: as LiveRecorder.take_steps."""
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
        latencies={name: found for name, each in latencies.items() if (found := _percentiles(each))},
        slo=_attainment(before, after),
        speculation=None
        if now.speculation is None
        else _speculation(then.speculation or _NO_SPECULATION, now.speculation),
        timeline=_timeline(steps, after.at_s),
    )


def _percentiles(latencies: Latencies) -> list[float]:
    count, found = latencies.percentiles(PERCENTILES)
    return [count, *(_ms(each) for each in found)] if count else []


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
        then, now = before.stats.speculation or _NO_SPECULATION, step.stats.speculation or _NO_SPECULATION
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
