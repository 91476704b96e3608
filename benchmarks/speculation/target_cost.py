"""Cost of targets to the control plane: microseconds a step, by the number of sequences.

    python -m benchmarks.speculation.target_cost OUT.json [--sequences 1,4,16,64,256]

    pace      the pace is fitted to one more step; with_prompt: to one in which a prompt is computed
    needed    the draft tokens that targets need, of drafts of four tokens, where every other sequence has a target
              and some of these are behind it; no_target: where no sequence has one
    limits    what targets leave of a step to prompts and newcomers

Medians of 15 rounds of 200 calls each. The bar is 5 µs for `pace`, which every engine pays that predicts.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.runner import about, command_line, numbers, write_json
from faser.engine.contract.plan import StepPlan, StepResult, StepRows, StepSpan
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.pace import PaceFit
from faser.engine.control.sequence import Sequence
from faser.engine.control.speculation.draft_lengths import Objective
from faser.engine.control.speculation.needs import needed_tokens
from faser.engine.control.speculation.policy import Candidates, DraftingSequences, StepFacts, without_targets
from faser.engine.control.step_cost import CostModel
from faser.engine.control.targets import TargetKeeper

BAR_US = 5.0
STEP = CostTable(
    rows=(1, 2, 4, 8, 16, 32, 64, 128, 256, 1024),
    seconds=(0.02, 0.02, 0.0205, 0.021, 0.022, 0.023, 0.024, 0.03, 0.05, 0.2),
    kv_token_s=1e-7,
)
DEPTH, ROUNDS, CALLS = 4, 15, 200


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sequences", type=numbers, default=[1, 4, 16, 64, 256])
    asked = parser.parse_args()
    found = {str(count): measured(count) for count in asked.sequences}
    content = {
        **about("benchmarks.speculation.target_cost"),
        "unit": "µs a step",
        "bar_us": BAR_US,
        "sequences": found,
    }
    write_json(asked.out, content, show=True)


def measured(count: int) -> dict[str, float]:
    plain, prompt = (_observing(count, prompt_rows) for prompt_rows in (0, 64))
    return {
        "pace": _us(plain),
        "pace_with_prompt": _us(prompt),
        "needed": _us(_needing(count, has_targets=True)),
        "needed_no_target": _us(_needing(count, has_targets=False)),
        "limits": _us(_limiting(count)),
    }


def _us(call: Callable[[], object]) -> float:
    rounds = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - began_s) / CALLS)
    return round(1e6 * statistics.median(rounds), 2)


def _costs() -> CostModel:
    return CostModel(StepTimes(tables={Role.STEP: STEP}))


def _observing(count: int, prompt_rows: int) -> Callable[[], object]:
    fit = PaceFit(_costs(), num_slots=max(count, 64), most_rows=1024)
    rows = StepRows()
    for slot in range(count):
        rows.add(slot, 300 + slot, [1, 1], samples=True, num_drafts=1)
    if prompt_rows:
        rows.add(count, 0, [1] * prompt_rows, samples=False)
    plan = StepPlan(step=1, released=(), started=(), rows=rows)
    counts = [2] * count + [0] * bool(prompt_rows)
    result, span = StepResult(step=1, counts=counts, token_ids=[1] * sum(counts), run_s=0.02), StepSpan(0.021, 0.0)
    return lambda: fit.observe(plan, result, span)


def _needing(count: int, *, has_targets: bool) -> Callable[[], object]:
    random = np.random.default_rng(0)
    slots, nothing = np.arange(count), np.zeros(count, dtype=np.int64)
    lacking, wanted_per_s = without_targets(count)
    if has_targets:
        lacking[::2], wanted_per_s[::2] = random.uniform(-4, 8, len(slots[::2])), 50.0
    survival = np.concatenate((np.ones((count, 1)), random.uniform(0.5, 0.95, (count, DEPTH)).cumprod(1)), axis=1)
    limit = np.full(count, DEPTH)
    candidates = Candidates(
        DraftingSequences(slots, lacking, wanted_per_s, nothing, nothing),
        limit,
        survival,
        StepFacts(other_rows=0, kv_tokens=300 * count, kv_sequences=count),
    )
    objective = Objective(_costs(), candidates)
    return lambda: needed_tokens(candidates, limit, lambda drafts, _: objective.verified_s(drafts))


def _limiting(count: int) -> Callable[[], object]:
    clock = SimulatedClock()
    fit = PaceFit(_costs(), num_slots=max(count, 64), most_rows=1024)
    keeper = TargetKeeper(fit, clock, most_rows=1024)
    running: list[Sequence] = []
    keeper.see(40.0)

    def limit() -> None:
        clock.advance(0.01)
        keeper.limits(running, count)

    return limit


if __name__ == "__main__":
    main()
