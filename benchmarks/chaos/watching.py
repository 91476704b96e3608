"""What the server's processes hold while it runs, once a second; and faults: engines killed and frozen."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median

import httpx
import psutil

from benchmarks.chaos.server import WatchedServer

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
    """How much larger the end is than what followed the warm-up: 0.05 for 5 %. warm_up: its share of the sizes.

    Compares medians of the first and the last fifth of what follows it, as single samples jump.
    """
    rest = sizes[round(len(sizes) * warm_up) :]
    fifth = max(1, len(rest) // 5)
    return median(rest[-fifth:]) / median(rest[:fifth]) - 1
