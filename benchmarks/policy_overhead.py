"""What deciding costs: the host time per step of the policy `faser` and of the estimates it reads.

    python -m benchmarks.policy_overhead OUT.json [--sequences 1,16,64] [--cap 16] [--steps 300]

A drafter that needs passes, the whole round of a step: survival, lengths, stop_rule, keep, learn. Medians.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from faser.engine.cost_model import CostModel, CostTable, Role
from faser.engine.spec.acceptance import Acceptance, Outcomes
from faser.engine.spec.policies import make_policy
from faser.engine.spec.policy import Candidates
from faser.speculation import SpeculationConfig

BAR_MS = 0.3  # lengths, stop_rule, keep and learn of 64 sequences
STEP = CostTable(rows=(1, 16, 64, 256, 1024), seconds=(0.020, 0.021, 0.024, 0.05, 0.2))
PASS = CostTable(rows=(1, 64, 1024), seconds=(0.001, 0.002, 0.02))

T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sequences", default="1,16,64")
    parser.add_argument("--cap", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    counts = [int(each) for each in options.sequences.split(",")]
    measured = {count: _measure(count, options.cap, options.steps) for count in counts}
    stages = list(next(iter(measured.values())))
    print("sequences", *stages, "sum", sep="\t")
    for count, each in measured.items():
        print(count, *(f"{each[stage]:.3f}" for stage in stages), f"{sum(each.values()):.3f}", sep="\t")
    result = {
        "command": f"python -m benchmarks.policy_overhead --sequences {options.sequences} --cap {options.cap}",
        "unit": "ms a step, median",
        "bar_ms": BAR_MS,
        "steps": options.steps,
        "stages_ms": {str(count): each for count, each in measured.items()},
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _measure(num_sequences: int, cap: int, num_steps: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    costs = CostModel({Role.STEP: STEP, Role.PASS: PASS})
    acceptance = Acceptance(num_sequences, cap, method="draft_model", always_drafts=True)
    policy = make_policy(SpeculationConfig(method="draft_model", num_speculative_tokens=cap), costs, acceptance)
    slots = np.arange(num_sequences)
    quality = rng.uniform(0.5, 0.95, num_sequences)
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(stage: str, call: Callable[[], T]) -> T:
        began_s = time.perf_counter()
        value = call()
        seconds[stage].append(time.perf_counter() - began_s)
        return value

    for _ in range(num_steps):
        margins = rng.exponential(3.0, (num_sequences, cap))
        candidates = Candidates(
            slots=slots,
            limit=np.full(num_sequences, cap),
            survival=timed("survival", lambda: acceptance.survival(slots)),
            weight=np.ones(num_sequences),
            lag=np.zeros(num_sequences, dtype=np.int64),
            other_rows=0,
            kv_tokens=1000 * num_sequences,
        )
        lengths = timed("lengths", lambda c=candidates: policy.lengths(c))  # type: ignore[misc]
        timed("stop_rule", lambda c=candidates, n=lengths: policy.stop_rule(c, n))  # type: ignore[misc]
        methods = np.zeros(num_sequences, dtype=np.int64)
        fresh = timed(
            "drafted_survival",
            lambda m=margins, n=lengths, d=methods: acceptance.drafted_survival(slots, d, n, m),  # type: ignore[misc]
        )
        drafted = replace(candidates, survival=fresh, limit=lengths)
        kept = timed("keep", lambda c=drafted, n=lengths: policy.keep(c, n))  # type: ignore[misc]
        run = (rng.random((num_sequences, cap)) < quality[:, None]).cumprod(axis=1).sum(axis=1)
        outcomes = Outcomes(
            slots=slots,
            methods=methods,
            drafted=lengths,
            verified=kept,
            accepted=np.minimum(run, kept),
            confidences=margins,
        )
        timed("learn", lambda o=outcomes: acceptance.learn(o))  # type: ignore[misc]
    return {stage: round(1e3 * statistics.median(each), 4) for stage, each in seconds.items()}


if __name__ == "__main__":
    main()
