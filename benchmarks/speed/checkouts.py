"""Two checkouts of FASER timed against each other, in blocks of a few steps that take turns.

In a round each checkout has a process. Both are ready before a block begins, and one computes at a time, so what
else the machine does meets both. A program for them builds what it measures and calls `measure`, which is defined
for it. It may have a clock of its own, which runs during the part of a step that is measured.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.progress import track

from benchmarks.runner import BASE, CHECKOUT, THIS, Json, command_line, in_turn
from faser.cli.bench.estimates import ratio

_UNCOUNTED = 2  # blocks of a kind: the first ones pay for what was built before them
_PAUSE_S = 0.02  # between two blocks: threads of the process before go on waiting actively for some milliseconds

# Run in either process: once the parent has read the kind, every line that it sends asks for one block. A last one
# lets the process go on, so that it does nothing while the other one is timed.
_MEASURE = """
import json, statistics, sys, time

_blocks, _steps, *ARGUMENTS = sys.argv[1:]

def measure(kind, step, now=time.perf_counter):
    print(json.dumps(kind), flush=True)
    for _ in range(int(_blocks)):
        sys.stdin.readline()
        seconds = []
        for _ in range(int(_steps)):
            began_s = now()
            step()
            seconds.append(now() - began_s)
        print(1000 * statistics.median(seconds), flush=True)
    sys.stdin.readline()
"""


def options_of(description: str | None, *, rounds: int, blocks: int, steps: int) -> argparse.ArgumentParser:
    """A parser of the base, the file to write, and how much is measured."""
    parser = command_line(description)
    parser.add_argument("base", type=Path, help="checkout of another version")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"two processes each (default {rounds})")
    parser.add_argument("--blocks", type=int, default=blocks, help=f"of a kind, in a round (default {blocks})")
    parser.add_argument("--steps", type=int, default=steps, help=f"of a block (default {steps})")
    return parser


def compare(program: str, options: argparse.Namespace, *arguments: str) -> dict[str, Json]:
    """Return the milliseconds a step of the blocks of each kind. arguments: ARGUMENTS, to the program."""
    pairs: dict[str, list[dict[str, float]]] = defaultdict(list)
    command = [
        sys.executable,
        "-c",
        _MEASURE + program,
        str(options.blocks + _UNCOUNTED),
        str(options.steps),
        *arguments,
    ]
    for _ in track(range(options.rounds), "rounds"):
        for kind, pair in _round(command, options.base.resolve(), options.blocks):
            pairs[kind].append(pair)
    return {kind: summary(found) for kind, found in pairs.items()}


def summary(pairs: Sequence[dict[str, float]]) -> Json:
    """Medians of either checkout, and the ratios of this one over the base within a pair of blocks."""
    base, this = ([pair[name] for pair in pairs] for name in (BASE, THIS))
    ratios = [mine / theirs for mine, theirs in zip(this, base, strict=True)]
    return {
        "base": round(statistics.median(base), 4),
        "this": round(statistics.median(this), 4),
        "ratio": round(statistics.median(ratios), 4),
        "least": round(min(ratios), 4),
        "most": round(max(ratios), 4),
        "geometric_mean": ratio(this, base).rounded(),
    }


def _round(command: list[str], base: Path, num_blocks: int) -> Iterator[tuple[str, dict[str, float]]]:
    """(kind, milliseconds of either checkout) for every two blocks.

    Raises CalledProcessError if a program fails; what it said to stderr is shown.
    """
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(
                subprocess.Popen(
                    command, cwd=checkout, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1
                )
            )
            for name, checkout in ((BASE, base), (THIS, CHECKOUT))
        }
        while kind := _next_kind(running):
            for block in range(-_UNCOUNTED, num_blocks):
                pair = {name: _milliseconds(each) for name, each in in_turn([*running.items()], block)}
                if block >= 0:
                    yield kind, pair
            for process in running.values():
                _ask(process)
    for process in running.values():
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)


def _next_kind(running: "dict[str, subprocess.Popen[str]]") -> str:
    """Return the kind that both measure next; empty once one has ended."""
    lines = [_line(each) for each in running.values()]
    if not all(lines):
        return ""
    kinds: set[str] = {json.loads(each) for each in lines}
    assert len(kinds) == 1, f"the checkouts measure different things: {sorted(kinds)}"
    return kinds.pop()


def _milliseconds(process: "subprocess.Popen[str]") -> float:
    time.sleep(_PAUSE_S)
    _ask(process)
    return float(_line(process))


def _ask(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()
