"""Waits of one client while another's request of many prompts runs, against running servers.

    python -m benchmarks serving.fair_shares OUT.json --arm before=http://127.0.0.1:8001 --arm now=http://127.0.0.1:8000

An arm is a name and a server; start both with the same flags, "before" from an older checkout. Each round asks
every arm once, one after the other, so what else the machine does falls on all alike; an idle server costs
little. In a round the second client asks one short question after another, alone first and then while the many
prompts are answered. Each client has connections of its own; give --keys two API keys to tell them apart by
key.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.runner import about, command_line, interleaved, named, write_json

_TIMEOUT_S = 600.0
_LEAST_ALONE = 10


def main() -> None:
    parser = command_line(__doc__)
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
    )
    write_json(given.out, {**about("serving.fair_shares"), **found})


def arm(text: str) -> tuple[str, str]:
    name, url = named(text)
    if not url.startswith("http"):
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
) -> dict[str, Any]:
    """The rounds of every arm, in turn, and the medians over the rounds. arms: URLs by name."""

    def run(_setting: Mapping[str, Any], name: str, _round: int) -> dict[str, Any]:
        many, one = (
            httpx.Client(
                base_url=arms[name],
                headers={"Authorization": f"Bearer {key}"},
                timeout=_TIMEOUT_S,
                trust_env=False,
            )
            for key in keys
        )
        with many, one:
            return measure(many, one, num_prompts, max_tokens)

    (cell,) = interleaved([{"prompts": num_prompts}], list(arms), rounds, run)
    return {
        "prompts": num_prompts,
        "max_tokens": max_tokens,
        "rounds": rounds,
        "medians": {name: medians(each) for name, each in cell.runs.items()},
        "arms": dict(cell.runs),
    }


def medians(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds, over the rounds of one arm."""
    return {
        "flood_s": round(statistics.median(each["flood_s"] for each in found), 3),
        **{
            f"{when}_{what}": round(statistics.median(each[when][what] for each in found), 3)
            for when in ("alone", "during")
            for what in ("p50_s", "max_s")
        },
    }


def measure(many: httpx.Client, one: httpx.Client, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """Seconds: of the flood, and of the second client's requests alone and during it."""
    flood = [f"Question {i}: what is {i} times {i + 1}?" for i in range(num_prompts)]
    alone = ask_while(one, max_tokens, lambda asked: asked < _LEAST_ALONE)
    took: list[float] = []
    thread = threading.Thread(target=lambda: took.append(seconds(many, flood, max_tokens)))
    thread.start()
    time.sleep(0.5)  # the flood is tokenised and queued
    during = ask_while(one, max_tokens, lambda asked: not asked or thread.is_alive())
    thread.join()
    return {"flood_s": round(took[0], 3), "alone": summary(alone), "during": summary(during)}


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
