"""Time to the first token of later questions about one document, with snapshots of recurrent states and without.

    python -m benchmarks serving.state_snapshots OUT.json MODEL [--documents 4] [--questions 3] [--rounds 3]

MODEL has recurrent states, as Qwen3.5 does. One server has default flags, one --state-snapshot-memory 0, which
also switches its prefix cache off. Documents are the longest prompts of Spec-Bench (SPEC_BENCH_QUESTIONS); each is
asked about as often as --questions says, one after the other. Servers take turns, and a frozen one costs nothing.
Every round has a cache_salt of its own.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cells import Cell
from benchmarks.prompts import load_prompts
from benchmarks.runner import PROMPTS_VARIABLE, Json, about, command_line, interleaved, write_json
from benchmarks.servers import ANSWER_TIMEOUT_S, Server, frozen_servers

ARMS = {"snapshots": (), "none": ("--state-snapshot-memory", "0")}
_QUESTIONS = ("What is this about?", "Who or what is named in it?", "Which of its points is the last one?")


def main() -> None:
    options = parser().parse_args()
    documents = sorted((each.text for each in load_prompts(options.prompts)), key=len)[-options.documents :]
    flags = (str(options.model), *options.flags)
    with (
        tempfile.TemporaryDirectory() as folder,
        frozen_servers({arm: (*flags, *more) for arm, more in ARMS.items()}, Path(folder), 1) as servers,
    ):

        def run(_setting: Mapping[str, Any], arm: str, number: int) -> Json:
            with servers[arm].awake():
                return asked(servers[arm], documents, options.questions, salt=f"{number}-{arm}")

        def write(cells: Sequence[Cell[Json]]) -> None:
            runs = cells[0].runs
            write_json(options.out, about("serving.state_snapshots") | {"runs": runs} | summary(runs))

        interleaved([{}], list(ARMS), options.rounds, run, after_round=write)
    print(json.dumps(json.loads(options.out.read_text())["ttft_s"], indent=1))


def asked(server: Server, documents: Sequence[str], questions: int, *, salt: str) -> Json:
    """Seconds to the first token, of each document's first question and of its later ones; and prompt tokens."""
    first, later = [], []
    with httpx.Client(base_url=server.url, timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
        for document in documents:
            answers = [ask(client, f"{document}\n\n{_QUESTIONS[i % 3]}", salt) for i in range(questions)]
            first.append(answers[0])
            later += answers[1:]
    return {"first": first, "later": later}


def ask(client: httpx.Client, text: str, salt: str) -> Json:
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s, ttft_s = time.perf_counter(), None
    usage: Json = {}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            # The first event has the role alone; a token that is no whole character has no text yet.
            if ttft_s is None and any("role" not in choice["delta"] for choice in event["choices"]):
                ttft_s = time.perf_counter() - began_s
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return {"ttft_s": ttft_s, "prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached}


def summary(runs: Mapping[str, list[Json]]) -> Json:
    """Medians over documents and rounds, and the ratio of the arms for later questions."""
    found: dict[str, Json] = {
        arm: {
            which: round(statistics.median(each["ttft_s"] for run in rounds for each in run[which]), 4)
            for which in ("first", "later")
        }
        for arm, rounds in runs.items()
    }
    ratios = [
        statistics.median(each["ttft_s"] for each in one["later"])
        / statistics.median(each["ttft_s"] for each in other["later"])
        for one, other in zip(runs["snapshots"], runs["none"], strict=True)
    ]
    return {"ttft_s": found | {"later, snapshots over none, by round": [round(each, 3) for each in ratios]}}


def parser() -> argparse.ArgumentParser:
    made = command_line(__doc__)
    made.add_argument("out", type=Path)
    made.add_argument("model", type=Path)
    made.add_argument("--documents", type=int, default=4)
    made.add_argument("--questions", type=int, default=3, help="about each document [3]")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--flags", nargs="*", default=[], help="more flags of faser serve")
    made.add_argument(
        "--prompts",
        type=Path,
        default=os.environ.get(PROMPTS_VARIABLE),
        required=PROMPTS_VARIABLE not in os.environ,
        help=f"[${PROMPTS_VARIABLE}]",
    )
    return made
