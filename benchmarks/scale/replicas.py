"""Sessions that share beginnings over several engines: hit share, waiting and losses, by how requests are sent.

    python -m benchmarks scale.replicas QUESTIONS.jsonl OUT.json --trace AzureLLMInferenceTrace_conv.csv
        [--engines 2] [--minutes 5] [--rate 1.0] [--kills 2] [--rounds 2] [--model MODEL]

QUESTIONS: of Spec-Bench. Requests come when the trace says, at `rate` a second in the mean, whether earlier ones
are done or not. Each belongs to a session, of which there are always 12: one of four beginnings of about 400
tokens, made of questions, then the turns so far; an answer has at most 48 tokens. Arms, in turn:

    one engine      all cores
    by prefix       the port of all engines, which chooses
    in turn         the engines' own ports, one after the other

With --kills an engine is killed so often, evenly through each run of the arm `by prefix`. Then every request is
counted as answered, as one whose stream ended with an error event, as cut off: it had begun and ended without a
word, or as lost: refused, or without anything.
"""

import argparse
import asyncio
import csv
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.progress import track

from benchmarks.prompts import load_prompts
from benchmarks.runner import about, command_line, write_json
from benchmarks.servers import Server, faser_recipe, free_port

ONE, PREFIX, TURNS = "one engine", "by prefix", "in turn"
_SESSIONS, _BEGINNINGS, _BEGINNING_CHARS, _TURNS = 12, 4, 1600, 5
_ANSWER_TOKENS = 48
SESSION_HEADER = "x-session-id"
_OUTCOMES = ("answered", "error event", "cut off", "lost")


@dataclass(slots=True)
class Session:
    """messages: of the turns so far."""

    number: int
    messages: list[dict[str, str]]
    turns: int = 0


@dataclass(slots=True)
class Run:
    """first_s, total_s: of answered requests, in seconds. prompt_tokens, cached_tokens: of the same."""

    outcomes: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    hit_share: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def report(self) -> dict[str, Any]:
        def of(values: Sequence[float], share: float) -> float | None:
            return round(sorted(values)[int(share * (len(values) - 1))], 3) if values else None

        return {
            "requests": {name: self.outcomes[name] for name in _OUTCOMES},
            "prefix hit share": round(self.hit_share, 4),
            "output tokens/s": round(self.tokens / self.seconds, 1),
            "first token s": {"median": of(self.first_s, 0.5), "p90": of(self.first_s, 0.9)},
            "whole answer s": {"median": of(self.total_s, 0.5), "p90": of(self.total_s, 0.9)},
        }


class Sessions:
    """Whose turn it is, and what is asked. Equal seeds give equal sessions, but for the answers in them."""

    def __init__(self, texts: Sequence[str], seed: int) -> None:
        self._texts, self._random, self._begun = texts, random.Random(seed), 0
        whole = iter(texts)
        self._beginnings = []
        for _ in range(_BEGINNINGS):
            beginning = ""
            while len(beginning) < _BEGINNING_CHARS:
                beginning += next(whole) + "\n\n"
            self._beginnings.append(beginning[:_BEGINNING_CHARS])
        self._sessions = [self._fresh() for _ in range(_SESSIONS)]

    def next(self) -> Session:
        """A session with one more question, which is not asked again before it has its answer, if that can be."""
        at = self._random.randrange(_SESSIONS)
        if self._sessions[at].turns >= _TURNS:
            self._sessions[at] = self._fresh()
        session = self._sessions[at]
        session.turns += 1
        session.messages.append({"role": "user", "content": self._random.choice(self._texts)[:400]})
        return session

    def _fresh(self) -> Session:
        self._begun += 1
        return Session(self._begun, [{"role": "system", "content": self._random.choice(self._beginnings)}])


def arrivals(trace: Path, rate: float, seconds: float) -> Iterator[float]:
    """Seconds since the start, with the trace's gaps stretched to this rate."""
    with trace.open(newline="") as file:
        stamps = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in csv.DictReader(file)]
    stamps = stamps[: int(rate * seconds * 1.5) + 2]
    stretch = (len(stamps) - 1) / rate / (stamps[-1] - stamps[0])
    for stamp in stamps:
        if (at := (stamp - stamps[0]) * stretch) > seconds:
            return
        yield at


async def run(
    urls: Sequence[str],
    sessions: Sessions,
    times: Sequence[float],
    kills: Sequence[tuple[float, Callable[[], None]]],
) -> Run:
    """urls: in turn. kills: what is done in a thread, and when, in seconds since the start."""
    found, began_s = Run(), time.monotonic()
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2)  # before the server closes idle connections
    async with httpx.AsyncClient(timeout=600, trust_env=False, limits=limits) as http:
        killing = asyncio.create_task(kill_all(kills, began_s))
        tasks = []
        for number, at in enumerate(track(times, "requests", transient=True)):
            await asyncio.sleep(max(0.0, began_s + at - time.monotonic()))
            tasks.append(asyncio.create_task(ask(http, urls[number % len(urls)], sessions.next(), found)))
        await asyncio.gather(*tasks, killing)
    found.seconds = time.monotonic() - began_s
    found.hit_share = found.cached_tokens / found.prompt_tokens if found.prompt_tokens else 0.0
    return found


async def ask(http: httpx.AsyncClient, url: str, session: Session, found: Run, model: str | None = None) -> None:
    body: dict[str, Any] = {
        "messages": [*session.messages],
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "sessions",  # without one, answers do not say what came from a cache
    }
    body |= {} if model is None else {"model": model}
    headers = {SESSION_HEADER: str(session.number)}
    began_s, first_s, text, outcome = time.monotonic(), None, "", "lost"
    try:
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            if answer.status_code == 200:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        outcome = "answered"
                        break
                    event = json.loads(line[6:])
                    if "error" in event:
                        outcome = "error event"
                        break
                    if usage := event.get("usage"):
                        found.prompt_tokens += usage["prompt_tokens"]
                        found.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
                        continue
                    first_s = first_s or time.monotonic() - began_s
                    outcome = "cut off"  # unless it goes on
                    found.tokens += 1
                    text += event["choices"][0]["delta"].get("content") or ""
    except httpx.HTTPError:
        pass
    found.outcomes[outcome] += 1
    if outcome == "answered":
        session.messages.append({"role": "assistant", "content": text})
        found.total_s.append(time.monotonic() - began_s)
        found.first_s.append(first_s or found.total_s[-1])


async def kill_all(kills: Sequence[tuple[float, Callable[[], None]]], began_s: float) -> None:
    for at, kill in kills:
        await asyncio.sleep(max(0.0, began_s + at - time.monotonic()))
        await asyncio.to_thread(kill)


def kill_engine(server: Server) -> None:
    """One at random."""
    if engines := [each for each in server.children() if each.is_running()]:
        os.kill(random.choice(engines).pid, signal.SIGKILL)


def measure(given: argparse.Namespace) -> dict[str, list[Run]]:
    texts = [each.text for each in load_prompts(given.questions)]
    seconds = 60 * given.minutes
    times = list(arrivals(given.trace, given.rate, seconds))
    kill_at = [seconds * (number + 1) / (given.kills + 1) for number in range(given.kills)]
    found: dict[str, list[Run]] = {arm: [] for arm in given.arms.split(",")}
    own = [given.model] if given.model else []
    for round_number in range(given.rounds):
        arms = list(found) if round_number % 2 == 0 else list(found)[::-1]
        for arm in arms:
            first = free_port()
            flags = [] if arm == ONE else ["-dp", str(given.engines), "--data-parallel-first-port", str(first)]
            with tempfile.TemporaryDirectory(prefix="faser-replicas-") as folder:
                recipe = faser_recipe(arm, [*own, *flags, "--engine-restarts", "9"], Path(folder))
                with Server(recipe) as server:
                    server.wait_until_healthy(route="/ready")
                    host = server.url.rpartition(":")[0]
                    urls = [server.url]
                    if arm == TURNS:
                        urls = [f"{host}:{first + number}" for number in range(given.engines)]
                    killed = [(at, partial(kill_engine, server)) for at in kill_at if arm == PREFIX]
                    sessions = Sessions(texts, seed=round_number)
                    found[arm].append(asyncio.run(run(urls, sessions, times, killed)))
                    print(arm, found[arm][-1].report(), flush=True)
    return found


def summary(found: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Medians over rounds."""
    return {
        arm: {
            "prefix hit share": round(statistics.median(each.hit_share for each in runs), 4),
            "output tokens/s": round(statistics.median(each.tokens / each.seconds for each in runs), 1),
        }
        for arm, runs in found.items()
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("questions", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--trace", type=Path, required=True, help="of Azure: TIMESTAMP, ContextTokens, GeneratedTokens"
    )
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", default=",".join((ONE, PREFIX, TURNS)), help="of these, in this order")
    parser.add_argument("--model")
    given = parser.parse_args()
    found = measure(given)
    write_json(
        given.out,
        {
            **about("scale.replicas"),
            "settings": {name: getattr(given, name) for name in ("engines", "minutes", "rate", "kills", "rounds")},
            "medians": summary(found),
            "runs": {arm: [each.report() for each in runs] for arm, runs in found.items()},
        },
    )
