"""What --distill-online gains on traffic of one kind, and what it costs the requests that arrive meanwhile.

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
import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.cells import Cell
from benchmarks.engines import model_directory, quiet
from benchmarks.prompts import Prompt
from benchmarks.runner import Json, about, command_line, interleaved, write_json
from benchmarks.servers import Asking, Run, Server, ask_all, frozen_servers
from faser.config.engine import EngineConfig
from faser.distill.distillation import head_spec, state_layers
from faser.distill.head import initial_weights
from faser.distill.online_learner import TrainedHead, write_trained_head
from faser.distill.target import load_target

_DRAFT_VOCAB = 8192
WITHOUT, WITH = _ARMS = ("without", "with")
_ANIMALS = ["cat", "dog", "horse", "cow", "owl", "fox", "bear", "wolf", "sheep", "goat", "duck", "mouse"]
_PLACES = ["forest", "city", "farm", "school", "desert", "river", "castle", "market", "village", "garden"]
_MOODS = ["happy", "sad", "angry", "tired", "brave", "shy", "hungry", "old"]


def main() -> None:
    parser = command_line(__doc__)
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
    write_json(given.out, about("benchmarks.speculation.distill_online") | found, show=True)


def measure(given: argparse.Namespace, head: Path, folder: Path) -> Json:
    drafting = {"method": "eagle3", "model": str(head), "policy": given.policy, "num_speculative_tokens": 3}
    flags = ("--speculative-config", json.dumps(drafting))
    with frozen_servers({WITHOUT: flags, WITH: (*flags, "--distill-online")}, folder, 1) as servers:

        def run(labels: Mapping[str, Any], arm: str, number: int) -> Run:
            first = (number + labels["first round"]) * given.requests
            asking = Asking(
                concurrency=1, temperature=0, ignore_eos=False, max_tokens=given.max_tokens, salt=f"{arm}/{first}"
            )
            with servers[arm].awake():
                questions = [question(first + at) for at in range(given.requests)]
                return ask_all(servers[arm].url, questions, asking, pause_s=given.pause)

        (before,) = interleaved([{"first round": 0}], _ARMS, given.rounds, run)
        refresh = wait_for_refresh(servers[WITH], given.idle)
        (after,) = interleaved([{"first round": given.rounds}], _ARMS, given.rounds, run)
        with servers[WITH].awake():
            refresh["metrics"] = refresh_metrics(servers[WITH].url)
        refresh["log"] = re.findall(r"a refreshed head .*", servers[WITH].log)
    phases = {"before": before, "after": after}
    return {
        **{phase: {arm: figures(cell.runs[arm]) for arm in _ARMS} for phase, cell in phases.items()},
        "p50_with_over_without": {
            phase: cell.ratio(WITH, WITHOUT, lambda run: float(np.median(run.latencies_s))).rounded()
            for phase, cell in phases.items()
        },
        "same_answers": all(_same_answers(cell) for cell in phases.values()),
        "refresh": refresh,
    }


def question(number: int) -> Prompt:
    """Of one kind; no two numbers below 960 have the same."""
    mood, rest = _MOODS[number % 8], number // 8
    animal, place = _ANIMALS[rest % 12], _PLACES[rest // 12 % 10]
    text = f"Write a short story for children about a {mood} {animal} in a {place}."
    return Prompt(question_id=number, category="stories", text=text)


def wait_for_refresh(server: Server, most_s: float) -> Json:
    """Leave the server alone until a head was refreshed or refused."""
    began_s = time.monotonic()
    with server.awake():
        while time.monotonic() < began_s + most_s:
            time.sleep(5)
            if refresh_metrics(server.url)["refreshes accepted"]:
                break
    return {"idle_s": round(time.monotonic() - began_s, 1)}


def refresh_metrics(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    found = re.findall(r'^faser_head_(refreshes)_total\{.*outcome="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    learned = re.findall(r"^faser_learner_(tokens|deaths)_total\{.*\} (\S+)$", text, re.MULTILINE)
    found += [(name, "", value) for name, value in learned]
    return {f"{name} {outcome}".strip(): float(value) for name, outcome, value in found}


def figures(runs: Sequence[Run]) -> dict[str, float]:
    seconds = [each for run in runs for each in run.latencies_s]
    tokens, drafted, accepted = (
        sum(getattr(run, name) for run in runs) for name in ("tokens", "drafted", "accepted")
    )
    return {
        "p50_s": round(float(np.percentile(seconds, 50)), 4),
        "p99_s": round(float(np.percentile(seconds, 99)), 4),
        "tokens_per_step": round(tokens / (tokens - accepted), 4),
        "accepted_of_100": round(100 * accepted / max(drafted, 1), 2),
        "drafted": drafted,
        "tokens": tokens,
    }


def _same_answers(cell: Cell[Run]) -> bool:
    pairs = zip(cell.runs[WITHOUT], cell.runs[WITH], strict=True)
    return all(one.texts == other.texts for one, other in pairs)


def write_untrained(directory: Path) -> Path:
    """A head of the default model, as its training begins, with the vocabulary's first tokens."""
    model = model_directory(None)
    target = load_target(EngineConfig(), model, quiet)
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
