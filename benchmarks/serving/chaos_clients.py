"""Clients of every kind: some wait for their answers, others leave, stall, or send what no server should be sent.

Each action is one request, and returns how it ended. What a client that behaves must never see is a Violation:
neither tokens nor a well-formed error. Of one that does not, a closed connection is enough.
"""

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

TOKENS, ERROR, LEFT, CLOSED, PROBED = "tokens", "error", "left", "closed", "probed"

_TIMEOUT_S = 180.0  # longer than a hang, a restart and a full queue together
_WORDS = (
    *("the", "a", "fox", "river", "seven", "quick", "lazy", "model", "reads", "writes"),
    *("answer", "token", "street", "blue", "if", "until", "and", "prime", "what", "of"),
)
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


class Violation(Exception):
    """A request ended in neither tokens nor a well-formed error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """Needs of an action: the server, and the client's own source of chance."""

    http: httpx.AsyncClient
    address: tuple[str, int]
    rng: random.Random

    def words(self, low: int, high: int) -> str:
        return " ".join(self.rng.choices(_WORDS, k=self.rng.randint(low, high)))

    def completion(self, **fields: Any) -> dict[str, Any]:
        """A body that can be served. Prompts differ, so that blocks change hands."""
        body = {"prompt": self.words(5, 250), "max_tokens": self.rng.randint(1, 48), "ignore_eos": True}
        return {**body, "temperature": self.rng.choice((0, 1)), "n": self.rng.choice((1, 1, 1, 2)), **fields}


Action = Callable[[Visit], Awaitable[str]]


def http_client(url: str) -> httpx.AsyncClient:
    """A client with a connection for every request."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=_TIMEOUT_S, trust_env=False)


async def answer(visit: Visit) -> str:
    reply = await visit.http.post("/v1/completions", json=visit.completion())
    if reply.status_code != 200:
        return honest_error(reply.status_code, reply.content)
    content = reply.json()
    reasons = {choice["finish_reason"] for choice in content["choices"]}
    if not reasons <= {"stop", "length"} or not content["usage"]["completion_tokens"]:
        raise Violation(f"an answer without an end: {content}")
    return TOKENS


async def stream(visit: Visit) -> str:
    body = visit.completion(stream=True)
    body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    async with visit.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            return honest_error(reply.status_code, await reply.aread())
        said = (await reply.aread()).decode()
    return stream_end([line for line in said.split("\n") if line])  # aiter_lines would split at U+2028 as well


async def cancel(visit: Visit) -> str:
    """Leave a stream after a few of its events."""
    body = visit.completion(stream=True, max_tokens=200)
    num_events = visit.rng.randint(0, 6)
    async with visit.http.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            return honest_error(reply.status_code, await reply.aread())
        async for line in reply.aiter_lines():
            num_events -= bool(line)
            if num_events < 0:
                break
    return LEFT


async def disconnect(visit: Visit) -> str:
    """Ask for a long answer and go, without a word or with a reset, while it waits or runs."""
    body = json.dumps(visit.completion(max_tokens=200, stream=visit.rng.random() < 0.5)).encode()
    _, writer = await _asking(visit, body, len(body))
    await asyncio.sleep(visit.rng.uniform(0, 1.5))
    if visit.rng.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    await _close(writer)
    return LEFT


async def stalled_body(visit: Visit) -> str:
    """Send part of a body, and the rest late or never."""
    body = json.dumps(visit.completion()).encode()
    sent = visit.rng.randrange(len(body))
    reader, writer = await _asking(visit, body[:sent], len(body))
    try:
        await asyncio.sleep(visit.rng.uniform(0.5, 8))
        if visit.rng.random() < 0.5:
            return LEFT
        writer.write(body[sent:])
        head = await asyncio.wait_for(reader.readline(), _TIMEOUT_S)
    except ConnectionError:
        return CLOSED
    finally:
        await _close(writer)
    if not head:
        return CLOSED
    if not head.startswith(b"HTTP/1.1 "):
        raise Violation(f"a late body was answered with {head!r}")
    return TOKENS if head.split()[1] == b"200" else ERROR


async def malformed_body(visit: Visit) -> str:
    depth = visit.rng.randint(10, 500)
    content = visit.rng.choice(
        (
            b"",
            b"null",
            b'{"prompt": "the',
            bytes(visit.rng.randrange(256) for _ in range(200)),
            b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}",
            b'{"prompt": "a", "max_tokens": -1}',
            b'{"prompt": "a", "max_tokens": 1e400}',
            b'{"prompt": [1, 99999999]}',
            b'{"prompt": "a", "temperature": "warm", "n": {}}',
            b'{"prompt": "\\ud800", "max_tokens": "many"}',
        )
    )
    headers = {"Content-Type": "application/json"}
    reply = await visit.http.post("/v1/completions", content=content, headers=headers)
    return _refusal(reply)


async def huge_prompt(visit: Visit) -> str:
    """A prompt of up to a megabyte, far longer than the context."""
    body = visit.completion(prompt=visit.words(20_000, 200_000))
    return _refusal(await visit.http.post("/v1/completions", json=body))


async def huge_header(visit: Visit) -> str:
    headers = {"X-Padding": "x" * visit.rng.randint(10_000, 1_000_000)}
    try:
        reply = await visit.http.get("/v1/models", headers=headers)
    except httpx.TransportError:
        return CLOSED
    if reply.status_code != 200 and not 400 <= reply.status_code < 500:
        raise Violation(f"a huge header was answered with {reply.status_code}: {reply.text[:200]}")
    return ERROR


async def probe(visit: Visit) -> str:
    """The routes that orchestrators and dashboards ask: alive throughout, also while the engine is restarted."""
    route = visit.rng.choice(("/health", "/ready", "/metrics", "/v1/models"))
    reply = await visit.http.get(route)
    if reply.status_code != 200 and (route, reply.status_code) != ("/ready", 503):
        raise Violation(f"{route} answered {reply.status_code}: {reply.text[:200]}")
    return PROBED


# How often each is chosen.
ACTIONS: dict[Action, int] = {
    answer: 20,
    stream: 20,
    cancel: 15,
    disconnect: 10,
    stalled_body: 8,
    malformed_body: 10,
    huge_prompt: 2,
    huge_header: 4,
    probe: 11,
}


async def act(action: Action, visit: Visit) -> str:
    """Return how an action ended. Raises Violation, also where the server broke off or exceeded _TIMEOUT_S."""
    try:
        return await action(visit)
    except (httpx.HTTPError, OSError, TimeoutError) as error:
        raise Violation(f"the server broke off: {error!r}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Violation(f"the answer cannot be read: {error!r}") from error


def honest_error(status: int, content: bytes) -> str:
    """The end of a request that was right: an error says that the engine ended, or that there is no room now."""
    message = _message(status, json.loads(content))
    if status in (429, 503):
        return ERROR
    raise Violation(f"a right request was answered with {status}: {message}")


def stream_end(events: list[str]) -> str:
    """Return how a stream ended, by its lines. Raises Violation if it just stopped."""
    if len(events) < 2 or events[-1] != "data: [DONE]":
        raise Violation(f"a stream without an end: {events[-2:]}")
    contents = [json.loads(each.removeprefix("data: ")) for each in events[:-1]]
    if "error" in contents[-1]:
        return honest_error(contents[-1]["error"]["code"], json.dumps(contents[-1]).encode())
    if not any(choice["finish_reason"] for each in contents for choice in each["choices"]):
        raise Violation(f"a stream without a finish reason: {events[-2:]}")
    return TOKENS


def _refusal(reply: httpx.Response) -> str:
    """The end of a request that was wrong."""
    message = _message(reply.status_code, reply.json())
    if not (400 <= reply.status_code < 500 or reply.status_code == 503):
        raise Violation(f"a wrong request was answered with {reply.status_code}: {message}")
    return ERROR


def _message(status: int, content: Any) -> str:
    """The message of a well-formed error. Raises Violation for any other content."""
    error = content.get("error") if isinstance(content, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("type"), str) or error.get("code") != status:
        raise Violation(f"an error that is not well-formed: {status} {content}")
    message = error.get("message")
    if not isinstance(message, str) or not message:
        raise Violation(f"an error without a message: {status} {content}")
    return message


async def _asking(visit: Visit, content: bytes, length: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which a completion has been asked for, with the beginning of a body of `length` bytes."""
    reader, writer = await asyncio.open_connection(*visit.address)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {visit.address[0]}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {length}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    return reader, writer


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):  # the server may have been first
        await writer.wait_closed()
