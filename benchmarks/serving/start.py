"""Time until a server is ready, by part, and the memory of its processes at its peak.

    python -m benchmarks serving.start OUT.json [--starts 3] [--scenarios kept,measured,compiled,pair]
        [--flags "MODEL …"] [--load 64]

    kept       kernels and step times are kept from a start before
    measured   kernels are kept; step times are measured
    compiled   nothing is kept: kernels are compiled too
    pair       two servers start at the same moment; kernels are kept, step times are measured

A part begins with a line of the server's log and ends with the next one. The first start of a scenario counts like
the others: what it reads from the disk is in the system's cache once the start that fills the kept folder has run.
--load: one more start, which then answers so many requests of some 1,500 prompt tokens and 64 tokens each, 16 at
once, so that the KV pool fills; its peak is noted before and after.
"""

import asyncio
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.runner import Json, about, command_line, write_json
from benchmarks.servers import START_TIMEOUT_S, peak_bytes
from faser.config.environment import cache_dir

SCENARIOS = ("kept", "measured", "compiled", "pair")
# The parts, by the line with which each begins. The engine imports while the front-end gets ready to configure it.
_PARTS = {
    "front-end": "",
    "rest of the engine's imports": "starting the engine",
    "kernels": "preparing kernels",
    "compiling": "compiling kernels",
    "weights": "loading weights",
    "step times": "measuring step times",
}
_READY = " ready at "


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--flags", type=shlex.split, default=[], help="of faser serve, in one argument")
    parser.add_argument("--load", type=int, default=0, metavar="REQUESTS")
    options = parser.parse_args()
    result: Json = about("serving.start") | {"scenarios": {}}
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "kept")
        _new_cache(kept)
        if (cache_dir() / "kernels").is_dir():  # spares the start that fills the folder a compilation
            shutil.copytree(cache_dir() / "kernels", kept / "kernels")
        _start(kept, options.flags)
        for scenario in options.scenarios.split(","):
            runs = [_run(scenario, kept, Path(folder, "cache"), options.flags) for _ in range(options.starts)]
            result["scenarios"][scenario] = _summary(runs)
            print(scenario, json.dumps(result["scenarios"][scenario]), flush=True)
        if options.load:
            loaded = _start(kept, options.flags, lambda url: asyncio.run(_load(url, options.load)))
            result["load"] = {"requests": options.load, "peak_bytes": loaded["peak_bytes"]}
            result["load"]["peak_after_load_bytes"] = loaded["peak_after_bytes"]
    result["load_after"] = os.getloadavg()
    write_json(options.out, result)


def _run(scenario: str, kept: Path, cache: Path, flags: Sequence[str]) -> Json:
    if scenario == "kept":
        return _start(kept, flags)
    _new_cache(cache)
    if scenario != "compiled":
        shutil.copytree(kept / "kernels", cache / "kernels")
    if scenario != "pair":
        return _start(cache, flags)
    runs: list[Json] = []
    threads = [threading.Thread(target=lambda: runs.append(_start(cache, flags))) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return max(runs, key=lambda run: float(run["ready_s"]))


def _new_cache(cache: Path) -> None:
    """A cache folder with the models of the user's own, and nothing else."""
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    (cache / "models").symlink_to(cache_dir() / "models")


def _start(cache: Path, flags: Sequence[str], load: Callable[[str], Any] | None = None) -> Json:
    """Start a server and end it. Returns the seconds of its parts, and the peak memory of both processes."""
    variables = {**os.environ, "FASER_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
    began_s = time.monotonic()
    marks: dict[str, float] = {"front-end": 0.0}
    said: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", "faser", "serve", "--port", "0", *flags],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        killer = threading.Timer(START_TIMEOUT_S, server.kill)
        killer.start()
        try:
            assert server.stdout is not None
            for line in server.stdout:
                now_s = time.monotonic() - began_s
                said.append(line)
                if _READY in line:
                    found = {"ready_s": now_s, "parts": _parts(marks, now_s), "peak_bytes": peak_bytes(server.pid)}
                    if load is not None:
                        load(line.partition(_READY)[2].split()[0])
                        found["peak_after_bytes"] = peak_bytes(server.pid)
                    return found
                for part, begins in _PARTS.items():
                    if begins and line.startswith(begins):
                        marks.setdefault(part, now_s)
        finally:
            killer.cancel()
            server.terminate()
            server.communicate()
    raise SystemExit("".join(said))


async def _load(url: str, num_requests: int) -> None:
    limit = asyncio.Semaphore(16)
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:

        async def ask(number: int) -> None:
            prompt = " ".join(f"{number} times {factor} makes {number * factor}." for factor in range(180))
            body = {"prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
            async with limit:
                (await client.post("/v1/completions", json=body)).raise_for_status()

        await asyncio.gather(*map(ask, range(num_requests)))


def _parts(marks: dict[str, float], ready_s: float) -> dict[str, float]:
    """Seconds of each part: from its first line to that of the next one."""
    ends = [*list(marks.values())[1:], ready_s]
    return {part: end - start for (part, start), end in zip(marks.items(), ends, strict=True)}


def _summary(runs: list[Json]) -> Json:
    """Medians over the starts, seconds rounded."""
    parts = {
        part: round(statistics.median(run["parts"].get(part, 0.0) for run in runs), 2) for part in runs[0]["parts"]
    }
    return {
        "ready_s": round(statistics.median(run["ready_s"] for run in runs), 2),
        "all_ready_s": [round(run["ready_s"], 2) for run in runs],
        "parts_s": parts,
        "peak_bytes": max((run["peak_bytes"] for run in runs), key=lambda peak: sum(peak.values())),
    }
