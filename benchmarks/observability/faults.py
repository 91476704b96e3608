"""A mixed load of requests, and faults, each with the alerts that must fire, those that may, and no others."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from benchmarks.servers import WatchedServer

_CODE = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n"
_PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a short letter to a landlord about a broken heater.",
    f"Repeat this program and add a function for the surface of a box:\n{_CODE}",
    f"Write this program again with better names and a comment for each line:\n{_CODE}",
    "List the planets of the solar system with one fact about each of them.",
    "Summarise: the committee met on Monday, agreed on the budget, and put off the question of the roof to May.",
)
_TIMEOUT_S = 300.0


def speculation(*, patient: bool) -> str:
    """The server's classes, whose targets any quiet machine meets. patient: so does a busy one."""
    ttft_ms, tpot_ms = (10_000, 500) if patient else (2000, 100)
    chat = {"slo": {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms}}
    return json.dumps({"classes": {"chat": chat, "batch": {"max_tokens": 2, "slo": {"tpot_ms": tpot_ms}}}})


class Load:
    """num_clients clients, each with one request after another until it is stopped. prompts: none: its own."""

    def __init__(self, url: str, prompts: Sequence[str] = (), *, num_clients: int = 3, seed: int = 1) -> None:
        self.endings: Counter[str] = Counter()
        self._url = url
        self._prompts = prompts or _PROMPTS
        self._num_clients = num_clients
        self._rng = random.Random(seed)

    async def run(self, stopped: asyncio.Event) -> None:
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT_S, trust_env=False) as http,
            asyncio.TaskGroup() as clients,
        ):
            for _ in range(self._num_clients):
                clients.create_task(self._client(http, stopped))

    async def flood(self, count: int) -> None:
        """Requests all at once, more than the queue holds."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=_TIMEOUT_S, limits=limits, trust_env=False
        ) as http:
            answers = await asyncio.gather(
                *(http.post("/v1/chat/completions", json=self._chat(max_tokens=4)) for _ in range(count)),
                return_exceptions=True,
            )
        self.endings.update(
            f"flood: {each.status_code}" if isinstance(each, httpx.Response) else "flood: broken off"
            for each in answers
        )

    async def _client(self, http: httpx.AsyncClient, stopped: asyncio.Event) -> None:
        while not stopped.is_set():
            kind = self._rng.choices(("answer", "stream", "leave", "wrong", "pause"), weights=(10, 10, 3, 2, 3))[0]
            try:
                self.endings[await self._request(http, kind)] += 1
            except httpx.HTTPError:  # an injected fault
                self.endings[f"{kind}: broken off"] += 1
                await asyncio.sleep(0.2)

    async def _request(self, http: httpx.AsyncClient, kind: str) -> str:
        if kind == "pause":  # so that the engine is idle at times, and audits
            await asyncio.sleep(0.5)
            return kind
        if kind == "wrong":
            reply = await http.post("/v1/chat/completions", json={**self._chat(), "temperature": -1})
            return f"{kind}: {reply.status_code}"
        if kind == "answer":
            reply = await http.post("/v1/chat/completions", json=self._chat())
            await asyncio.sleep(0.2 if reply.status_code != 200 else 0)
            return f"{kind}: {reply.status_code}"
        body = {**self._chat(), "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as streamed:
            num_lines = 0
            async for line in streamed.aiter_lines():
                num_lines += bool(line)
                if kind == "leave" and num_lines > 4:
                    break
        return f"{kind}: {streamed.status_code}"

    def _chat(self, max_tokens: int = 0) -> dict[str, Any]:
        speculative: dict[str, Any] = self._rng.choice(
            ({}, {"class": "chat"}, {"class": "chat"}, {"class": "batch"}, {"enabled": False})
        )
        return {
            "messages": [{"role": "user", "content": self._rng.choice(self._prompts)[:2000]}],
            "max_tokens": max_tokens or self._rng.randint(8, 64),
            "temperature": self._rng.choice((0, 0, 1)),
            "n": self._rng.choice((1, 1, 1, 2)),
            "speculative": speculative,
        }


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
