"""A closed loop of streamed chat requests against one OpenAI-compatible server.

Owns the clients and what they saw: when each piece of an answer arrived, and the server's count of tokens.
While the loop runs it only notes times and bytes; reading them comes afterwards, because the client shares
its cores with the server. Does not know which server it talks to.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import httpx

_EVENT_PREFIX = b"data: "
_END = b"[DONE]"


class LoadError(Exception):
    """A server did not do what every system under measurement must do: answer in full, and count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Address of a server, and how it wants to be asked for a greedy answer of full length.

    model: its name in requests. extra_body: fields in addition to model, messages, max_tokens, temperature and
    stream. takes_salt: whether it remembers prompts or answers for the requests with the same `cache_salt`.
    """

    name: str
    base_url: str
    model: str
    extra_body: Mapping[str, Any]
    takes_salt: bool = False

    def salted(self, salt: str) -> "Target":
        """The same target, asked with a cache salt of its own, so that it knows none of the prompts."""
        return replace(self, extra_body={**self.extra_body, "cache_salt": salt}) if self.takes_salt else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request and its answer. Times in seconds on one clock; token_times_s: when text arrived, ascending."""

    sent_s: float
    token_times_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first one."""
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Time between pieces of text; a piece may be several tokens."""
        return tuple(later - earlier for earlier, later in pairwise(self.token_times_s))


def run_load(
    target: Target, prompts: Sequence[str], *, concurrency: int, output_tokens: int, timeout_s: float
) -> list[Exchange]:
    """Answers to all prompts, in their order; concurrency requests are under way until the prompts run out.

    output_tokens: how long every answer has to be, at least 2.

    Raises LoadError: another status than 200, an answer of another length, a broken connection, or
    no answer to all within timeout_s.
    """
    try:
        return asyncio.run(asyncio.wait_for(closed_loop(target, prompts, concurrency, output_tokens), timeout_s))
    except TimeoutError:
        raise LoadError(f"{target.name} did not answer {len(prompts)} requests in {timeout_s:g} s") from None
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None  # one client's trouble is enough to end all


async def closed_loop(
    target: Target, prompts: Sequence[str], concurrency: int, output_tokens: int
) -> list[Exchange]:
    """Do what run_load does, without its limit of time."""
    waiting = iter(enumerate(prompts))
    exchanges: dict[int, Exchange] = {}

    async def client(http: httpx.AsyncClient) -> None:
        for index, prompt in waiting:
            exchanges[index] = await _exchange(http, target, prompt, output_tokens)

    # A connection for every request: llama.cpp's server may close one that is about to be used again.
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(base_url=target.base_url, timeout=None, limits=limits, trust_env=False) as http,
        asyncio.TaskGroup() as clients,
    ):
        for _ in range(concurrency):
            clients.create_task(client(http))
    return [exchanges[index] for index in range(len(prompts))]


async def _exchange(http: httpx.AsyncClient, target: Target, prompt: str, output_tokens: int) -> Exchange:
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
        **target.extra_body,
    }
    arrivals: list[tuple[float, bytes]] = []
    sent_s = time.perf_counter()
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for piece in response.aiter_bytes():
                arrivals.append((time.perf_counter(), piece))  # noqa: PERF401 (a comprehension hides the clock)
    except httpx.HTTPError as error:
        raise LoadError(f"{target.name} broke off: {error!r}") from error
    if response.status_code != httpx.codes.OK:
        text = b"".join(piece for _, piece in arrivals).decode("utf-8", "replace")
        raise LoadError(f"{target.name} answered {response.status_code}: {text[:500]}")
    return _read(target, sent_s, arrivals, output_tokens)


def _read(target: Target, sent_s: float, arrivals: Sequence[tuple[float, bytes]], output_tokens: int) -> Exchange:
    usage: dict[str, int] | None = None
    token_times_s: list[float] = []
    for arrived_s, event in _events(arrivals):
        if "error" in event:
            raise LoadError(f"{target.name} broke off an answer: {event['error']}")
        usage = event.get("usage") or usage
        if any(choice["delta"].get("content") for choice in event["choices"]):
            token_times_s.append(arrived_s)
    if usage is None or len(token_times_s) < 2:
        raise LoadError(f"{target.name}: {len(token_times_s)} pieces of text and usage {usage} in an answer")
    if usage["completion_tokens"] != output_tokens:
        raise LoadError(f"{target.name} counts {usage['completion_tokens']} output tokens, not {output_tokens}")
    return Exchange(
        sent_s=sent_s,
        token_times_s=tuple(token_times_s),
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
    )


def _events(arrivals: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Each JSON event of a stream, with the time at which its line was complete."""
    rest = b""
    for arrived_s, piece in arrivals:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(_EVENT_PREFIX)
            if data != line.strip() and data != _END:
                yield arrived_s, json.loads(data)
