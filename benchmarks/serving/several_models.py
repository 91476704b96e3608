"""Two models on one server: what a load costs a stream of the other one, what both cost at once, and what stays.

    python -m benchmarks serving.several_models SMALL LARGE [--rounds 3] [--loads 10] [--tokens 300] [--out FILE]

Arms take turns in each round. `stream`: the small model alone; `stream beside a load`: the same while the large
one is loaded; `large`: the large one alone; `both`: both at once. Gaps are between the chunks of a stream of one
token each: the server does not speculate. Then the large model is loaded and unloaded many times, and both are
left idle.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import openai
import psutil

from benchmarks.runner import Json, about, command_line, end_servers_on_sigterm, in_turn, write_json
from benchmarks.servers import Server, faser_recipe

_TIMEOUT_S = 1800.0
_IDLE_S = 10.0
_ENDLESS = 6000  # tokens: more than a load takes
_PROMPT = "Count from one upwards, in words: one, two, three,"
ARMS = ("stream", "stream beside a load", "large", "both")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("small")
    parser.add_argument("large")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", type=int, default=10, help="of the large model, for what stays (default 10)")
    parser.add_argument("--tokens", type=int, default=300, help="of a stream (default 300)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    end_servers_on_sigterm()
    flags = ("--model", options.small, "--model", options.large, "--speculative-policy", "off")
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(faser_recipe("server", flags, Path(folder))) as server,
    ):
        server.wait_until_healthy(route="/ready")
        results = asyncio.run(_Session(server, options.small, options.large, options.tokens).run(options))
    results = {**about("serving.several_models"), **results}
    print(results)
    if options.out is not None:
        write_json(options.out, results)


class _Session:
    """One server, from its first request on."""

    def __init__(self, server: Server, small: str, large: str, num_tokens: int) -> None:
        self._server, self._small, self._large, self._num_tokens = server, small, large, num_tokens
        self._client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=_TIMEOUT_S)

    async def run(self, options: Any) -> Json:
        await self._stream(self._small, 8)
        first = await self._beside_a_load()  # it compiles kernels, and makes a tokenizer
        rounds = []
        for number in range(options.rounds):
            rounds.append({arm: await self._arm(arm) for arm in in_turn(ARMS, number)})
            print(rounds[-1], flush=True)
        return {
            "summary": _summary(rounds),
            "first load": first,
            "rounds": rounds,
            **await self._come_and_go(options.loads),
        }

    async def _arm(self, arm: str) -> Json:
        match arm:
            case "stream":
                return _figures([await self._stream(self._small, self._num_tokens)])
            case "stream beside a load":
                await self._unload()
                return await self._beside_a_load()
            case "large":
                return _figures([await self._stream(self._large, self._num_tokens // 4)])
            case _:
                streams = (
                    self._stream(self._small, self._num_tokens),
                    self._stream(self._large, self._num_tokens // 4),
                )
                return _figures(await asyncio.gather(*streams))

    async def _beside_a_load(self) -> Json:
        loaded = asyncio.Event()
        streaming = asyncio.create_task(self._stream(self._small, _ENDLESS, loaded))
        await asyncio.sleep(0.5)
        load_s = await self._load()
        loaded.set()
        return {**_figures([await streaming]), "load_s": round(load_s, 2)}

    async def _stream(self, model: str, num_tokens: int, until: asyncio.Event | None = None) -> list[float]:
        """When each chunk came. until: the stream is left then."""
        came: list[float] = []
        stream = await self._client.completions.create(
            model=model,
            prompt=_PROMPT,
            max_tokens=num_tokens,
            stream=True,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        async with stream:
            async for _ in stream:
                came.append(time.perf_counter())
                if until is not None and until.is_set():
                    break
        return came

    async def _load(self) -> float:
        """Seconds until the large model has answered with one token."""
        began_s = time.perf_counter()
        await self._client.completions.create(model=self._large, prompt="a", max_tokens=1)
        return time.perf_counter() - began_s

    async def _unload(self) -> None:
        await self._client.post("/models/unload", cast_to=object, body={"model": self._large})

    async def _come_and_go(self, loads: int) -> Json:
        """Load and unload the large model; then leave both idle."""
        front_end = psutil.Process(self._server.children()[0].ppid())
        rss, load_s = [], []
        for _ in range(loads):
            await self._unload()
            load_s.append(round(await self._load(), 2))
            rss.append(round(front_end.memory_info().rss / 2**20, 1))
        before_s = self._server.cpu_s()
        await asyncio.sleep(_IDLE_S)
        idle = (self._server.cpu_s() - before_s) / _IDLE_S
        return {"load_s": load_s, "front_end_mib": rss, "idle_cores_of_all_processes": round(idle, 4)}


def _figures(streams: Sequence[Sequence[float]]) -> Json:
    """Tokens a second and gaps in ms, of each stream."""
    found = []
    for came in streams:
        gaps = sorted(1000 * (after - before) for before, after in itertools.pairwise(came))
        found.append(
            {
                "tokens_s": round(len(gaps) / (came[-1] - came[0]), 2),
                "median_gap_ms": round(median(gaps), 1),
                "p99_gap_ms": round(gaps[int(0.99 * (len(gaps) - 1))], 1),
                "largest_gap_ms": round(gaps[-1], 1),
            }
        )
    return {"streams": found}


def _summary(rounds: Sequence[Json]) -> Json:
    """Medians over the rounds, of each arm and stream."""
    return {
        arm: [
            {name: round(median(each[arm]["streams"][at][name] for each in rounds), 2) for name in stream}
            for at, stream in enumerate(rounds[0][arm]["streams"])
        ]
        for arm in ARMS
    }
