"""How long one client waits beside another's request of many prompts, against running servers.

    python -m benchmarks.serving.fair_shares OUT.json --arm before=http://127.0.0.1:8001 --arm now=http://127.0.0.1:8000

An arm is a name and a server; start both with the same flags, "before" from an older checkout. Each round asks
every arm once, one after the other, so what else the machine does falls on all alike; an idle server costs
little. In a round the second client asks one short question after another, alone first and then while the many
prompts are answered. Each client has connections of its own; give --keys two API keys to tell them apart by
key.
"""

import argparse
import json
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

_TIMEOUT_S = 600.0
_LEAST_ALONE = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--arm", action="append", required=True, type=arm, metavar="NAME=URL", help="may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--keys", nargs=2, default=("none", "none"))
    given = parser.parse_args()
    found = compare(
        dict(given.arm),
        keys=given.keys,
        rounds=given.rounds,
        num_prompts=given.prompts,
        max_tokens=given.max_tokens,
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    command = shlex.join(["python", "-m", "benchmarks.serving.fair_shares", *sys.argv[1:]])
    given.out.write_text(json.dumps({"command": command, **found}, indent=1) + "\n", encoding="utf-8")


def arm(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url.startswith("http")):
        raise argparse.ArgumentTypeError(
            f"it is {text}; it must be a name and a URL, such as now=http://127.0.0.1:8000"
        )
    return name, url


def compare(
    arms: dict[str, str],
    *,
    keys: Sequence[str],
    rounds: int,
    num_prompts: int,
    max_tokens: int,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """The rounds of every arm, in turn, and the medians over the rounds. arms: URLs by name."""
    all_rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for number in range(rounds):
        for name, url in arms.items():
            many, one = (
                httpx.Client(
                    base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=_TIMEOUT_S, trust_env=False
                )
                for key in keys
            )
            with many, one:
                found = measure(many, one, num_prompts, max_tokens)
            all_rounds[name].append(found)
            report(f"round {number + 1} of {rounds}, {name}: {json.dumps(found)}")
    return {
        "prompts": num_prompts,
        "max_tokens": max_tokens,
        "rounds": rounds,
        "medians": {name: medians(each) for name, each in all_rounds.items()},
        "arms": all_rounds,
    }


def medians(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds, over the rounds of one arm."""
    return {
        "flood_s": round(statistics.median(each["flood_s"] for each in found), 3),
        **{
            f"{when}_{what}": round(statistics.median(each[when][what] for each in found), 3)
            for when in ("alone", "beside")
            for what in ("p50_s", "max_s")
        },
    }


def measure(many: httpx.Client, one: httpx.Client, num_prompts: int, max_tokens: int) -> dict[str, Any]:
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
