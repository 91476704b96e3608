"""Resources of the server's processes while it runs, once a second; and faults: engines killed and frozen.

The report of a run of chaos: the promises that were broken, the JSON document and the picture.
"""

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from statistics import median
from typing import Any

import httpx
import psutil

from benchmarks.servers import Holdings, WatchedServer
from benchmarks.serving.chaos_clients import TOKENS
from benchmarks.spec_bench.chart import Chart

KILL, HANG = "kill", "hang"

_EVERY_S = 1.0
_POLL_S = 0.1
_READY_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """at_s: since the load began. Sizes in bytes of resident memory; engine: None while there is none."""

    at_s: float
    front_end: int
    engine: int | None
    engine_pid: int | None
    descriptors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """at_s: since the load began. ready_s: from then until another engine was ready; None: none was."""

    kind: str
    at_s: float
    ready_s: float | None


async def watch(server: WatchedServer, began_s: float, samples: list[Sample]) -> None:
    """Append a sample a second until cancelled."""
    while True:
        engine = server.engine()
        size = None
        if engine is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                size = engine.memory_info().rss
        samples.append(
            Sample(
                at_s=round(time.monotonic() - began_s, 1),
                front_end=server.front_end.memory_info().rss,
                engine=size,
                engine_pid=None if size is None or engine is None else engine.pid,
                descriptors=server.front_end.num_fds(),
            )
        )
        await asyncio.sleep(_EVERY_S)


async def strike(server: WatchedServer, http: httpx.AsyncClient, kind: str, began_s: float) -> Fault:
    """Kill or freeze the engine, and wait until another one is ready."""
    engine = server.engine()
    assert engine is not None, "faults come one after the other"
    struck_s = time.monotonic()
    if kind == KILL:
        engine.kill()
    else:
        engine.suspend()
    ready_s = None
    while ready_s is None and time.monotonic() - struck_s < _READY_TIMEOUT_S:
        await asyncio.sleep(_POLL_S)
        present = server.engine()
        if present is None or present.pid == engine.pid:
            continue
        with contextlib.suppress(httpx.TransportError):
            if (await http.get("/ready")).status_code == 200:
                ready_s = time.monotonic() - struck_s
    return Fault(kind=kind, at_s=struck_s - began_s, ready_s=ready_s)


def last_life(samples: Sequence[Sample]) -> list[int]:
    """Memory of the last engine, from its start."""
    last = samples[-1].engine_pid
    backwards = takewhile(lambda sample: sample.engine_pid == last, reversed(samples))
    return [sample.engine for sample in backwards if sample.engine is not None][::-1]


def growth(sizes: Sequence[int], *, warm_up: float) -> float:
    """Return how much larger the end is than what followed the warm-up: 0.05 for 5 %. warm_up: share of the sizes.

    Compares medians of the first and the last fifth of what follows it, as single samples jump.
    """
    rest = sizes[round(len(sizes) * warm_up) :]
    fifth = max(1, len(rest) // 5)
    return median(rest[-fifth:]) / median(rest[:fifth]) - 1


READY_BAR_S = 30.0
GROWTH_BAR = 0.05
_SPARE_DESCRIPTORS = 2  # libraries open a file now and then
_SPARE_THREADS = min(32, (os.cpu_count() or 1) + 4)  # asyncio keeps up to this many for calls that block
_MB = 1e6


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Everything that was seen. counts: (action, how it ended). violations: of requests, as text.

    before, after: holdings when idle, after the warm-up and at the end. engine_timeout_s: for how long a frozen
    engine goes unnoticed. exit_status: after SIGTERM; None: it did not end.
    """

    before: Holdings
    engine_timeout_s: float
    after: Holdings | None = None
    exit_status: int | None = None
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def growths(self) -> dict[str, float]:
        """The front-end's after the half with the faults, the last engine's after the first third of its life."""
        return {
            "front_end": growth([sample.front_end for sample in self.samples], warm_up=1 / 2),
            "engine": growth(last_life(self.samples), warm_up=1 / 3),
        }


def broken_promises(
    outcome: Outcome, *, ready_bar_s: float = READY_BAR_S, growth_bar: float = GROWTH_BAR
) -> list[str]:
    """Each in a sentence; empty: all were kept."""
    found = [*outcome.violations, *_leaks(outcome.before, outcome.after)]
    for fault in outcome.faults:
        bar_s = ready_bar_s + (outcome.engine_timeout_s if fault.kind == HANG else 0.0)
        if fault.ready_s is None or fault.ready_s > bar_s:
            found.append(
                f"after the {fault.kind} at {fault.at_s:.0f} s the server was ready after {fault.ready_s} s"
            )
    for process, grown in outcome.growths.items():
        if grown > growth_bar:
            found.append(f"the memory of the {process} grew by {grown:.1%} after the warm-up")
    if not any(ended == TOKENS for _, ended in outcome.counts):
        found.append("no client got an answer")
    if outcome.exit_status != 0:
        found.append(f"after SIGTERM the exit status was {outcome.exit_status}")
    return found


def _leaks(before: Holdings, after: Holdings | None) -> list[str]:
    if after is None:
        return ["the server did not come to rest"]
    found = [f"{name} is {value:g} at the end" for name, value in after.gauges.items() if value]
    pairs = (
        (
            "descriptors of the front-end",
            before.front_end_descriptors + _SPARE_DESCRIPTORS,
            after.front_end_descriptors,
        ),
        ("threads of the front-end", before.front_end_threads + _SPARE_THREADS, after.front_end_threads),
        ("tasks of the front-end", before.front_end_tasks, after.front_end_tasks),
        ("descriptors of the engine", before.engine_descriptors + _SPARE_DESCRIPTORS, after.engine_descriptors),
        ("threads of the engine", before.engine_threads, after.engine_threads),
    )
    found += [f"{name}: {now} at the end, at most {limit} allowed" for name, limit, now in pairs if now > limit]
    return found


def document(about: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    requests: dict[str, dict[str, int]] = {}
    for (action, ended), count in sorted(outcome.counts.items()):
        requests.setdefault(action, {})[ended] = count
    return {
        **about,
        "broken_promises": broken_promises(outcome),
        "requests": requests,
        "num_requests": outcome.counts.total(),
        "faults": [asdict(fault) for fault in outcome.faults],
        "ready_bar_s": READY_BAR_S,
        "memory_growth": {process: round(grown, 4) for process, grown in outcome.growths.items()},
        "memory_growth_bar": GROWTH_BAR,
        "before": asdict(outcome.before),
        "after": None if outcome.after is None else asdict(outcome.after),
        "exit_status": outcome.exit_status,
        "samples": {
            "columns": ["at_s", "front_end_mb", "engine_mb", "descriptors"],
            "rows": [
                [
                    each.at_s,
                    _mb(each.front_end),
                    None if each.engine is None else _mb(each.engine),
                    each.descriptors,
                ]
                for each in outcome.samples
            ],
        },
    }


def picture(outcome: Outcome) -> str:
    """Memory of both processes over time, with a dashed line at each fault."""
    samples: Sequence[Sample] = outcome.samples
    top = 1.1 * max(max(_mb(each.front_end), _mb(each.engine or 0)) for each in samples)
    chart = Chart(
        title="Memory under chaos; dashed: an engine is killed or hangs",
        x_label="seconds",
        y_label="resident MB",
        low=0,
        high=samples[-1].at_s,
        top=top,
    )
    chart.line("engine", [(each.at_s, _mb(each.engine or 0)) for each in samples], marks=False)
    chart.line("front-end", [(each.at_s, _mb(each.front_end)) for each in samples], marks=False)
    for fault in outcome.faults:
        chart.rule((fault.at_s, 0), (fault.at_s, top))
    return chart.svg()


def _mb(size: int) -> float:
    return round(size / _MB, 1)
