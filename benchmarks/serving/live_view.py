"""Cost of the live view's viewers to the requests of a running server.

    python -m benchmarks serving.live_view OUT.json --without http://127.0.0.1:8000 --with http://127.0.0.1:8001

Two servers with the same flags; one never has a viewer, as the feed goes on for two minutes after the last one.
Each round runs the same load on either, in an order that alternates, so what else the machine does falls on both
alike; an idle server costs little. Step times are the engine's own, from /metrics. Nothing is drafted, so that
every load takes the same steps on either server; each has a cache_salt of its own.
"""

import contextlib
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.runner import about, command_line, interleaved, write_json

_QUESTIONS = (
    "Explain how photosynthesis works, step by step.",
    "Write a short story about a lighthouse keeper.",
    "What is the capital of France? Explain its history.",
    "Give me a JSON array with twenty objects that have name and age.",
)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--without", required=True, metavar="URL")
    parser.add_argument("--with", dest="watched", required=True, metavar="URL")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--viewers", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4, help="at once")
    parser.add_argument("--max-tokens", type=int, default=256)
    given = parser.parse_args()
    found = compare(
        {"without": given.without, "with": given.watched},
        rounds=given.rounds,
        num_viewers=given.viewers,
        num_requests=given.requests,
        max_tokens=given.max_tokens,
    )
    write_json(given.out, {**about("serving.live_view"), **found})
    print(found["with_over_without"])


def compare(
    urls: dict[str, str], *, rounds: int, num_viewers: int, num_requests: int, max_tokens: int
) -> dict[str, Any]:
    """Seconds of a step and of the whole load in every round, and their ratios with an interval.

    urls: of the servers `without` and `with` viewers.
    """
    viewers = {"without": 0, "with": num_viewers}

    def run(_setting: Mapping[str, Any], name: str, _round: int) -> dict[str, float]:
        return measure(urls[name], num_viewers=viewers[name], num_requests=num_requests, max_tokens=max_tokens)

    for url in urls.values():
        measure(url, num_viewers=0, num_requests=num_requests, max_tokens=max_tokens)  # fills caches
    (cell,) = interleaved([{"requests": num_requests}], list(viewers), rounds, run)
    return {
        "viewers": num_viewers,
        "requests": num_requests,
        "max_tokens": max_tokens,
        "with_over_without": {
            what: cell.ratio("with", "without", itemgetter(what)).rounded() for what in ("step_s", "load_s")
        },
        "rounds": dict(cell.runs),
    }


def measure(url: str, *, num_viewers: int, num_requests: int, max_tokens: int) -> dict[str, float]:
    """One load: mean seconds of its steps, and seconds until all its requests have ended."""
    with watched(url, num_viewers), httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        before, began_s = steps(http), time.perf_counter()
        body = {
            "prompt": [_QUESTIONS[at % len(_QUESTIONS)] for at in range(num_requests)],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "speculative": {"enabled": False},
            "cache_salt": uuid.uuid4().hex,
        }
        http.post("/v1/completions", json=body).raise_for_status()
        load_s, after = time.perf_counter() - began_s, steps(http)
    num_steps, spent_s = after[0] - before[0], after[1] - before[1]
    return {"step_s": round(spent_s / num_steps, 6), "load_s": round(load_s, 4)}


def steps(http: httpx.Client) -> tuple[float, float]:
    """Steps of the engine and their seconds, since its start."""
    text = http.get("/metrics").text
    counts = re.findall(r"^faser_spec_mode_steps_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
    seconds = re.findall(r'^faser_step_measured_seconds_total\{[^}]*role="step"[^}]*\} (\S+)$', text, re.MULTILINE)
    return sum(map(float, counts)), sum(map(float, seconds))


@contextlib.contextmanager
def watched(url: str, num_viewers: int) -> Iterator[None]:
    """Viewers that read the feed meanwhile."""
    ended = threading.Event()
    begun = threading.Barrier(num_viewers + 1)

    def watch() -> None:
        with httpx.stream("GET", f"{url}/live", timeout=60, trust_env=False) as answer:
            answer.raise_for_status()
            lines = answer.iter_lines()
            next(lines)
            begun.wait(60)
            for _ in lines:
                if ended.is_set():
                    return

    threads = [threading.Thread(target=watch, daemon=True) for _ in range(num_viewers)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(5)
