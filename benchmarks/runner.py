"""Runner of measurements: arms in turn, in one process or in two checkouts; and the head of every result.

Owns the order of arms, the progress bar, the command line's form, and what every file of results begins with: the
command, the commit and the machine. Knows neither servers nor engines.
"""

import argparse
import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.cells import Cell
from faser.cli.console import runs_bar

T = TypeVar("T")
Json = dict[str, Any]

BASE, THIS = "base", "this"
CHECKOUT = Path(__file__).resolve().parents[1]
PROMPTS_VARIABLE = "SPEC_BENCH_QUESTIONS"  # names a file of prompts
_ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")


def in_turn(arms: Iterable[T], number: int) -> list[T]:
    """The order of a round: backwards in every other one, so that no arm always follows the same one."""
    return list(arms) if number % 2 else list(reversed(list(arms)))


def interleaved(
    settings: Iterable[Mapping[str, Any]],
    arms: Sequence[str],
    rounds: int,
    run: Callable[[Mapping[str, Any], str, int], T],
    *,
    seconds: float = float("inf"),
    after_round: Callable[[list[Cell[T]]], object] = lambda _cells: None,
) -> list[Cell[T]]:
    """Every arm in every setting in every round, with a progress bar.

    run: is given the setting, the arm and the number of the round. seconds: no round after the first begins that
    would end later than this, if it took as long as the longest one. after_round: is given the cells so far.
    """
    cells: list[Cell[T]] = [Cell(labels=labels, runs={arm: [] for arm in arms}) for labels in settings]
    began_s = ended_s = time.monotonic()
    longest_s = 0.0
    with runs_bar() as bar:
        task = bar.add_task("", total=rounds * len(cells) * len(arms))
        for number in range(rounds):
            if ended_s + longest_s - began_s > seconds:
                break
            for cell in cells:
                for arm in in_turn(arms, number):
                    bar.update(task, description=f"{', '.join(map(str, cell.labels.values()))}: {arm}")
                    cell.runs[arm].append(run(cell.labels, arm, number))
                    bar.advance(task)
            after_round(cells)
            longest_s, ended_s = max(longest_s, time.monotonic() - ended_s), time.monotonic()
            if bar.disable:
                print(f"round {number + 1} of {rounds} is over", file=sys.stderr, flush=True)
    return cells


def resumed(
    program: str,
    out: Path,
    settings: Iterable[Json],
    run: Callable[[Json], Json],
    *,
    seconds: float = float("inf"),
    summary: Callable[[list[Json]], Json] = lambda _cells: {},
) -> None:
    """Run every setting that `out` has no cell of, for about `seconds` in all, and write `out` after each.

    A cell is its setting, the commit and what run returns. summary: of all cells, goes before them.
    """
    cells: list[Json] = json.loads(out.read_text(encoding="utf-8"))["cells"] if out.exists() else []
    ends_s = time.monotonic() + seconds
    for setting in settings:
        is_there = any(all(cell[name] == value for name, value in setting.items()) for cell in cells)
        if is_there or time.monotonic() > ends_s:
            continue
        cells.append({**setting, "commit": git_commit(), **run(setting)})
        print(cells[-1], flush=True)
        write_json(out, {**about(program), **summary(cells), "cells": cells})


def timed_turns(
    arms: Mapping[str, Callable[[], object]], rounds: int, *, pause_s: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of each call, by arm; arms take turns, after a round that warms up. pause_s: before each call."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, run in arms.items():
            time.sleep(pause_s)
            began_s = time.perf_counter()
            run()
            if number > 0:
                seconds[name].append(time.perf_counter() - began_s)
    return seconds


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """`count` processes of normal priority that each keep a core busy as long as the block runs.

    They end with their parent, also with one that was killed.
    """
    spin = (
        "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(2_000_000):\n        pass\n"
    )
    command = [sys.executable, "-c", spin, str(os.getpid())]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            stack.callback(process.wait, 10.0)
            stack.callback(process.kill)
        yield


def run_program(program: str, checkout: Path, *arguments: str) -> Any:
    """The JSON in the last line that a Python program prints, run in a checkout of FASER and importing from it.

    Raises CalledProcessError if it fails; what it said to stderr is shown.
    """
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def end_servers_on_sigterm() -> None:
    """Let SIGTERM end the program as an error does, so that the servers it has started end too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def numbers(text: str) -> list[int]:
    """Parse an option such as 1,4,16."""
    return [int(each) for each in text.split(",")]


def named(text: str) -> tuple[str, str]:
    """Parse an option NAME=VALUE; the value may be empty."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be NAME=VALUE")
    return name, value


def about(program: str, arguments: Sequence[str] | None = None, cores: Sequence[int] = ()) -> Json:
    """Return the head of a result. program: its name. cores: that were used; none given: all."""
    given = sys.argv[1:] if arguments is None else arguments
    shown = [Path(each).name if _is_path(each) else each for each in given]
    return {
        "command": portable(shlex.join(["python", "-m", "benchmarks", program, *shown])),
        "commit": git_commit(),
        "machine": describe_machine(cores or sorted(os.sched_getaffinity(0))),
    }


def _is_path(text: str) -> bool:
    """Folders of this machine are not named in results."""
    return "/" in text and not any(each in text for each in (" ", "=", "://"))


def write_json(path: Path, content: Any, *, show: bool = False) -> None:
    """Write a result and, on request, print it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    if show:
        print(text)


def describe_machine(cores: Sequence[int]) -> Json:
    """cores: the ones that were used."""
    fields = _cpu_fields()
    flags = fields.get("flags", "").split()
    return {
        "cpu_model": fields.get("model name", platform.processor()),
        "cpu_family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "cpu_flags": [flag for flag in _ISA_FLAGS if flag in flags],
        "cores_used": list(cores),
        "cores_total": os.cpu_count(),
        "load_average": [round(each, 1) for each in os.getloadavg()],
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def portable(text: str) -> str:
    """text with the working directory as `.` and the user's home as `~`: results are read elsewhere."""
    return text.replace(str(Path.cwd()), ".").replace(str(Path.home()), "~")


def git_commit(checkout: Path | None = None) -> str:
    """The commit of a checkout, the present one if None, with -dirty if it differs; unknown without one or git."""
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="]
    ended = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    return ended.stdout.strip() or "unknown"


def _cpu_fields() -> dict[str, str]:
    """The first processor's fields in /proc/cpuinfo; none where there is no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text().split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}
