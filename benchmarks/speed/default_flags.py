"""Gains of speculation through the server: real prompts, default flags against `--speculative-policy off`.

    python -m benchmarks speed.default_flags QUESTIONS.jsonl OUT.json [--rounds 5] [--concurrency 1,4,16]
        [--temperatures 0] [--kinds stop,full,again] [--prompts copying] [--busy-cores 1]
        [--arm NAME='FLAGS' ...] [--model MODEL] [--server-args 'FLAGS']

Every arm is a server of its own, given the flags after its name: `--arm auto="--speculative-config '{...}'"`.
Without --arm they are default and off; off is always there. The idle servers are frozen. A round visits every cell
(requests at once, temperature, kind), and in it every arm, in an order that turns around from round to round.
Kinds: `stop`, ignore_eos off; `full`, ignore_eos on; `again`, the run of `full` once more.

Every run has a `cache_salt` of its own, so neither the prefix cache nor the corpus of past answers knows its
prompts; only `again` has that of the run it repeats. Requests are seeded, so all arms should answer alike, and
answers that differ are counted. Rates are output tokens a second, reading the prompts included, medians over
rounds; ratios are geometric means over rounds within which arms are compared, with a 95 % interval. `paid` is what
each server has measured itself, in phases with drafts and without: decoding alone, over all of its runs, by how
many sequences decode. OUT.json and OUT.md are written after every round.
"""

import argparse
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cells import Cell, markdown
from benchmarks.prompts import Prompt, load_prompts, take
from benchmarks.runner import (
    about,
    busy_cores,
    command_line,
    end_servers_on_sigterm,
    interleaved,
    named,
    numbers,
    portable,
    write_json,
)
from benchmarks.servers import Asking, Run, ask_all, frozen_servers

FLOOR = "off"
STOP, FULL, AGAIN = "stop", "full", "again"
KINDS = {STOP: "ignore_eos off", FULL: "ignore_eos on", AGAIN: "asked again"}
REQUESTS = {1: 8, 2: 12, 4: 16, 8: 24, 16: 32, 32: 64}  # of a run, by requests at once
_FLOOR_FLAGS = ("--speculative-policy", "off")
_CATEGORIES = {"all": (), "copying": ("summarization", "rag")}

Labels = Mapping[str, Any]  # concurrency, temperature, kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Settings of a measurement. arms: flags by name, FLOOR among them. categories: of questions; none: all."""

    questions: Path
    out: Path
    settings: tuple[Labels, ...]
    arms: Mapping[str, tuple[str, ...]]
    categories: tuple[str, ...]
    rounds: int
    max_tokens: int
    busy_cores: int


def main(arguments: Sequence[str] | None = None) -> None:
    wanted = wanted_of(arguments)
    end_servers_on_sigterm()
    prompts = load_prompts(wanted.questions, wanted.categories)
    conditions = about("speed.default_flags", arguments) | {
        "arms": {arm: portable(shlex.join(flags)) for arm, flags in wanted.arms.items()},
        "categories": wanted.categories or "all",
        "busy_cores": wanted.busy_cores,
        "max_tokens": wanted.max_tokens,
    }
    most = max(each["concurrency"] for each in wanted.settings)

    def write(cells: Sequence[Cell[Run]]) -> None:
        write_json(wanted.out, document(conditions, cells))
        wanted.out.with_suffix(".md").write_text(page(conditions, cells), encoding="utf-8")

    with (
        tempfile.TemporaryDirectory() as folder,
        frozen_servers(wanted.arms, Path(folder), most) as servers,
        busy_cores(wanted.busy_cores),
    ):

        def run(labels: Labels, arm: str, number: int) -> Run:
            with servers[arm].awake():
                asking = asking_of(labels, arm, number, wanted.max_tokens)
                return ask_all(servers[arm].url, questions_of(labels, prompts, number), asking)

        interleaved(wanted.settings, list(wanted.arms), wanted.rounds, run, after_round=write)
    print(wanted.out.with_suffix(".md").read_text("utf-8"))


def asking_of(labels: Labels, arm: str, number: int, max_tokens: int) -> Asking:
    """Runs that share a salt are those of `again` and the ones that they repeat: both caches know its prompts."""
    asked_as = FULL if labels["kind"] == AGAIN else labels["kind"]
    concurrency, temperature = labels["concurrency"], labels["temperature"]
    return Asking(
        concurrency=concurrency,
        temperature=temperature,
        ignore_eos=labels["kind"] != STOP,
        max_tokens=max_tokens,
        salt=f"{number}/{concurrency}/{temperature:g}/{asked_as}/{arm}",
    )


def questions_of(labels: Labels, prompts: tuple[Prompt, ...], number: int) -> tuple[Prompt, ...]:
    """Every round has others, until all have been asked; kinds and temperatures share them."""
    count = REQUESTS[labels["concurrency"]]
    return take(prompts, number * count, count)


def settings_of(
    concurrency: Sequence[int], temperatures: Sequence[float], kinds: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """In the order of a round: `again` follows the run that it repeats."""
    for count in concurrency:
        for temperature in temperatures:
            for kind in sorted(kinds, key=list(KINDS).index):
                yield {"concurrency": count, "temperature": temperature, "kind": kind}


def document(conditions: Labels, cells: Sequence[Cell[Run]]) -> dict[str, Any]:
    """Everything but the answers themselves."""
    return {
        **conditions,
        "paid": _paid(cells),
        "cells": [{**cell.labels, "arm": arm, **figures(cell, arm)} for cell in cells for arm in _arms(cell)],
        "runs": [
            {
                **cell.labels,
                "arm": arm,
                "round": number,
                "tokens": run.tokens,
                "seconds": round(run.seconds, 3),
                "drafted": run.drafted,
                "accepted": run.accepted,
            }
            for cell in cells
            for arm, runs in cell.runs.items()
            for number, run in enumerate(runs)
        ],
    }


def figures(cell: Cell[Run], arm: str) -> dict[str, Any]:
    """Return one arm's figures in one cell. ratio: over arm off. different_answers: from arm off's to the same."""
    runs = cell.runs[arm]
    drafted, accepted = sum(run.drafted for run in runs), sum(run.accepted for run in runs)
    return {
        "off_tokens_per_s": round(cell.median(FLOOR, _rate), 1),
        "tokens_per_s": round(cell.median(arm, _rate), 1),
        "ratio": cell.ratio(arm, FLOOR, _rate).rounded(),
        "accepted_a_token": round(accepted / sum(run.tokens for run in runs), 3),
        "accepted_share": round(accepted / drafted, 3) if drafted else None,
        "different_answers": different(cell, arm),
        "answers": sum(len(run.texts) for run in runs),
    }


def different(cell: Cell[Run], arm: str) -> int:
    pairs = zip(cell.runs[arm], cell.runs[FLOOR], strict=True)
    return sum(one != off for run, floor in pairs for one, off in zip(run.texts, floor.texts, strict=True))


def page(conditions: Labels, cells: Sequence[Cell[Run]]) -> str:
    """A table for every arm and temperature: requests at once downwards, kinds across."""
    arms = dict.fromkeys(arm for cell in cells for arm in _arms(cell))
    total = sum(len(run.texts) for cell in cells for arm in arms for run in cell.runs[arm])
    others = sum(different(cell, arm) for cell in cells for arm in arms)
    lines = [f"`{conditions['command']}`", "", f"{total - others} of {total} answers equal those of arm off."]
    for arm in arms:
        for temperature in dict.fromkeys(cell.labels["temperature"] for cell in cells):
            of_table = [cell for cell in cells if cell.labels["temperature"] == temperature]
            title = f"Output tokens a second, off → {arm}, temperature {temperature:g}:"
            lines += ["", title, "", _table(of_table, arm)]
    for arm, paid in _paid(cells).items():
        rows = [[level, f"{of['mean']:.2f}x ({of['low']:.2f} … {of['high']:.2f})"] for level, of in paid.items()]
        title = f"What the server of {arm} measured itself, decoding alone, with drafts over without:"
        lines += ["", title, "", markdown(["sequences", "tokens a second"], rows)]
    return "\n".join(lines) + "\n"


def _paid(cells: Sequence[Cell[Run]]) -> dict[str, Mapping[str, Mapping[str, float]]]:
    """Return what each arm has measured by the end of the last run; arms without are left out."""
    cell = cells[-1]
    return {arm: cell.runs[arm][-1].paid for arm in _arms(cell) if cell.runs[arm][-1].paid}


def _table(cells: Sequence[Cell[Run]], arm: str) -> str:
    kinds = list(dict.fromkeys(cell.labels["kind"] for cell in cells))
    by_place = {(cell.labels["concurrency"], cell.labels["kind"]): cell for cell in cells}
    rows = [
        [str(count), *(_figure(by_place[count, kind], arm) for kind in kinds)]
        for count in dict.fromkeys(cell.labels["concurrency"] for cell in cells)
    ]
    return markdown(["requests at once", *(KINDS[kind] for kind in kinds)], rows)


def _figure(cell: Cell[Run], arm: str) -> str:
    ratio = cell.ratio(arm, FLOOR, _rate).text(unit="x")
    return f"{cell.median(FLOOR, _rate):.0f} → {cell.median(arm, _rate):.0f}, {ratio}"


def _arms(cell: Cell[Run]) -> list[str]:
    return [arm for arm in cell.runs if arm != FLOOR]


def _rate(run: Run) -> float:
    return run.tokens_per_s


def wanted_of(arguments: Sequence[str] | None) -> Wanted:
    """Exits with a message where the arguments make no sense."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("questions", type=Path, metavar="QUESTIONS", help="JSON lines with question_id, category and turns")
    add("out", type=Path, metavar="OUT.json", help="a table comes next to it as OUT.md")
    add("--rounds", type=_at_least(1), default=5, help="[5]")
    add("--concurrency", type=_counts, default=[1, 4, 16], help="requests at once, comma-separated [1,4,16]")
    add("--temperatures", type=_temperatures, default=[0.0], help="comma-separated [0]")
    add("--kinds", type=_kinds, default=list(KINDS), help=f"comma-separated [{','.join(KINDS)}]")
    add("--max-tokens", type=_at_least(1), default=128, help="of an answer [128]")
    add("--prompts", choices=_CATEGORIES, default="all", help="copying: summarization and rag only [all]")
    add("--busy-cores", type=_at_least(0), default=0, metavar="N", help="processes that each keep a core busy [0]")
    add("--model", help="of every arm [the default model]")
    add("--server-args", default="", metavar="FLAGS", help="more flags of `faser serve` for every arm")
    add(
        "--arm",
        type=named,
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help=f"in place of default, {FLOOR}",
    )
    given = parser.parse_args(arguments)
    if AGAIN in given.kinds and FULL not in given.kinds:
        parser.error(f"--kinds: {AGAIN} repeats {FULL}; name both")
    common = (*([given.model] if given.model else []), *shlex.split(given.server_args))
    arms = {name: tuple(shlex.split(flags)) for name, flags in given.arm or [("default", "")]}
    arms = {**arms, FLOOR: arms.get(FLOOR, _FLOOR_FLAGS)}
    return Wanted(
        questions=given.questions,
        out=given.out,
        settings=tuple(settings_of(given.concurrency, given.temperatures, given.kinds)),
        arms={name: (*common, *flags) for name, flags in arms.items()},
        categories=_CATEGORIES[given.prompts],
        rounds=given.rounds,
        max_tokens=given.max_tokens,
        busy_cores=given.busy_cores,
    )


def _counts(text: str) -> list[int]:
    if unknown := sorted(set(numbers(text)) - set(REQUESTS)):
        raise argparse.ArgumentTypeError(f"{unknown} not among {', '.join(map(str, REQUESTS))}")
    return numbers(text)


def _temperatures(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} not among {', '.join(KINDS)}")
    return kinds


def _at_least(least: int) -> Any:
    def count(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"it is {text}; it must be at least {least}")
        return int(text)

    return count
