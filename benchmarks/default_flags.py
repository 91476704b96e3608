"""What speculation brings with default flags: the default model, real prompts, with drafts and without.

    python -m benchmarks.default_flags QUESTIONS.jsonl OUT.json [--rounds 5] [--concurrency 1,4,16]

Two servers run, one with default flags and one with `--speculative-policy off`; the idle one is frozen. A round
asks both servers the same prompts at every concurrency, with `ignore_eos` off and on; the order of the servers
alternates from round to round. Every run has a `cache_salt` of its own, so neither the prefix cache nor the corpus
of past answers knows its prompts. "Asked again" repeats a run with the salt it had: there both caches help.
Figures are output tokens a second, medians over rounds; gains are medians of the ratios within a round.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.progress import Progress

from benchmarks.peers.machine import describe_machine, git_commit
from benchmarks.peers.servers import Recipe, Server, free_port
from benchmarks.prompts import Prompt, load_prompts, take

ARMS = {"default": (), "off": ("--speculative-policy", "off")}
KINDS = ("ignore_eos off", "ignore_eos on", "asked again")
MAX_TOKENS = 128
REQUESTS = {1: 8, 2: 12, 4: 16, 8: 24, 16: 32, 32: 48}
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One run. tokens: output tokens of all answers. drafted, accepted: tokens, as `metrics.faser` counts them."""

    tokens: int
    seconds: float
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path, help="JSON lines with question_id, category and turns")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", default="1,4,16", help="comma-separated (default: 1,4,16)")
    options = parser.parse_args()
    counts = [int(each) for each in options.concurrency.split(",")]
    prompts = load_prompts(options.questions)
    runs: dict[str, dict[str, dict[str, list[dict[str, float]]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        servers = {name: _start(name, flags, Path(folder)) for name, flags in ARMS.items()}
        try:
            with Progress() as bar:
                task = bar.add_task("runs", total=options.rounds * len(counts) * len(KINDS) * len(ARMS))
                for number in range(options.rounds):
                    order = list(ARMS) if number % 2 else list(reversed(ARMS))
                    for count in counts:
                        asked = take(prompts, number * 97 + count * 31, REQUESTS[count])
                        for kind in KINDS:
                            for arm in order:
                                answered = _run(servers[arm], asked, count, kind, salt=f"{number}/{count}/{arm}")
                                of_kind = runs.setdefault(str(count), {}).setdefault(kind, {})
                                of_kind.setdefault(arm, []).append(_as_json(answered))
                                bar.advance(task)
        finally:
            for server in servers.values():
                server.stop()
    table = {count: {kind: _summary(arms) for kind, arms in kinds.items()} for count, kinds in runs.items()}
    result = {
        "command": f"python -m benchmarks.default_flags {options.questions.name} --rounds {options.rounds} "
        f"--concurrency {options.concurrency}",
        "commit": git_commit(),
        "machine": describe_machine(range(2)),
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "table": {count: {kind: _summary(arms) for kind, arms in kinds.items()} for count, kinds in runs.items()},
        "runs": runs,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(_table(table))


def _start(name: str, flags: tuple[str, ...], folder: Path) -> Server:
    port = free_port()
    command = (sys.executable, "-m", "faser", "serve", "--port", str(port), *flags)
    url = f"http://127.0.0.1:{port}"
    server = Server(
        Recipe(name=name, command=command, environment={}, base_url=url, log_path=folder / f"{name}.log")
    )
    server.wait_until_healthy(_TIMEOUT_S)
    asyncio.run(_ask_all(url, ["Say hello."], 1, ignore_eos=False, salt="warm-up"))
    server.freeze()
    return server


def _run(server: Server, prompts: tuple[Prompt, ...], count: int, kind: str, *, salt: str) -> Answered:
    server.thaw()
    try:
        ignore_eos = kind != "ignore_eos off"
        salt = f"{salt}/{'off' if kind == 'ignore_eos off' else 'on'}"
        texts = [prompt.text for prompt in prompts]
        return asyncio.run(_ask_all(server.recipe.base_url, texts, count, ignore_eos=ignore_eos, salt=salt))
    finally:
        server.freeze()


async def _ask_all(url: str, texts: list[str], count: int, *, ignore_eos: bool, salt: str) -> Answered:
    waiting = iter(texts)
    tokens = drafted = accepted = 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal tokens, drafted, accepted
        for text in waiting:
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "cache_salt": salt,
                "ignore_eos": ignore_eos,
            }
            response = await http.post("/v1/chat/completions", json=body)
            response.raise_for_status()
            answer = response.json()
            tokens += answer["usage"]["completion_tokens"]
            counted = (answer.get("metrics") or {}).get("faser") or {}
            drafted += counted.get("drafted", 0)
            accepted += counted.get("accepted", 0)

    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as http:
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(count):
                clients.create_task(client(http))
        seconds = time.perf_counter() - began_s
    return Answered(tokens=tokens, seconds=seconds, drafted=drafted, accepted=accepted)


def _as_json(answered: Answered) -> dict[str, float]:
    return {
        "tokens": answered.tokens,
        "seconds": round(answered.seconds, 3),
        "drafted": answered.drafted,
        "accepted": answered.accepted,
    }


def _summary(arms: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    rates = {arm: [each["tokens"] / each["seconds"] for each in runs] for arm, runs in arms.items()}
    gains = [mine / off for mine, off in zip(rates["default"], rates["off"], strict=True)]
    tokens = sum(each["tokens"] for each in arms["default"])
    return {
        "off": round(statistics.median(rates["off"]), 1),
        "default": round(statistics.median(rates["default"]), 1),
        "gain": round(statistics.median(gains), 3),
        "least_gain": round(min(gains), 3),
        "most_gain": round(max(gains), 3),
        "accepted_a_token": round(sum(each["accepted"] for each in arms["default"]) / tokens, 3),
        "equal_length": sum(
            mine["tokens"] == off["tokens"] for mine, off in zip(arms["default"], arms["off"], strict=True)
        ),
    }


def _table(table: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = ["| requests at once | " + " | ".join(KINDS) + " |", "| --- |" + " --- |" * len(KINDS)]
    for count, kinds in table.items():
        cells = [
            f"{kinds[kind]['off']:.1f} → {kinds[kind]['default']:.1f} ({kinds[kind]['gain']:.2f}x)"
            for kind in KINDS
        ]
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
