"""Faults, each with the alerts that must fire, those that may, and by exclusion those that must not."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import psutil

from benchmarks.chaos.server import WatchedServer
from benchmarks.observability.load import Load

_PAUSE_S, _RUN_S = 0.95, 0.05  # the engine has a twentieth of the time

# A budget that burns fast may burn over the long windows, too.
_LATE = frozenset(
    f"Faser{name}BudgetBurns{pace}"
    for name in ("Ttft", "Tpot", "ClassTtft", "ClassTpot", "Goodput")
    for pace in ("", "Fast")
)
_REFUSING = frozenset({"FaserAvailabilityBudgetBurnsFast", "FaserAvailabilityBudgetBurns"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """lasts_s: how long it is injected at most; it ends earlier once its alerts have fired."""

    name: str
    what: str
    inject: Callable[[WatchedServer, Load, asyncio.Event], Coroutine[None, None, None]]
    lasts_s: float
    must: frozenset[str]
    may: frozenset[str]


async def slow(server: WatchedServer, load: Load, over: asyncio.Event) -> None:
    """The engine's process is stopped and continued, as by a neighbour that takes the cores."""
    del load
    engine = _engine(server)
    try:
        while not over.is_set():
            engine.suspend()
            await asyncio.sleep(_PAUSE_S)
            engine.resume()
            await asyncio.sleep(_RUN_S)
    finally:
        engine.resume()


async def flood(server: WatchedServer, load: Load, over: asyncio.Event) -> None:
    del server
    while not over.is_set():
        await load.flood(60)
        await asyncio.sleep(1)


async def freeze(server: WatchedServer, load: Load, over: asyncio.Event) -> None:
    """The engine's process is stopped while requests run."""
    del load
    while server.gauges()["num_requests_running"] == 0:
        await asyncio.sleep(0.05)
    engine = _engine(server)
    engine.suspend()
    try:
        await over.wait()
    finally:
        engine.resume()


async def kill(server: WatchedServer, load: Load, over: asyncio.Event) -> None:
    del load
    _engine(server).kill()
    await over.wait()


async def stop(server: WatchedServer, load: Load, over: asyncio.Event) -> None:
    del load
    await asyncio.to_thread(server.end)
    await over.wait()


def _engine(server: WatchedServer) -> psutil.Process:
    with contextlib.suppress(psutil.NoSuchProcess):
        engine = server.engine()
        if engine is not None:
            return engine
    raise RuntimeError("there is no engine")


FAULTS = (
    Fault(
        name="slowdown",
        what="the engine has a twentieth of the time (SIGSTOP, SIGCONT)",
        inject=slow,
        lasts_s=180,
        must=frozenset({"FaserTpotBudgetBurnsFast"}),
        may=_LATE | {"FaserStepTimesWrong", "FaserQueueSlow"},
    ),
    Fault(
        name="flood",
        what="60 requests at once, again and again; the queue holds 8",
        inject=flood,
        lasts_s=45,
        must=frozenset({"FaserAvailabilityBudgetBurnsFast"}),
        may=_LATE | _REFUSING | {"FaserStepTimesWrong", "FaserQueueSlow"},
    ),
    Fault(
        name="stuck engine",
        what="the engine's process is stopped (SIGSTOP) while requests run; --engine-timeout is longer",
        inject=freeze,
        lasts_s=90,
        must=frozenset({"FaserEngineStuck"}),
        may=_LATE | _REFUSING | {"FaserStepTimesWrong", "FaserQueueSlow"},
    ),
    Fault(
        name="killed engine",
        what="the engine's process gets SIGKILL",
        inject=kill,
        lasts_s=45,
        must=frozenset({"FaserEngineRestarts"}),
        may=_LATE | _REFUSING | {"FaserStepTimesWrong", "FaserQueueSlow", "FaserNotReady", "FaserFlaps"},
    ),
    Fault(
        name="stopped server",
        what="the server gets SIGTERM and ends",
        inject=stop,
        lasts_s=90,
        must=frozenset({"FaserDown"}),
        may=_LATE
        | _REFUSING
        | {"FaserStepTimesWrong", "FaserQueueSlow", "FaserNotReady", "FaserFlaps", "FaserEngineRestarts"},
    ),
)
