"""Measures what a server of the embedded model costs: seconds until it is ready, and memory at its peak.

    python -m benchmarks.serving.footprint OUT.json [--starts 3] [--requests 64] [--concurrency 16]

Memory is the sum over the front-end and the engine of the kernel's own high-water marks (VmHWM), which counts
pages that both share twice and so errs to the high side. The load asks for long prompts and answers, so that the
KV pool fills; the bar is weights + KV pool + 900 MB.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

OVERHEAD_BAR_BYTES = 900_000_000
READY_BAR_S = 15.0
KV_BYTES = 512 << 20
PORT = 8431
_TIMEOUT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    ready_s: list[float] = []
    for _ in range(options.starts - 1):
        server, seconds = start()
        ready_s.append(seconds)
        stop(server)
    server, seconds = start()
    ready_s.append(seconds)
    try:
        idle = peak_bytes(server)
        asyncio.run(load(options.requests, options.concurrency))
        busy = peak_bytes(server)
    finally:
        stop(server)
    weights = 2 * 134_515_008
    result: dict[str, Any] = {
        "command": f"python -m benchmarks.serving.footprint --requests {options.requests}",
        "ready_s": [round(each, 2) for each in ready_s],
        "ready_bar_s": READY_BAR_S,
        "weights_bytes": weights,
        "kv_pool_bytes": KV_BYTES,
        "peak_after_start_bytes": idle,
        "peak_after_load_bytes": busy,
        "bar_bytes": weights + KV_BYTES + OVERHEAD_BAR_BYTES,
        "overhead_bytes": sum(busy.values()) - weights - KV_BYTES,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


def start() -> tuple[subprocess.Popen[bytes], float]:
    """A server of the embedded model, and the seconds it took to be ready."""
    began_s = time.monotonic()
    server = subprocess.Popen(
        [sys.executable, "-m", "faser", "serve", "--port", str(PORT), "--kv-cache-memory", str(KV_BYTES)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while time.monotonic() - began_s < _TIMEOUT_S:
        try:
            if httpx.get(f"http://127.0.0.1:{PORT}/ready").status_code == 200:
                return server, time.monotonic() - began_s
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    stop(server)
    raise SystemExit(f"the server was not ready after {_TIMEOUT_S:.0f} s")


def stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    server.wait(_TIMEOUT_S)


def peak_bytes(server: subprocess.Popen[Any]) -> dict[str, int]:
    """High-water mark of the front-end, and of the engine."""
    front_end = psutil.Process(server.pid)
    (engine,) = front_end.children()
    return {"front_end": _high_water(front_end.pid), "engine": _high_water(engine.pid)}


def _high_water(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


async def load(num_requests: int, concurrency: int) -> None:
    """Distinct prompts of some 1,500 tokens and answers of 64, so many at once."""
    limit = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(timeout=None) as client:

        async def ask(number: int) -> None:
            prompt = " ".join(f"{number} times {factor} makes {number * factor}." for factor in range(180))
            body = {"prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
            async with limit:
                (await client.post(f"http://127.0.0.1:{PORT}/v1/completions", json=body)).raise_for_status()

        await asyncio.gather(*(ask(number) for number in range(num_requests)))


if __name__ == "__main__":
    main()
