"""What speculation brings through the server: real prompts, default flags against `--speculative-policy off`.

    python -m benchmarks.default_flags QUESTIONS.jsonl OUT.json [--rounds 5] [--concurrency 1,4,16]
        [--temperatures 0] [--kinds stop,full,again] [--prompts copying] [--beside-load 1]
        [--arm NAME='FLAGS' ...] [--model MODEL] [--server-args 'FLAGS']

Every arm is a server of its own, told the flags after its name: `--arm auto="--speculative-config '{...}'"`.
Without --arm they are default and off; off is always there. The idle servers are frozen. A round visits every cell
(requests at once, temperature, kind), and in it every arm, in an order that turns around from round to round.
Kinds: `stop`, ignore_eos off; `full`, ignore_eos on; `again`, the run of `full` once more.

Every run has a `cache_salt` of its own, so neither the prefix cache nor the corpus of past answers knows its
prompts; only `again` has that of the run it repeats. Requests are seeded, so all arms should answer alike, and
answers that differ are counted. Rates are output tokens a second, reading the prompts included, medians over
rounds; ratios are geometric means over rounds within which arms are compared, with a 95 % interval. OUT.json and
OUT.md are written after every round.
"""

import contextlib
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.beside_load import beside_load
from benchmarks.default_flags.arguments import Wanted, wanted_of
from benchmarks.default_flags.cells import FLOOR, Cell, figures
from benchmarks.default_flags.clients import Answered, Asking, ask_all
from benchmarks.default_flags.report import document, page
from benchmarks.paired import in_turn
from benchmarks.peers.machine import describe_machine, git_commit, portable
from benchmarks.peers.servers import Recipe, Server, free_port
from benchmarks.prompts import Prompt, load_prompts
from faser.cli.console import runs_bar

_START_TIMEOUT_S = 600.0
_WARM_UP = Prompt(question_id=0, category="warm-up", text="Say hello.")
_WARM_UP_TOKENS = 32

Runs = dict[Cell, dict[str, list[Answered]]]


def main(arguments: list[str]) -> None:
    wanted = wanted_of(arguments, description=__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))  # not without ending the servers
    prompts = load_prompts(wanted.questions, wanted.categories)
    runs: Runs = {cell: {arm: [] for arm in wanted.arms} for cell in wanted.cells}
    about = _about(wanted, arguments)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {arm: stack.enter_context(_started(arm, wanted, folder)) for arm in wanted.arms}
        stack.enter_context(beside_load(wanted.beside_load))
        bar = stack.enter_context(runs_bar())
        task = bar.add_task("", total=wanted.num_runs)
        for number in range(wanted.rounds):
            for cell in wanted.cells:
                for arm in in_turn(list(wanted.arms), number):
                    bar.update(task, description=f"{cell.concurrency} at once, {cell.kind}: {arm}")
                    runs[cell][arm].append(_run(servers[arm], cell, arm, number, wanted, prompts))
                    bar.advance(task)
            _write(wanted.out, about, runs)
            if bar.disable:
                print(f"round {number + 1} of {wanted.rounds} is over", file=sys.stderr, flush=True)
    print(wanted.out.with_suffix(".md").read_text("utf-8"))


def _run(
    server: Server, cell: Cell, arm: str, number: int, wanted: Wanted, prompts: tuple[Prompt, ...]
) -> Answered:
    asking = cell.asking(arm, number, wanted.max_tokens)
    with _awake(server):
        return ask_all(server.recipe.base_url, cell.questions(prompts, number), asking)


@contextlib.contextmanager
def _started(arm: str, wanted: Wanted, folder: Path) -> Iterator[Server]:
    """A server that has answered as many short requests as it will get at once, frozen."""
    port = free_port()
    command = (sys.executable, "-m", "faser", "serve", *wanted.flags(arm), "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    with Server(
        Recipe(name=arm, command=command, environment={}, base_url=url, log_path=folder / f"{arm}.log")
    ) as server:
        server.wait_until_healthy(_START_TIMEOUT_S)
        most = max(cell.concurrency for cell in wanted.cells)
        asking = Asking(
            concurrency=most, temperature=0, ignore_eos=True, max_tokens=_WARM_UP_TOKENS, salt="warm-up"
        )
        ask_all(url, [_WARM_UP] * most, asking)
        server.freeze()
        yield server


@contextlib.contextmanager
def _awake(server: Server) -> Iterator[None]:
    server.thaw()
    try:
        yield
    finally:
        server.freeze()


def _about(wanted: Wanted, arguments: list[str]) -> dict[str, Any]:
    files = {str(wanted.questions), str(wanted.out)}
    shown = [Path(each).name if each in files else each for each in arguments]
    return {
        "command": portable(shlex.join(["python", "-m", "benchmarks.default_flags", *shown])),
        "commit": git_commit(),
        "machine": describe_machine(sorted(os.sched_getaffinity(0))),
        "arms": {arm: portable(shlex.join(wanted.flags(arm))) for arm in wanted.arms},
        "categories": wanted.categories or "all",
        "beside_load": wanted.beside_load,
        "max_tokens": wanted.max_tokens,
    }


def _write(out: Path, about: Mapping[str, Any], runs: Runs) -> None:
    found = [
        figures(cell, arm, of_arm, arms[FLOOR])
        for cell, arms in runs.items()
        for arm, of_arm in arms.items()
        if arm != FLOOR
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document(about, found, runs), indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(page(about, found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
