"""Costs of real parts that a fleet has many of: FASER's own router, the events of one cache, a page of metrics.

    python -m benchmarks.scale.fleet.costs TRACE.csv OUT.json

TRACE: of Azure. Each part is the code that serves, without a server around it. Times are of one processor, this
machine's; counts and bytes are those of any.
"""

import asyncio
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec

from benchmarks.observability.scrape import answered
from benchmarks.runner import about, command_line, write_json
from benchmarks.scale.fleet.replicas import CACHE_TOKENS
from benchmarks.scale.fleet.workload import BEGINNING_TOKENS, FleetRequest, fleet_requests
from benchmarks.simulator.workload import read_azure
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.output_stream import OutputStream
from faser.engine.client.replicas import Replicas
from faser.engine.control.kv_cache import KvManager
from faser.metrics.server import Metrics
from faser.types import EngineState, Request, SamplingParams

FLEETS = (1, 10, 100, 1000)
_TRACE_S = 600  # of the trace, for events
_VOCABULARY = 128_000
_BLOCK = 16
_FRAMES_BYTES = 40 + 8  # topic and number of a batch


class _IdleEngine:
    """Takes every request and does nothing."""

    state = EngineState.READY

    def submit(self, _request: Request, **_given: int) -> OutputStream:
        return cast(OutputStream, _Silent())


class _Silent:
    def close(self) -> None:
        """Nothing to stop."""


def router_costs(counts: Sequence[int], prompt_tokens: int, requests: int = 300) -> list[dict[str, Any]]:
    """Measure faser/engine/client/replicas.py: time of a choice, the front-end's own, and bytes it remembers.

    Prompts begin with one of 20 beginnings. The first half of the requests warms up.
    """
    random = Random(0)
    beginnings = [_tokens(random, BEGINNING_TOKENS) for _ in range(20)]
    prompts = [
        random.choice(beginnings) + _tokens(random, prompt_tokens - BEGINNING_TOKENS) for _ in range(requests)
    ]
    found = []
    for count in counts:
        replicas = Replicas([cast(AsyncEngine, _IdleEngine()) for _ in range(count)])
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        asyncio.run(_route(replicas, prompts[: requests // 2]))
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        times = asyncio.run(_route(replicas, prompts[requests // 2 :]))
        found.append(
            {
                "replicas": count,
                "µs a request": round(1e6 * statistics.median(times), 1),
                "bytes a request": round((after - before) / (requests // 2)),
            }
        )
    return found


async def _route(replicas: Replicas, prompts: Sequence[list[int]]) -> list[float]:
    times = []
    for number, prompt in enumerate(prompts):
        request = Request(
            request_id=str(number), prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=8)
        )
        began_s = time.thread_time()
        stream = replicas.submit(request)
        times.append(time.thread_time() - began_s)
        await stream.__aexit__()
    return times


def event_costs(requests: Sequence[FleetRequest], cache_tokens: int) -> dict[str, Any]:
    """Measure the KV events of one replica that serves these, one after the other."""
    kv = KvManager(cache_tokens // _BLOCK, _BLOCK, records_events=True)
    batches: list[bytes] = []
    stored = removed = 0
    for request in requests:
        tokens = _session(request)
        table = kv.new_table()
        prompt = request.prompt_tokens
        prefix = kv.cached_prefix(table, tokens[:prompt])
        kv.adopt(table, prefix)
        kv.allocate(table, kv.blocks_for(len(tokens)) - len(prefix))
        for computed in (prompt, *range(prompt + _BLOCK, len(tokens) + 1, _BLOCK)):
            kv.publish(table, tokens, computed)
            if events := kv.take_events():
                batches.append(msgspec.msgpack.encode((time.time(), events, 0)))
                for each in events:
                    count = len(each.block_hashes)
                    if type(each).__name__ == "BlockStored":
                        stored += count
                    else:
                        removed += count
        kv.release(table)
    return {
        "requests": len(requests),
        "blocks stored a request": round(stored / len(requests), 1),
        "blocks removed a request": round(removed / len(requests), 1),
        "batches a request, at most": round(len(batches) / len(requests), 1),
        "bytes a request": round(sum(len(each) + _FRAMES_BYTES for each in batches) / len(requests)),
    }


def page_costs() -> dict[str, Any]:
    """Measure /metrics of one replica that has served."""
    metrics = Metrics(model_name="model", max_model_len=8192)
    answered(metrics)
    page = metrics.render()
    return {"bytes": len(page), "series": sum(not line.startswith(b"#") for line in page.splitlines())}


def _session(request: FleetRequest) -> list[int]:
    """Prompt and answer. Turns of a session repeat each other as far as both reach, and sessions a beginning."""
    whole = request.prompt_tokens + request.output_tokens
    beginning = _tokens(Random(request.beginning), BEGINNING_TOKENS)
    return (beginning + _tokens(Random(BEGINNING_TOKENS + request.session), whole))[:whole]


def _tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(_VOCABULARY) for _ in range(count)]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    trace = read_azure(given.trace)
    mean_prompt = round(sum(prompt for _, prompt, _ in trace) / len(trace))
    requests = fleet_requests(trace, rate=len(trace) / trace[-1][0], seconds=_TRACE_S, seed=0)
    found = {
        "mean prompt tokens": mean_prompt,
        "a choice of FASER's router": router_costs(FLEETS, mean_prompt),
        "KV events of a replica": event_costs(requests, CACHE_TOKENS),
        "a page of /metrics": page_costs(),
    }
    write_json(given.out, {**about("benchmarks.scale.fleet.costs"), **found}, show=True)


if __name__ == "__main__":
    main()
