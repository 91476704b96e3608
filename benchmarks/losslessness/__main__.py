"""Measures that speculation is lossless, and that what measures it would see a loss.

    python -m benchmarks.losslessness OUT.json [--samples 200000] [--jobs 1] [--only laws|tokens] [--model DIR]

`laws`: chi-square of what the verifiers emit, with the real drafting loop, sampler and noise on small tables,
against the exact law of the target alone; and of planted mistakes, which have to be seen. `tokens`: a real model's
answers with every drafter and policy, token by token. Seeds are fixed. Sections of OUT.json that are not asked for
stay as they are. Exits with 1 if a right rule is flagged, a wrong one is not, or a token differs.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.losslessness import tokens
from faser.config.environment import cache_dir
from faser.engine.checkpoints.source import resolve
from tests.prompts import PROMPTS

SECTIONS = ("laws", "tokens")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=200_000, help="sequences of each combination")
    parser.add_argument("--jobs", type=int, default=1, help="processes that judge laws (default 1)")
    parser.add_argument("--only", choices=SECTIONS, help="one section (default: both)")
    parser.add_argument("--model", help="model directory of `tokens` (default: the embedded model)")
    options = parser.parse_args()
    result: dict[str, Any] = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    for section in SECTIONS if options.only is None else (options.only,):
        command = f"python -m benchmarks.losslessness OUT.json --only {section}"
        began_s = time.perf_counter()
        if section == "laws":
            found = judge_laws(options.samples, options.jobs)
            command += f" --samples {options.samples}"
        else:
            found = compare_tokens(options.model, PROMPTS)
        result[section] = {"command": command, "seconds": round(time.perf_counter() - began_s, 1)} | found
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"{section}: {'passed' if result[section]['passed'] else 'FAILED'}")
    return 0 if all(each["passed"] for each in result.values()) else 1


def compare_tokens(model: str | None, texts: Sequence[str]) -> dict[str, Any]:
    """The section `tokens`."""
    directory = resolve(model, cache_dir(), progress=lambda _stage, _done, _total: None)
    drafters = tuple(tokens.DRAFTERS)
    with tempfile.TemporaryDirectory() as folder, Progress() as bar:
        drafter = Path(folder) / "drafter"
        tokens.write_drafter(directory, drafter)
        task = bar.add_task("tokens", total=len(tokens.plan(drafters)))
        setup = tokens.Setup(
            directory=directory, drafter=drafter, texts=texts, block_bytes=tokens.block_bytes(directory)
        )
        runs = tokens.compare(setup, drafters, lambda _: bar.advance(task))
    return {
        "passed": all(run.passed for run in runs),
        "model": directory.name,
        "dtype": "float32",
        "concurrency": tokens.CONCURRENCY,
        "prompts": len(texts),
        "max_tokens": tokens.NUM_TOKENS,
        "equal": sum(run.equal for run in runs),
        "total": sum(run.total for run in runs),
        "preemptions": sum(run.preemptions for run in runs),
        "runs": [asdict(run) for run in runs],
    }


def judge_laws(num_samples: int, jobs: int) -> dict[str, Any]:
    """The section `laws`."""
    from benchmarks.losslessness import cases

    with Progress() as bar:
        task = bar.add_task("laws", total=len(cases.RIGHT) + len(cases.WRONG))
        return cases.judge(num_samples, jobs, lambda: bar.advance(task))


if __name__ == "__main__":
    sys.exit(main())
