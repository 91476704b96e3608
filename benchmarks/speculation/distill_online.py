"""What --distill-online brings on traffic of one kind, and what it costs the requests that come meanwhile.

    python -m benchmarks.speculation.distill_online OUT.json [--head DIR] [--requests 40] [--rounds 6] [--idle 900]
        [--policy fixed]

Two servers with the same head, one of them with the flag. Without --head the head has learned nothing. In each
round both answer the same questions, one after the other with a pause before each, in an order that turns around;
the server whose turn it is not is frozen. In the pauses the learner computes, so a request comes while it does.
Between `rounds` rounds before and after, both are left alone until the head was refreshed, or --idle seconds.

Figures: seconds of a request, p50 and p99; tokens per step of a sequence, tokens / (tokens - accepted); accepted
tokens of 100 drafted ones.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.runner import describe_machine, git_commit, in_turn, portable, ratio
from benchmarks.servers import Recipe, Server, free_port
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.distill.distillation import head_spec, state_layers
from faser.distill.online.trained_head import TrainedHead, write_trained_head
from faser.distill.target import load_target
from faser.distill.training.initial_weights import initial_weights
from faser.engine.checkpoints.source import resolve

_START_TIMEOUT_S = 600.0
_DRAFT_VOCAB = 8192
_ARMS = ("without", "with")
_ANIMALS = ["cat", "dog", "horse", "cow", "owl", "fox", "bear", "wolf", "sheep", "goat", "duck", "mouse"]
_PLACES = ["forest", "city", "farm", "school", "desert", "river", "castle", "market", "village", "garden"]
_MOODS = ["happy", "sad", "angry", "tired", "brave", "shy", "hungry", "old"]


@dataclass(slots=True)
class Run:
    """Of one arm in one round. seconds: of each request."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    texts: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--requests", type=int, default=40, help="of a round")
    parser.add_argument("--rounds", type=int, default=6, help="before, and as many after")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--policy", default="fixed", help="fixed: three tokens in every step")
    parser.add_argument("--pause", type=float, default=1.5, help="seconds before each request")
    parser.add_argument("--idle", type=float, default=900.0, help="most seconds until the head is refreshed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = measure(given, given.head or write_untrained(folder / "head"), folder)
    about = {
        "command": portable(shlex.join(["python", "-m", "benchmarks.speculation.distill_online", *sys.argv[1:]])),
        "commit": git_commit(),
        "machine": describe_machine(sorted(os.sched_getaffinity(0))),
    }
    given.out.write_text(json.dumps(about | found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


def measure(given: argparse.Namespace, head: Path, folder: Path) -> dict[str, Any]:
    phases: dict[str, dict[str, list[Run]]] = {phase: {arm: [] for arm in _ARMS} for phase in ("before", "after")}
    with contextlib.ExitStack() as stack:
        servers = {arm: stack.enter_context(started(arm, head, given.policy, folder)) for arm in _ARMS}
        for server in servers.values():
            server.freeze()
        number = 0
        refresh: dict[str, Any] = {}
        for phase, runs in phases.items():
            if phase == "after":
                refresh = wait_for_refresh(servers["with"], given.idle)
            for _ in range(given.rounds):
                for arm in in_turn(list(_ARMS), number):
                    servers[arm].thaw()
                    runs[arm].append(ask(servers[arm].recipe.base_url, number, given))
                    servers[arm].freeze()
                number += 1
        for server in servers.values():
            server.thaw()
        refresh["metrics"] = refresh_metrics(servers["with"].recipe.base_url)
        refresh["log"] = re.findall(r"a refreshed head .*", (folder / "with.log").read_text("utf-8"))
    same = all(
        one.texts == other.texts
        for runs in phases.values()
        for one, other in zip(*(runs[arm] for arm in _ARMS), strict=True)
    )
    return {
        **{phase: {arm: figures(runs[arm]) for arm in _ARMS} for phase, runs in phases.items()},
        "p50_with_over_without": {
            phase: ratio(*[medians(runs[arm]) for arm in reversed(_ARMS)]).rounded()
            for phase, runs in phases.items()
        },
        "same_answers": same,
        "refresh": refresh,
    }


@contextlib.contextmanager
def started(arm: str, head: Path, policy: str, folder: Path) -> Iterator[Server]:
    port = free_port()
    drafting = json.dumps({"method": "eagle3", "model": str(head), "policy": policy, "num_speculative_tokens": 3})
    flags = ["--speculative-config", drafting, "--port", str(port)]
    flags += ["--distill-online"] if arm == "with" else []
    recipe = Recipe(
        name=arm,
        command=(sys.executable, "-m", "faser", "serve", *flags),
        environment={},
        base_url=f"http://127.0.0.1:{port}",
        log_path=folder / f"{arm}.log",
    )
    with Server(recipe) as server:
        server.wait_until_healthy(_START_TIMEOUT_S)
        yield server


def question(number: int) -> str:
    """Of one kind; no two numbers below 960 have the same."""
    mood, rest = _MOODS[number % 8], number // 8
    animal, place = _ANIMALS[rest % 12], _PLACES[rest // 12 % 10]
    return f"Write a short story for children about a {mood} {animal} in a {place}."


def ask(url: str, number: int, given: argparse.Namespace) -> Run:
    run = Run()
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        for at in range(given.requests):
            time.sleep(given.pause)
            body = {
                "messages": [{"role": "user", "content": question(number * given.requests + at)}],
                "max_tokens": given.max_tokens,
                "temperature": 0,
            }
            began_s = time.perf_counter()
            answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
            run.seconds.append(time.perf_counter() - began_s)
            drafts = (answer.get("metrics") or {}).get("faser") or {}
            run.tokens += answer["usage"]["completion_tokens"]
            run.drafted += drafts.get("drafted", 0)
            run.accepted += drafts.get("accepted", 0)
            run.texts.append(answer["choices"][0]["message"]["content"])
    return run


def wait_for_refresh(server: Server, most_s: float) -> dict[str, Any]:
    """Leave the server alone until a head was refreshed or refused."""
    server.thaw()
    began_s = time.monotonic()
    while time.monotonic() < began_s + most_s:
        time.sleep(5)
        counts = refresh_metrics(server.recipe.base_url)
        if counts["refreshes accepted"]:
            break
    server.freeze()
    return {"idle_s": round(time.monotonic() - began_s, 1)}


def refresh_metrics(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    found = re.findall(r'^faser_head_(refreshes)_total\{.*outcome="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    found += [
        (name, "", value)
        for name, value in re.findall(r"^faser_learner_(tokens|deaths)_total\{.*\} (\S+)$", text, re.MULTILINE)
    ]
    return {f"{name} {outcome}".strip(): float(value) for name, outcome, value in found}


def medians(runs: list[Run]) -> list[float]:
    return [float(np.median(run.seconds)) for run in runs]


def figures(runs: list[Run]) -> dict[str, float]:
    seconds = [each for run in runs for each in run.seconds]
    tokens = sum(run.tokens for run in runs)
    drafted = sum(run.drafted for run in runs)
    accepted = sum(run.accepted for run in runs)
    return {
        "p50_s": round(float(np.percentile(seconds, 50)), 4),
        "p99_s": round(float(np.percentile(seconds, 99)), 4),
        "tokens_per_step": round(tokens / (tokens - accepted), 4),
        "accepted_of_100": round(100 * accepted / max(drafted, 1), 2),
        "drafted": drafted,
        "tokens": tokens,
    }


def write_untrained(directory: Path) -> Path:
    """A head of the default model, as its training begins, with the vocabulary's first tokens."""
    model = resolve(None, cache_dir(), progress=lambda *_: None)
    target = load_target(EngineConfig(), model, lambda *_: None)
    decoder = target.config.spec
    draft_ids = torch.arange(_DRAFT_VOCAB)  # a byte-level vocabulary has its frequent tokens first
    spec = head_spec(decoder, state_layers(decoder.num_layers), _DRAFT_VOCAB, model.name)
    weights = initial_weights(
        spec, head_rows=target.head_rows(draft_ids).cpu(), final_norm=target.final_norm().cpu(), seed=0
    )
    write_trained_head(directory, TrainedHead(spec=spec, weights=weights, draft_ids=draft_ids), target, int8=True)
    return directory


if __name__ == "__main__":
    main()
