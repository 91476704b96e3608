"""Growth of the engine's memory while its KV cache is almost unused: churn with and without the prefix cache.

    python -m benchmarks serving.engine_memory OUT.json [--seconds 300] [--clients 4] [--kv-cache-memory 512MiB]

A few clients ask for short answers to prompts that never repeat, so few KV blocks are in use at any moment. Twice
a second, or 300 times in all, the engine's resident memory is noted, and what it should be: as it was when the
engine was ready, and the keys and values computed since. With the prefix cache every finished prompt keeps its
blocks until all blocks have been used once; without it the blocks freed last are used again at once. OUT.svg shows
both.
"""

import argparse
import asyncio
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.runner import about, command_line, write_json
from benchmarks.servers import WatchedServer
from benchmarks.serving.chaos_clients import http_client
from benchmarks.spec_bench.chart import Chart

ARMS: dict[str, tuple[str, ...]] = {
    "prefix cache": ("--enable-prefix-caching",),
    "no prefix cache": ("--no-enable-prefix-caching",),
}
_EVERY_S = 0.5
_MOST_POINTS = 300
_PROMPT_TOKENS = 200
_ANSWER_TOKENS = 16
_FIRST_ID, _LAST_ID = 1000, 40_000  # ordinary tokens of the default model
_MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """at_s: since the churn began. resident: bytes. computed: bytes of keys and values, up to a full KV cache."""

    at_s: float
    resident: int
    computed: int
    kv_usage: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each arm")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--kv-cache-memory", default="512MiB")
    options = parser.parse_args(arguments)
    arms = {
        arm: asyncio.run(_churned((*flags, "--kv-cache-memory", options.kv_cache_memory), options))
        for arm, flags in ARMS.items()
    }
    result = {
        **about("serving.engine_memory", arguments),
        "arms": {arm: _summary(points) for arm, points in arms.items()},
    }
    write_json(options.out, result)
    options.out.with_suffix(".svg").write_text(_picture(arms), encoding="utf-8")
    for arm, points in arms.items():
        print(
            f"{arm}: {points[0].resident / _MB:.0f} MB, then {points[-1].resident / _MB:.0f} MB", file=sys.stderr
        )


async def _churned(flags: Sequence[str], options: argparse.Namespace) -> list[Point]:
    """Return what one server's engine held while clients came and went."""
    with tempfile.TemporaryDirectory() as folder, WatchedServer(Path(folder), flags) as server:
        server.wait_until_healthy(route="/ready")
        async with http_client(server.url) as http:
            pool = await _pool(http)
            points: list[Point] = []
            began_s = time.monotonic()
            clients = asyncio.gather(
                *(_client(http, number, began_s + options.seconds) for number in range(options.clients))
            )
            while not clients.done():
                points.append(await _point(server, http, pool, time.monotonic() - began_s))
                await asyncio.sleep(max(_EVERY_S, options.seconds / _MOST_POINTS))
            await clients
        server.end()
    return points


async def _client(http: httpx.AsyncClient, number: int, until_s: float) -> None:
    rng = random.Random(number)
    while time.monotonic() < until_s:
        prompt = [rng.randint(_FIRST_ID, _LAST_ID) for _ in range(_PROMPT_TOKENS)]
        body = {"prompt": prompt, "max_tokens": _ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        (await http.post("/v1/completions", json=body)).raise_for_status()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    num_tokens: int
    token_bytes: int


async def _pool(http: httpx.AsyncClient) -> _Pool:
    """The KV cache of the default model: keys and values of 30 layers, 3 heads of 64 bfloat16 numbers."""
    text = (await http.get("/metrics")).text
    found = re.search(r'vllm:cache_config_info{block_size="(\d+)",.*num_gpu_blocks="(\d+)"', text)
    assert found is not None, "the server does not tell the size of its KV cache"
    return _Pool(num_tokens=int(found[1]) * int(found[2]), token_bytes=2 * 30 * 3 * 64 * 2)


async def _point(server: WatchedServer, http: httpx.AsyncClient, pool: _Pool, at_s: float) -> Point:
    text = (await http.get("/metrics")).text

    def series(name: str) -> float:
        return float(re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE)[0])

    engine = server.engine()
    assert engine is not None, "the engine has ended"
    num_tokens = series("prompt_tokens_total") + series("generation_tokens_total")
    return Point(
        at_s=round(at_s, 1),
        resident=engine.memory_info().rss,
        computed=int(min(num_tokens, pool.num_tokens) * pool.token_bytes),
        kv_usage=series("kv_cache_usage_perc"),
    )


def _summary(points: Sequence[Point]) -> dict[str, Any]:
    return {
        "resident_mb_at_start": round(points[0].resident / _MB),
        "resident_mb_at_end": round(points[-1].resident / _MB),
        "highest_kv_usage": round(max(each.kv_usage for each in points), 4),
        "computed_mb_at_end": round(points[-1].computed / _MB),
        "rows": [[each.at_s, round(each.resident / _MB), round(each.computed / _MB)] for each in points],
        "columns": ["at_s", "resident_mb", "computed_mb"],
    }


def _picture(arms: dict[str, list[Point]]) -> str:
    everything = [point for points in arms.values() for point in points]
    first = arms["prefix cache"][0]
    chart = Chart(
        title="The engine's memory while prompts come and go",
        x_label="seconds",
        y_label="resident MB",
        low=0,
        high=max(point.at_s for point in everything),
        top=1.1 * max(point.resident for point in everything) / _MB,
    )
    for arm, points in arms.items():
        chart.line(arm, [(point.at_s, point.resident / _MB) for point in points], marks=False)
    expected = [(point.at_s, (first.resident + point.computed) / _MB) for point in arms["prefix cache"]]
    chart.line("start + KV computed", expected, marks=False)
    return chart.svg()
