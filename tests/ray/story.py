"""Replicas and a batch on two nodes, run as a program: Ray keeps threads and sockets that outlive a test.

Usage: python -m tests.ray.story MODEL PORT. Prints what happened as one line of JSON.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx

from benchmarks.scale.ray_cluster import Nodes, deploy, run_batch, served, wait_for_replicas

FLAGS = ("--dtype", "float32", "--backend", "torch", "--served-model-name", "tiny", "--max-num-seqs", "4")
PATH = "/v1/chat/completions"


def body(text: str, tokens: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}


async def outcome(http: httpx.AsyncClient, text: str, tokens: int, on_first: Callable[[], None]) -> str:
    begun = False
    async with http.stream("POST", PATH, json=body(text, tokens, stream=True)) as answer:
        if answer.status_code != 200:
            return f"status {answer.status_code}"
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return "answered"
            if "error" in json.loads(line.removeprefix("data: ")):
                return "error event"
            if not begun:
                begun = True
                on_first()
    return "cut off"


async def killed(url: str, kill: Callable[[], None]) -> dict[str, int]:
    """Sixteen streams, some of which wait; a replica is killed once half of those that run have begun."""
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
        num_begun, begun = 0, asyncio.Event()

        def on_first() -> None:
            nonlocal num_begun
            num_begun += 1
            if num_begun == 4:
                begun.set()

        tasks = [asyncio.create_task(outcome(http, f"{number}", 400, on_first)) for number in range(16)]
        await begun.wait()
        await asyncio.to_thread(kill)
        return Counter(await asyncio.gather(*tasks))


async def left(url: str) -> bool:
    """Whether a request ends soon after its client has left."""
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
        async with http.stream("POST", PATH, json=body("leave", 400, stream=True)) as answer:
            await anext(answer.aiter_bytes())
        for _ in range(20):
            page = (await http.get("/metrics")).text
            running = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running{")]
            assert len(running) == 2, running
            if all(line.endswith(" 0.0") for line in running):
                return True
            await asyncio.sleep(0.5)
        return False


async def scaled(url: str) -> dict[str, Any]:
    """One replica, then two while requests wait, then one again: its streams end whole."""
    wait_for_replicas(1)
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
        tasks = [asyncio.create_task(outcome(http, f"{number}", 400, lambda: None)) for number in range(24)]
        await asyncio.to_thread(wait_for_replicas, 2)
        found = Counter(await asyncio.gather(*tasks))
        stream = asyncio.create_task(outcome(http, "while it shrinks", 400, lambda: None))
        await asyncio.to_thread(wait_for_replicas, 1)
        return {"answers": found, "stream": await stream}


def main() -> None:
    model, port = sys.argv[1], int(sys.argv[2])
    flags = (model, *FLAGS)
    found: dict[str, Any] = {}
    with Nodes() as nodes:
        with served(nodes, port, flags) as url:
            answers = [
                httpx.post(url + PATH, json=body("hi", 8), timeout=60, trust_env=False).json() for _ in range(3)
            ]
            found["texts"] = sorted({each["choices"][0]["message"]["content"] for each in answers})
            found["left"] = asyncio.run(left(url))
            found["replica killed"] = asyncio.run(killed(url, nodes.kill_replica))
            wait_for_replicas(2)
            found["node killed"] = asyncio.run(killed(url, nodes.kill_second))
            nodes.restore_second()
            quick = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 4, "look_back_period_s": 2}
            delays = {"upscale_delay_s": 0, "downscale_delay_s": 2}
            deploy(nodes, port, flags, autoscaling_config={**quick, **delays})
            found["scaled"] = asyncio.run(scaled(url))
        found["batch"] = run_batch(nodes, ["hi", "hello"], 40, flags)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
