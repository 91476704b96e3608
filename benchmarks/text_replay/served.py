"""Conversations through servers: default flags, past answers forgotten, and no drafts, in turn.

Owns the servers and the runs. An idle server is frozen. Every run has cache salts of its own, so no run knows what
another one said; within a run either each conversation has a salt, or all have one, as those of one client do.
"""

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.paired import in_turn, ratio
from benchmarks.peers.servers import Recipe, Server, free_port
from benchmarks.text_replay.traffic import AGENT, TURNS, Conversation, conversations, grown
from faser.cli.console import runs_bar

OFF, DEFAULT = "off", "default"
ARMS = {
    DEFAULT: (),
    "no past answers": ("--speculative-config", '{"suffix_decoding_max_cached_requests": 0}'),
    OFF: ("--speculative-policy", "off"),
}
OWN, ONE = "one for each conversation", "one for all"
SALTS = (OWN, ONE)
_TALKS = {TURNS: 4, AGENT: 6}  # conversations of a run
_START_TIMEOUT_S, _TIMEOUT_S = 600.0, 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    kind: str
    concurrency: int
    salts: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """tokens: output tokens of all answers; drafted, accepted: as `metrics.faser` counts them."""

    tokens: int
    seconds: float
    drafted: int
    accepted: int
    texts: tuple[str, ...]


def measure(questions: Path, *, rounds: int, concurrency: Sequence[int], max_tokens: dict[str, int]) -> list[Any]:
    """A row for each cell and arm: tokens per second, and ratios over the other arms within a round."""
    cells = [
        Cell(kind=kind, concurrency=count, salts=salts)
        for kind in _TALKS
        for count in concurrency
        for salts in SALTS
    ]
    runs: dict[Cell, dict[str, list[Run]]] = {cell: {arm: [] for arm in ARMS} for cell in cells}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {arm: stack.enter_context(_started(arm, flags, folder)) for arm, flags in ARMS.items()}
        bar = stack.enter_context(runs_bar())
        task = bar.add_task("", total=rounds * len(cells) * len(ARMS))
        for number in range(rounds):
            for cell in cells:
                count = _TALKS[cell.kind]
                talks = conversations(cell.kind, questions, count=count, start=number * count)
                for arm in in_turn(list(ARMS), number):
                    servers[arm].thaw()
                    salt = f"{number}/{arm}/{cell}"
                    url = servers[arm].recipe.base_url
                    runs[cell][arm].append(asyncio.run(_run(url, talks, cell, salt, max_tokens[cell.kind])))
                    servers[arm].freeze()
                    bar.advance(task)
    return [_row(cell, arm, by_arm) for cell, by_arm in runs.items() for arm in ARMS if arm != OFF]


async def _run(url: str, talks: Sequence[Conversation], cell: Cell, salt: str, max_tokens: int) -> Run:
    waiting = iter(talks)
    answers: list[tuple[str, int, dict[str, Any]]] = []

    async def client(http: httpx.AsyncClient) -> None:
        for talk in waiting:
            said: list[str] = []
            for turn in range(talk.num_turns):
                body = {
                    "messages": grown(talk, said),
                    "max_tokens": max_tokens,
                    "temperature": 0,
                    "cache_salt": salt if cell.salts == ONE else f"{salt}/{talk.name}",
                }
                response = await http.post("/v1/chat/completions", json=body)
                response.raise_for_status()
                answer = response.json()
                said.append(answer["choices"][0]["message"]["content"])
                answers.append((talk.name, turn, answer))

    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as http:
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(cell.concurrency):
                clients.create_task(client(http))
        seconds = time.perf_counter() - began_s
    in_order = [answer for _, _, answer in sorted(answers, key=lambda each: each[:2])]
    counted = [(answer.get("metrics") or {}).get("faser") or {} for answer in in_order]
    return Run(
        tokens=sum(answer["usage"]["completion_tokens"] for answer in in_order),
        seconds=seconds,
        drafted=sum(each.get("drafted", 0) for each in counted),
        accepted=sum(each.get("accepted", 0) for each in counted),
        texts=tuple(answer["choices"][0]["message"]["content"] for answer in in_order),
    )


def _row(cell: Cell, arm: str, runs: dict[str, list[Run]]) -> dict[str, Any]:
    rates = {each: [run.tokens / run.seconds for run in of_arm] for each, of_arm in runs.items()}
    mine = runs[arm]
    return {
        "kind": cell.kind,
        "requests": cell.concurrency,
        "salts": cell.salts,
        "arm": arm,
        "tokens_per_s": round(statistics.median(rates[arm]), 1),
        "off_tokens_per_s": round(statistics.median(rates[OFF]), 1),
        "over_off": ratio(rates[arm], rates[OFF]).rounded(),
        "over_no_past_answers": ratio(rates[arm], rates["no past answers"]).rounded(),
        "accepted_a_token": round(sum(run.accepted for run in mine) / sum(run.tokens for run in mine), 3),
        "accepted_share": round(sum(run.accepted for run in mine) / max(sum(run.drafted for run in mine), 1), 3),
        "different_answers": sum(
            one != other
            for run, off in zip(mine, runs[OFF], strict=True)
            for one, other in zip(run.texts, off.texts, strict=True)
        ),
    }


@contextlib.contextmanager
def _started(arm: str, flags: Sequence[str], folder: Path) -> Iterator[Server]:
    port = free_port()
    recipe = Recipe(
        name=arm,
        command=(sys.executable, "-m", "faser", "serve", "--port", str(port), *flags),
        environment={},
        base_url=f"http://127.0.0.1:{port}",
        log_path=folder / f"{arm.replace(' ', '-')}.log",
    )
    with Server(recipe) as server:
        server.wait_until_healthy(_START_TIMEOUT_S)
        body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32, "ignore_eos": True}
        httpx.post(f"{recipe.base_url}/v1/chat/completions", json=body, timeout=_TIMEOUT_S, trust_env=False)
        server.freeze()
        yield server
