"""A day of traffic in some minutes: two servers behind a router; one is killed and comes back, one is added.

    python -m benchmarks scale.day QUESTIONS.jsonl OUT.json --trace AzureLLMInferenceTrace_conv.csv
        [--minutes 20] [--rate 1.0] [--fronts "nginx,vllm-router cache_aware"] [--model MODEL]

QUESTIONS: of Spec-Bench. Requests come as the whole trace says, ups and downs, pressed into these minutes and
thinned to `rate` a second in the mean. Sessions and answers are those of benchmarks/scale/replicas.py. For each
router, in turn (see fronts.py for their names):

    3/10 of the time    one of the two servers is killed, with its engine; it is started again at once, as
                        Kubernetes would
    6/10                a third server is started; when it is ready, the router is told of it

Every request counts as answered, as one whose stream ended with an error event, as cut off (it had begun), or as
lost (refused, or without anything). Clients do not try again. Phases: before the server is killed, until the third
one is ready, and after that. The share of prompt tokens from a cache is that of answered requests.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.progress import track

from benchmarks.prompts import load_prompts
from benchmarks.runner import about, command_line, write_json
from benchmarks.scale.fronts import Front, Programs, start_front
from benchmarks.scale.replicas import Run, Sessions, ask
from benchmarks.servers import Recipe, Server, ServerError, faser_recipe, free_port
from benchmarks.simulator.workload import read_azure

MODEL = "model"
KILLED, ADDED = 0.3, 0.6  # of the time
NAMES = ("first", "second", "third")
PHASES = ("two servers", "one killed", "one added")


def compressed(trace: Sequence[tuple[float, int, int]], rate: float, seconds: float) -> list[float]:
    """Arrivals, in seconds: the whole trace, thinned to `rate` a second and pressed into `seconds`."""
    count = min(round(rate * seconds), len(trace))
    length_s = trace[-1][0] - trace[0][0]
    return [(trace[number * len(trace) // count][0] - trace[0][0]) * seconds / length_s for number in range(count)]


@dataclass(slots=True)
class Servers:
    """Servers that come and go."""

    folder: Path
    flags: Sequence[str]
    running: dict[str, Server] = field(default_factory=dict)  # by URL
    events: dict[str, str] = field(default_factory=dict)  # of each URL: where its KV events are
    _recipes: dict[str, Recipe] = field(default_factory=dict)

    def start(self, name: str, url: str | None = None) -> str:
        """A new one, or again the one that had this URL. Does not wait until it is ready."""
        if url is None:
            endpoint = f"tcp://127.0.0.1:{free_port()}"
            events = '{"enable_kv_cache_events": true, "endpoint": "%s", "topic": "kv@%s@%s"}'
            shown = endpoint.replace("127.0.0.1", "*")
            flags = [
                *self.flags,
                "--served-model-name",
                MODEL,
                "--kv-events-config",
                events % (shown, name, MODEL),
            ]
            recipe = faser_recipe(name, flags, self.folder)
            url = recipe.base_url
            self._recipes[url], self.events[url] = recipe, endpoint
        self.running[url] = Server(self._recipes[url])
        return url

    def kill(self, url: str) -> None:
        """The front-end and its engine, at once."""
        self.running.pop(url).kill()

    def stop(self) -> None:
        for each in self.running.values():
            each.stop()


async def day(
    front: Front, servers: Servers, sessions: Sessions, times: Sequence[float], seconds: float
) -> dict[str, Any]:
    """Send requests at `times`; kill one server and add one meanwhile. Returns outcomes and latencies by phase."""
    found = {phase: Run() for phase in PHASES}
    phase = PHASES[0]
    marks: dict[str, float] = {}
    began_s = time.monotonic()

    async def at(second: float) -> None:
        await asyncio.sleep(max(0.0, began_s + second - time.monotonic()))

    async def change() -> None:
        nonlocal phase
        first = next(iter(servers.running))
        await at(KILLED * seconds)
        phase = PHASES[1]
        await asyncio.to_thread(servers.kill, first)
        servers.start(NAMES[0], first)
        await asyncio.to_thread(servers.running[first].wait_until_healthy, route="/ready")
        marks["back after s"] = round(time.monotonic() - began_s - KILLED * seconds, 1)
        await at(ADDED * seconds)
        url = servers.start(NAMES[2])
        await asyncio.to_thread(servers.running[url].wait_until_healthy, route="/ready")
        marks["third ready after s"] = round(time.monotonic() - began_s - ADDED * seconds, 1)
        await asyncio.to_thread(front.add, url)
        phase = PHASES[2]

    changing = asyncio.create_task(change())
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2)  # before the server closes idle connections
    async with httpx.AsyncClient(timeout=600, trust_env=False, limits=limits) as http:
        tasks = []
        for second in track(times, "requests", transient=True):
            await at(second)
            tasks.append(asyncio.create_task(ask(http, front.url, sessions.next(), found[phase], MODEL)))
        await asyncio.gather(*tasks)
        await changing
    ended_s = time.monotonic()
    for run in found.values():
        run.hit_share = run.cached_tokens / run.prompt_tokens if run.prompt_tokens else 0.0
        run.seconds = ended_s - began_s  # output tokens a second are of the whole time
    return {
        "phases": {each: run.report() for each, run in found.items()},
        **marks,
    }


def measure(given: argparse.Namespace, name: str, times: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
    """The day behind the router of this name. Raises ServerError where a server or the router does not start."""
    programs = Programs(nginx=given.nginx, vllm_router=given.vllm_router, production_stack=given.production_stack)
    own = [*([given.model] if given.model else []), "--num-threads", "1", *given.flags.split()]
    with tempfile.TemporaryDirectory(prefix="faser-day-") as text:
        folder = Path(text)
        servers = Servers(folder, own)
        try:
            urls = [servers.start(each) for each in NAMES[:2]]
            for url in urls:
                servers.running[url].wait_until_healthy(route="/ready")
            front = start_front(name, urls, MODEL, folder, programs, servers.events)
            try:
                return asyncio.run(day(front, servers, Sessions(texts, seed=0), times, 60 * given.minutes))
            finally:
                front.stop()
        finally:
            servers.stop()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("questions", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--trace", type=Path, required=True, help="of Azure")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--fronts", default="nginx,vllm-router cache_aware", help="separated by commas")
    parser.add_argument("--nginx", default="nginx", help="the command")
    parser.add_argument("--vllm-router", default="vllm-router", help="the command of PyPI's vllm-router")
    parser.add_argument(
        "--production-stack", default="vllm-router", help="the command of production-stack's router"
    )
    parser.add_argument("--model")
    parser.add_argument("--flags", default="", help="further ones of faser serve")
    given = parser.parse_args()
    texts = [each.text for each in load_prompts(given.questions)]
    times = compressed(read_azure(given.trace), given.rate, 60 * given.minutes)
    settings = {name: getattr(given, name) for name in ("minutes", "rate", "fronts", "flags")}
    head, found = about("scale.day"), {}
    for name in given.fronts.split(","):
        try:
            found[name] = measure(given, name, times, texts)
        except ServerError as error:
            found[name] = {"did not start": str(error)}
        print(name, found[name], flush=True)
        write_json(given.out, {**head, "settings": settings, "fronts": found})
