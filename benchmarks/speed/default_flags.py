"""The cells of the grid, the questions and salts of their runs, and how the runs of a cell become figures.

Pure functions of plain values.

The command line of the grid.

Figures for people and programs: tables in Markdown, and one JSON document.

What speculation brings through the server: real prompts, default flags against `--speculative-policy off`.

    python -m benchmarks.speed.default_flags QUESTIONS.jsonl OUT.json [--rounds 5] [--concurrency 1,4,16]
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

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.prompts import Prompt, load_prompts, take
from benchmarks.runner import Estimate, beside_load, describe_machine, git_commit, in_turn, portable, ratio
from benchmarks.servers import Answered, Asking, Recipe, Server, ask_all, free_port
from faser.cli.console.progress import runs_bar

FLOOR = "off"
STOP, FULL, AGAIN = "stop", "full", "again"
KINDS = {STOP: "ignore_eos off", FULL: "ignore_eos on", AGAIN: "asked again"}
REQUESTS = {1: 8, 2: 12, 4: 16, 8: 24, 16: 32, 32: 64}  # of a run, by requests at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """kind: of KINDS. `again` repeats a run of `full` with the salt it had, so both caches know its prompts."""

    concurrency: int
    temperature: float
    kind: str

    def asking(self, arm: str, round: int, max_tokens: int) -> Asking:
        """Runs that share a salt are those of `again` and the ones that they repeat."""
        asked_as = FULL if self.kind == AGAIN else self.kind
        return Asking(
            concurrency=self.concurrency,
            temperature=self.temperature,
            ignore_eos=self.kind != STOP,
            max_tokens=max_tokens,
            salt=f"{round}/{self.concurrency}/{self.temperature:g}/{asked_as}/{arm}",
        )

    def questions(self, prompts: tuple[Prompt, ...], round: int) -> tuple[Prompt, ...]:
        """Every round has others, until all have been asked; kinds and temperatures share them."""
        count = REQUESTS[self.concurrency]
        return take(prompts, round * count, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One arm in one cell. Rates are output tokens a second, medians over rounds.

    ratio: over arm off. different: answers unlike those of arm off to the same request, of num_answers.
    """

    cell: Cell
    arm: str
    off_tokens_per_s: float
    tokens_per_s: float
    ratio: Estimate
    drafted: int
    accepted: int
    tokens: int
    different: int
    num_answers: int


def grid(concurrency: Sequence[int], temperatures: Sequence[float], kinds: Sequence[str]) -> Iterator[Cell]:
    """All cells in the order of a round: `again` follows the run that it repeats."""
    for count in concurrency:
        for temperature in temperatures:
            for kind in sorted(kinds, key=list(KINDS).index):
                yield Cell(concurrency=count, temperature=temperature, kind=kind)


def figures(cell: Cell, arm: str, runs: Sequence[Answered], off_runs: Sequence[Answered]) -> Figures:
    """runs, off_runs: of this arm and of arm off, by round."""
    rates, off_rates = ([run.tokens / run.seconds for run in each] for each in (runs, off_runs))
    pairs = [
        pair
        for mine, theirs in zip(runs, off_runs, strict=True)
        for pair in zip(mine.texts, theirs.texts, strict=True)
    ]
    return Figures(
        cell=cell,
        arm=arm,
        off_tokens_per_s=statistics.median(off_rates),
        tokens_per_s=statistics.median(rates),
        ratio=ratio(rates, off_rates),
        drafted=sum(run.drafted for run in runs),
        accepted=sum(run.accepted for run in runs),
        tokens=sum(run.tokens for run in runs),
        different=sum(mine != theirs for mine, theirs in pairs),
        num_answers=len(pairs),
    )


_ARMS = {"default": (), FLOOR: ("--speculative-policy", "off")}
_CATEGORIES = {"all": (), "copying": ("summarization", "rag")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to measure. arms: flags by name; FLOOR is among them. categories: of questions; none given, all.

    beside_load: busy processes beside everything that is measured.
    """

    questions: Path
    out: Path
    cells: tuple[Cell, ...]
    arms: Mapping[str, tuple[str, ...]]
    server_flags: tuple[str, ...]
    model: str | None
    categories: tuple[str, ...]
    rounds: int
    max_tokens: int
    beside_load: int

    @property
    def num_runs(self) -> int:
        return self.rounds * len(self.cells) * len(self.arms)

    def flags(self, arm: str) -> tuple[str, ...]:
        """All that `faser serve` is told in this arm, but its port."""
        return (*([self.model] if self.model else []), *self.server_flags, *self.arms[arm])


def wanted_of(arguments: Sequence[str], *, description: str | None = None) -> Wanted:
    """Exits with a message where the arguments make no sense."""
    parser = _parser(description)
    given = parser.parse_args(arguments)
    if AGAIN in given.kinds and FULL not in given.kinds:
        parser.error(f"--kinds: {AGAIN} repeats {FULL}; name both")
    arms = dict(given.arm) or {"default": _ARMS["default"]}
    return Wanted(
        questions=given.questions,
        out=given.out,
        cells=tuple(grid(given.concurrency, given.temperatures, given.kinds)),
        arms={**arms, FLOOR: arms.get(FLOOR, _ARMS[FLOOR])},
        server_flags=tuple(shlex.split(given.server_args)),
        model=given.model,
        categories=_CATEGORIES[given.prompts],
        rounds=given.rounds,
        max_tokens=given.max_tokens,
        beside_load=given.beside_load,
    )


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.speed.default_flags",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("questions", type=Path, metavar="QUESTIONS", help="JSON lines with question_id, category and turns")
    add("out", type=Path, metavar="OUT.json", help="a table comes next to it as OUT.md")
    add("--rounds", type=_positive, default=5, help="[5]")
    add("--concurrency", type=_counts, default=(1, 4, 16), help="requests at once, comma-separated [1,4,16]")
    add("--temperatures", type=_temperatures, default=(0.0,), help="comma-separated [0]")
    add("--kinds", type=_kinds, default=tuple(KINDS), help=f"comma-separated [{','.join(KINDS)}]")
    add("--max-tokens", type=_positive, default=128, help="of an answer [128]")
    add("--prompts", choices=_CATEGORIES, default="all", help="copying: summarization and rag only [all]")
    add("--beside-load", type=_not_negative, default=0, metavar="N", help="busy processes beside all runs [0]")
    add("--model", help="of every arm [the default model]")
    add("--server-args", default="", metavar="FLAGS", help="more flags of `faser serve` for every arm")
    add(
        "--arm",
        type=_arm,
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help=f"an arm instead of `default`; may be repeated. {FLOOR} is always there",
    )
    return parser


def _arm(text: str) -> tuple[str, tuple[str, ...]]:
    name, equals, flags = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be NAME=FLAGS, where FLAGS may be empty")
    return name, tuple(shlex.split(flags))


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(each) for each in text.split(","))
    if unknown := sorted(set(counts) - set(REQUESTS)):
        raise argparse.ArgumentTypeError(f"{unknown} not among {', '.join(map(str, REQUESTS))}")
    return counts


def _temperatures(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in text.split(","))


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} not among {', '.join(KINDS)}")
    return kinds


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _not_negative(text: str) -> int:
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be at least {least}")
    return int(text)


def document(
    about: Mapping[str, Any], found: Sequence[Figures], runs: Mapping[Cell, Mapping[str, Sequence[Answered]]]
) -> dict[str, Any]:
    """Everything but the answers themselves. about: the command, the machine, the arms."""
    return {
        **about,
        "cells": [
            {
                **asdict(each.cell),
                "arm": each.arm,
                "off_tokens_per_s": round(each.off_tokens_per_s, 1),
                "tokens_per_s": round(each.tokens_per_s, 1),
                "ratio": each.ratio.rounded(),
                "accepted_a_token": round(each.accepted / each.tokens, 3),
                "accepted_share": round(each.accepted / each.drafted, 3) if each.drafted else None,
                "different_answers": each.different,
                "answers": each.num_answers,
            }
            for each in found
        ],
        "runs": [
            {**asdict(cell), "arm": arm, "round": number, **_report_counts(run)}
            for cell, arms in runs.items()
            for arm, of_arm in arms.items()
            for number, run in enumerate(of_arm)
        ],
    }


def page(about: Mapping[str, Any], found: Sequence[Figures]) -> str:
    """A table for every arm and temperature: requests at once downwards, kinds across."""
    lines = [f"`{about['command']}`", "", _exactness(found)]
    for arm in dict.fromkeys(each.arm for each in found):
        for temperature in dict.fromkeys(each.cell.temperature for each in found):
            of_table = [each for each in found if (each.arm, each.cell.temperature) == (arm, temperature)]
            lines += [
                "",
                f"Output tokens a second, off → {arm}, temperature {temperature:g}:",
                "",
                *_table(of_table),
            ]
    return "\n".join(lines) + "\n"


def _table(found: Sequence[Figures]) -> list[str]:
    kinds = list(dict.fromkeys(each.cell.kind for each in found))
    by_place = {(each.cell.concurrency, each.cell.kind): each for each in found}
    lines = [
        "| requests at once | " + " | ".join(KINDS[kind] for kind in kinds) + " |",
        "| --- |" + " --- |" * len(kinds),
    ]
    for count in dict.fromkeys(each.cell.concurrency for each in found):
        row = [by_place[count, kind] for kind in kinds]
        cells = [
            f"{each.off_tokens_per_s:.0f} → {each.tokens_per_s:.0f}, {each.ratio.text(unit='x')}" for each in row
        ]
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
    return lines


def _exactness(found: Sequence[Figures]) -> str:
    different, total = sum(each.different for each in found), sum(each.num_answers for each in found)
    return f"{total - different} of {total} answers equal those of arm off."


def _report_counts(run: Answered) -> dict[str, float]:
    return {
        "tokens": run.tokens,
        "seconds": round(run.seconds, 3),
        "drafted": run.drafted,
        "accepted": run.accepted,
    }


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
        "command": portable(shlex.join(["python", "-m", "benchmarks.speed.default_flags", *shown])),
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
