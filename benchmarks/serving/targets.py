"""Targets under real arrivals, served: who keeps them by load, with drafts or without, and what was predicted.

    python -m benchmarks serving.targets QUESTIONS.jsonl OUT.json --trace AZURE.csv [--model MODEL] [--base
    CHECKOUT]
        [--loads 0.5,0.7,0.9,1.1] [--seconds 60] [--rounds 3] [--arms off,fixed,new] [--arm NAME='FLAGS' ...]
        [--max-tokens 64]

Arms: off; fixed (3 draft tokens); new (default flags, requests whose targets cannot be met are refused), or those
of them that --arms names, off among them; and with --base today, the default flags of another checkout. Every arm
is a server of its own, frozen while another one is measured; a round visits every load, and in it every arm, in
turn. Stretches of the trace (Azure LLM inference trace, arXiv 2311.18677) keep their bursts: their times are
multiplied by one factor. Answers have the trace's lengths, at most --max-tokens; prompts are questions that people
wrote. Each request has a cache_salt of its own.

The capacity is what arm off serves in a closed loop, in requests a second (or --capacity); a load is a share of
it. The targets are --slo-ttft-ms and --slo-tpot-ms, or ten times and three times what a request takes alone under
off. attainment counts all requests: one that was refused has missed. predicted: what /metrics says when the
last request of a run is due, the first token and further ones in milliseconds, null where the model does not know.
"""

import argparse
import asyncio
import json
import math
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx

from benchmarks.cells import Cell, Times
from benchmarks.prompts import Prompt, load_prompts
from benchmarks.runner import about, command_line, interleaved, named, portable, write_json
from benchmarks.servers import ANSWER_TIMEOUT_S, Recipe, Server, faser_recipe
from benchmarks.simulator.workload import read_azure
from faser.cli.bench.estimates import difference

OFF, TODAY, NEW = "off", "today", "new"
ARMS = {
    OFF: ("--speculative-policy", "off"),
    "fixed": ("--speculative-policy", "fixed", "--speculative-config", '{"num_speculative_tokens":3}'),
    NEW: ("--speculative-config", '{"admission":"refuse"}'),
}
_WITH_TARGETS = (TODAY, NEW)  # arms whose requests name their targets
_FIRST, _TOKEN = 10.0, 3.0  # targets, in times of a request that is alone
Predicted = dict[str, float | None]  # milliseconds by name
_GAUGE = r'^faser_predicted_{}_seconds{{[^}}]*statistic="mean"[^}}]*}} (\S+)$'


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """at_s: since the beginning of the run."""

    at_s: float
    prompt: Prompt
    max_tokens: int
    salt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Times of one request, in seconds since it was due. num_tokens: 0: it was refused."""

    first_s: float
    last_s: float
    num_tokens: int
    status: int

    @property
    def tpot_s(self) -> float | None:
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    ttft_ms: float
    tpot_ms: float

    def met(self, answer: Answer) -> bool:
        in_time = answer.num_tokens > 0 and 1000 * answer.first_s <= self.ttft_ms
        return in_time and (answer.tpot_s is None or 1000 * answer.tpot_s <= self.tpot_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One arm at one load. lost: answers that are neither whole nor a refusal."""

    requests: int
    refused: int
    lost: int
    attainment: float
    ttft: Times
    tpot: Times
    latency: Times
    tokens_per_s: float
    predicted_ms: Predicted


def main() -> None:
    asked = _arguments()
    prompts, trace = load_prompts(asked.questions, ()), read_azure(asked.trace)
    with tempfile.TemporaryDirectory() as folder:
        servers = {name: Server(recipe) for name, recipe in _recipes(asked, Path(folder)).items()}
        try:
            for server in servers.values():
                server.wait_until_healthy()
                _serve(server.url, _warm_up(prompts), None)
                server.freeze()
            _measure(asked, servers, prompts, trace)
        finally:
            for server in servers.values():
                server.stop()


def _measure(
    asked: argparse.Namespace,
    servers: Mapping[str, Server],
    prompts: Sequence[Prompt],
    trace: Sequence[tuple[float, int, int]],
) -> None:
    with servers[OFF].awake():
        targets = _targets(asked, servers[OFF].url, prompts)
        rate = asked.capacity or _capacity(asked, servers[OFF].url, prompts, trace)

    def run(labels: Mapping[str, Any], arm: str, number: int) -> Run:
        asks = _stretch(asked, trace, prompts, labels["load"] * rate, number, f"{labels['load']}-{arm}")
        with servers[arm].awake():
            began_s = time.perf_counter()
            answers, predicted = _serve(servers[arm].url, asks, targets if arm in _WITH_TARGETS else None)
            seconds = time.perf_counter() - began_s
        return _run(answers, targets, seconds, predicted)

    conditions = {
        **about("serving.targets"),
        "arms": {name: portable(shlex.join(server.recipe.command)) for name, server in servers.items()},
        "capacity": round(rate, 3),
        "targets": asdict(targets),
    }

    def write(cells: Sequence[Cell[Run]]) -> None:
        write_json(asked.out, {**conditions, "cells": [_document(cell) for cell in cells]})

    loads = [{"load": load} for load in asked.loads]
    cells = interleaved(loads, list(servers), asked.rounds, run, after_round=write)
    for cell in cells:
        for arm in servers:
            print(cell.labels["load"], arm, f"{cell.median(arm, lambda each: each.attainment):.1%}", sep="\t")


def _recipes(asked: argparse.Namespace, folder: Path) -> dict[str, Recipe]:
    model = [] if asked.model is None else [asked.model]
    shared = [*model, *shlex.split(asked.server_args)]
    chosen = {name: flags for name, flags in ARMS.items() if name in asked.arms}
    arms = {**chosen, **{name: tuple(shlex.split(flags)) for name, flags in asked.arm}}
    found = {name: faser_recipe(name, [*shared, *flags], folder) for name, flags in arms.items()}
    if asked.base is not None:
        recipe = faser_recipe(TODAY, shared, folder)
        path = os.pathsep.join((str(asked.base), os.environ.get("PYTHONPATH", "")))
        found[TODAY] = replace(recipe, environment={"PYTHONPATH": path, "PYTHONSAFEPATH": "1"})
    return found


def _warm_up(prompts: Sequence[Prompt]) -> list[Ask]:
    return [Ask(at_s=0.0, prompt=each, max_tokens=32, salt=f"warm-{at}") for at, each in enumerate(prompts[:8])]


def _targets(asked: argparse.Namespace, url: str, prompts: Sequence[Prompt]) -> Targets:
    alone = [
        _serve(url, [Ask(at_s=0.0, prompt=each, max_tokens=32, salt=f"alone-{at}")], None)[0][0]
        for at, each in enumerate(prompts[:6])
    ]
    first_ms = 1000 * median(each.first_s for each in alone)
    token_ms = 1000 * median(each.tpot_s or 0.0 for each in alone)
    return Targets(ttft_ms=asked.slo_ttft_ms or _FIRST * first_ms, tpot_ms=asked.slo_tpot_ms or _TOKEN * token_ms)


def _capacity(
    asked: argparse.Namespace, url: str, prompts: Sequence[Prompt], trace: Sequence[tuple[float, int, int]]
) -> float:
    """Requests a second with as many at once as one server runs at most by default."""
    count = asked.capacity_requests
    asks = [
        replace(each, at_s=0.0)
        for each in _stretch(asked, trace, prompts, count / asked.seconds, 0, "capacity")[:count]
    ]
    began_s = time.perf_counter()
    _serve(url, asks, None)
    return len(asks) / (time.perf_counter() - began_s)


def _stretch(
    asked: argparse.Namespace,
    trace: Sequence[tuple[float, int, int]],
    prompts: Sequence[Prompt],
    rate: float,
    number: int,
    name: str,
) -> list[Ask]:
    """Requests of the trace at this rate, in --seconds; each round has another part of it."""
    count = max(round(rate * asked.seconds), 1)
    first = (len(trace) - count - 1) * (2 * number + 1) // (2 * max(asked.rounds, number + 1))
    if first < 0:
        sys.exit(f"{count} requests are wanted; the trace has {len(trace)}")
    part = trace[first : first + count + 1]
    pace = asked.seconds / max(part[-1][0] - part[0][0], 1e-9)
    return [
        Ask(
            at_s=(at_s - part[0][0]) * pace,
            prompt=prompts[(first + place) % len(prompts)],
            max_tokens=max(min(answer, asked.max_tokens), 2),
            salt=f"{name}-{number}-{place}",
        )
        for place, (at_s, _, answer) in enumerate(part[:-1])
    ]


def _serve(url: str, asks: Sequence[Ask], targets: Targets | None) -> tuple[list[Answer], Predicted]:
    """Send each at its time, whatever became of the others."""
    return asyncio.run(_open_loop(url, asks, targets))


async def _open_loop(url: str, asks: Sequence[Ask], targets: Targets | None) -> tuple[list[Answer], Predicted]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_TIMEOUT_S, trust_env=False, limits=limits) as http:
        began_s = time.perf_counter()

        async def wait_until(at_s: float) -> None:
            await asyncio.sleep(max(at_s - (time.perf_counter() - began_s), 0.0))

        async def one(ask: Ask) -> Answer:
            await wait_until(ask.at_s)
            return await _ask(http, ask, targets, began_s + ask.at_s)

        async def predicted() -> Predicted:
            await wait_until(max(ask.at_s for ask in asks))
            return _predicted((await http.get("/metrics")).text)

        answers, found = await asyncio.gather(asyncio.gather(*(one(ask) for ask in asks)), predicted())
        return answers, found


async def _ask(http: httpx.AsyncClient, ask: Ask, targets: Targets | None, due_s: float) -> Answer:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": ask.prompt.text}],
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": ask.salt,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if targets is not None:
        body["speculative"] = {"slo": asdict(targets)}
    first_s = last_s = 0.0
    num_tokens = 0
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if response.status_code != httpx.codes.OK or not line.startswith("data: {"):
                continue
            usage = json.loads(line.removeprefix("data: ")).get("usage") or {}
            if usage.get("completion_tokens", 0) > num_tokens:
                last_s = time.perf_counter() - due_s
                first_s = first_s or last_s
                num_tokens = usage["completion_tokens"]
    return Answer(first_s=first_s, last_s=last_s, num_tokens=num_tokens, status=response.status_code)


def _predicted(text: str) -> Predicted:
    """Milliseconds; None where the model does not know, or the server predicts nothing."""
    found: Predicted = {}
    for name in ("ttft", "tpot", "latency"):
        values = [float(value) for value in re.findall(_GAUGE.format(name), text, re.MULTILINE)]
        found[name] = round(1000 * values[0], 2) if values and math.isfinite(values[0]) else None
    return found


def _run(answers: Sequence[Answer], targets: Targets, seconds: float, predicted: Predicted) -> Run:
    whole = [each for each in answers if each.num_tokens]
    refused = sum(
        each.status in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE) for each in answers
    )
    return Run(
        requests=len(answers),
        refused=refused,
        lost=len(answers) - len(whole) - refused,
        attainment=sum(map(targets.met, answers)) / len(answers),
        ttft=Times.of([each.first_s for each in whole]),
        tpot=Times.of([each.tpot_s for each in whole if each.tpot_s is not None]),
        latency=Times.of([each.last_s for each in whole]),
        tokens_per_s=sum(each.num_tokens for each in whole) / seconds,
        predicted_ms=predicted,
    )


def _document(cell: Cell[Run]) -> dict[str, Any]:
    """Runs of each arm, their means, and how many points more of the requests met their targets than under off."""
    return {
        **cell.labels,
        "arms": {
            arm: {
                "attainment": round(fmean(each.attainment for each in runs), 4),
                "points_over_off": difference(
                    [100 * each.attainment for each in runs], [100 * each.attainment for each in cell.runs[OFF]]
                ).rounded(2),
                "runs": [asdict(each) for each in runs],
            }
            for arm, runs in cell.runs.items()
            if runs
        },
    }


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("questions", type=Path, metavar="QUESTIONS")
    add("out", type=Path, metavar="OUT")
    add("--trace", type=Path, required=True, metavar="CSV")
    add("--model", help="[the default model]")
    add("--base", type=Path, metavar="CHECKOUT", help="of the arm today")
    add("--arm", type=named, action="append", default=[], metavar="NAME=FLAGS")
    add("--arms", type=lambda text: text.split(","), default=list(ARMS), help="of off, fixed and new [all]")
    add("--server-args", default="", metavar="FLAGS", help="of all arms")
    add("--loads", type=lambda text: [float(each) for each in text.split(",")], default=[0.5, 0.7, 0.9, 1.1])
    add("--seconds", type=float, default=60.0)
    add("--rounds", type=int, default=3)
    add("--max-tokens", type=int, default=64)
    add("--capacity", type=float, help="requests a second under off [measured]")
    add("--capacity-requests", type=int, default=96, help="that the capacity is measured with [96]")
    add("--slo-ttft-ms", type=float)
    add("--slo-tpot-ms", type=float)
    return parser.parse_args()
