"""What the host adds to the steps of a GPU: the real engine on a device that is a clock, so without a GPU.

    python -m benchmarks.host_gap OUT.json [--base CHECKOUT] [--sequences 1,16,64] [--rounds 5]

Everything between two steps is real, from the scheduler to the last staged array; the device is a clock on which
a step of the target and a pass of the draft model take given times, and calls of the driver are guesses
(clock_gpu.py). `gap` is what a step takes beyond the device's work. Modes: plain decoding with steps in flight,
drafts before the step, drafts beside it, and short answers: plain decoding for clients that ask again as soon as
they are answered. With --base another checkout is measured in turns with this one, each in a process of its own;
ratios are within a round.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from rich.progress import track

from benchmarks.peers.machine import git_commit

_CHILD = """
import json, sys
import benchmarks.host_gap
sys.path.insert(0, sys.argv[1])
from benchmarks.host_gap.world import Wanted, measure
for line in sys.stdin:
    print(json.dumps(measure(Wanted(**json.loads(line)))), flush=True)
"""
HERE = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", type=Path, help="checkout of another version")
    parser.add_argument("--modes", default="plain,serial,beside,short")
    parser.add_argument("--sequences", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=5, help="of 20 steps (default 5)")
    parser.add_argument("--step-ms", type=float, default=4.5, help="a step of the target (default 4.5)")
    parser.add_argument("--pass-ms", type=float, default=0.7, help="a pass of the draft model (default 0.7)")
    options = parser.parse_args()
    checkouts = {"this": HERE} if options.base is None else {"base": options.base.resolve(), "this": HERE}
    cells = [
        {
            "mode": mode,
            "sequences": int(count),
            "step_s": options.step_ms / 1000,
            "pass_s": options.pass_ms / 1000,
            "blocks": options.blocks,
        }
        for mode in options.modes.split(",")
        for count in options.sequences.split(",")
    ]
    rounds: list[dict[str, list[dict[str, float]]]] = []
    for number in track(range(options.rounds), "rounds"):
        names = list(checkouts) if number % 2 else list(checkouts)[::-1]
        rounds.append({name: _run(checkouts[name], cells) for name in names})
    base = "" if options.base is None else " --base CHECKOUT"
    result = {
        "command": f"python -m benchmarks.host_gap OUT{base} --modes {options.modes} "
        f"--sequences {options.sequences} --rounds {options.rounds} --blocks {options.blocks}",
        "versions": {name: git_commit(checkout) for name, checkout in checkouts.items()},
        "cells": [_summary(cell, i, rounds) for i, cell in enumerate(cells)],
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["cells"], indent=2))


def _run(checkout: Path, cells: list[dict[str, object]]) -> list[dict[str, float]]:
    """Every cell in one process, which has faser from the checkout."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(checkout)],
        cwd=HERE,
        input="".join(json.dumps(cell) + "\n" for cell in cells),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def _summary(
    cell: dict[str, object], at: int, rounds: list[dict[str, list[dict[str, float]]]]
) -> dict[str, object]:
    """Medians over rounds; and of the ratios within a round."""
    found: dict[str, object] = {"mode": cell["mode"], "sequences": cell["sequences"]}
    for name in sorted(rounds[0]):
        found[name] = {
            key: round(statistics.median(each[name][at][key] for each in rounds), 3) for key in rounds[0][name][at]
        }
    if "base" in rounds[0]:
        ratios = [each["this"][at]["period_ms"] / each["base"][at]["period_ms"] for each in rounds]
        found["period_ratio"] = round(statistics.median(ratios), 3)
    return found


if __name__ == "__main__":
    main()
