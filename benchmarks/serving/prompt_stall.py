"""Measure what a long prompt costs the answers that run beside it, on servers that differ in a flag.

    faser serve --port 8961 --max-num-batched-tokens 128 --speculative-policy off
    faser serve --port 8962 --max-num-batched-tokens 256 --speculative-policy off
    python -m benchmarks.serving.prompt_stall OUT.json 128=http://127.0.0.1:8961 256=http://127.0.0.1:8962

Each server in turn streams --answers answers; a second later a prompt of --words random words comes. Of each
round: the time until that prompt's first token, and the longest, the 95th and the 50th percentile of the times
between two chunks of the answers. Medians and least values of the rounds are kept; servers are idle while another
one is measured.
"""

import json
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from benchmarks.runner import about, command_line, in_turn, named, write_json

WORDS = ("the", "of", "a", "river", "house", "long", "green", "walk", "table", "music", "small", "window", "paper")
START_S = 1.0  # before the long prompt

Round = dict[str, float]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("servers", type=named, nargs="+", metavar="NAME=URL")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=60, help="of each answer [60]")
    parser.add_argument("--words", type=int, default=1450)
    args = parser.parse_args()
    rng = random.Random(0)
    rounds: dict[str, list[Round]] = {name: [] for name, _ in args.servers}
    for number in range(args.rounds):
        for name, url in in_turn(args.servers, number):
            prompt = " ".join(rng.choices(WORDS, k=args.words))
            rounds[name].append(measured(url, prompt, args.answers, args.tokens, rng))
            print(name, rounds[name][-1], flush=True)
    summary = {name: _summary(each) for name, each in rounds.items()}
    write_json(args.out, {**about("benchmarks.serving.prompt_stall"), "servers": summary, "rounds": rounds})


def measured(url: str, prompt: str, answers: int, tokens: int, rng: random.Random) -> Round:
    """Stream answers, read a long prompt beside them, and return milliseconds."""
    times: list[list[float]] = [[] for _ in range(answers)]
    threads = [
        threading.Thread(target=_stream, args=(url, f"Story {rng.random()}", tokens, each)) for each in times
    ]
    for each in threads:
        each.start()
    time.sleep(START_S)
    of_prompt: list[float] = []
    _stream(url, prompt, 1, of_prompt)
    for each in threads:
        each.join()
    gaps = sorted((after - before) * 1e3 for each in times for before, after in pairwise(each[1:]))
    return {
        "first_token_ms": round((of_prompt[1] - of_prompt[0]) * 1e3, 1),
        "longest_gap_ms": round(gaps[-1], 1),
        "p95_gap_ms": round(gaps[len(gaps) * 95 // 100], 1),
        "p50_gap_ms": round(gaps[len(gaps) // 2], 1),
    }


def _stream(url: str, prompt: str, tokens: int, times: list[float]) -> None:
    """Append the time of the request, then that of each chunk of its answer."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    times.append(time.perf_counter())
    with urllib.request.urlopen(request) as lines:
        times.extend(time.perf_counter() for line in lines if line.startswith(b"data: {"))


def _summary(rounds: list[Round]) -> dict[str, Round]:
    picks: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "least": min}
    return {
        kind: {name: pick([each[name] for each in rounds]) for name in rounds[0]} for kind, pick in picks.items()
    }


if __name__ == "__main__":
    main()
