"""Mixed requests, one after another: chats, code, samples, streams, classes, clients that leave or err."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx

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
