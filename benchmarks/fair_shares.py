"""How long one client waits beside another's request of many prompts, against a running server.

Usage: python -m benchmarks.fair_shares --url http://127.0.0.1:8000 [--prompts 300] [--max-tokens 32]

The second client asks one short question after another, alone first and then while the many prompts are answered.
Each client has connections of its own; give --keys two API keys to tell them apart by key.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import httpx

_TIMEOUT_S = 600.0
_LEAST_ALONE = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--keys", nargs=2, default=("none", "none"))
    given = parser.parse_args()
    many, one = (
        httpx.Client(base_url=given.url, headers={"Authorization": f"Bearer {key}"}, timeout=_TIMEOUT_S)
        for key in given.keys
    )
    with many, one:
        print(json.dumps(measure(many, one, given.prompts, given.max_tokens), indent=2))


def measure(many: httpx.Client, one: httpx.Client, num_prompts: int, max_tokens: int) -> dict[str, object]:
    """Seconds: of the flood, and of the second client's requests alone and beside it."""
    flood = [f"Question {i}: what is {i} times {i + 1}?" for i in range(num_prompts)]
    alone = ask_while(one, max_tokens, lambda asked: asked < _LEAST_ALONE)
    took: list[float] = []
    thread = threading.Thread(target=lambda: took.append(seconds(many, flood, max_tokens)))
    thread.start()
    time.sleep(0.5)  # the flood is tokenised and queued
    beside = ask_while(one, max_tokens, lambda asked: not asked or thread.is_alive())
    thread.join()
    return {"flood_s": round(took[0], 3), "alone": summary(alone), "beside": summary(beside)}


def ask_while(client: httpx.Client, max_tokens: int, goes_on: Callable[[int], bool]) -> list[float]:
    """Seconds of each request. goes_on: is given the number of requests so far."""
    found: list[float] = []
    while goes_on(len(found)):
        found.append(seconds(client, [f"A short question, number {len(found)}."], max_tokens))
    return found


def seconds(client: httpx.Client, prompts: Sequence[str], max_tokens: int) -> float:
    body = {"prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    began_s = time.perf_counter()
    client.post("/v1/completions", json=body).raise_for_status()
    return time.perf_counter() - began_s


def summary(found: Sequence[float]) -> dict[str, float]:
    ordered = sorted(found)
    return {
        "requests": len(ordered),
        "p50_s": round(statistics.median(ordered), 3),
        "p99_s": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
        "max_s": round(ordered[-1], 3),
    }


if __name__ == "__main__":
    main()
