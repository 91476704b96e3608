"""Worth of counting experts in the price of a mixture's step: simulated tokens per second.

    python -m benchmarks speculation.mixture_price OUT.json [--sequences 1,4,16] [--requests 3]

The real scheduler and policy `faser` serve synthetic drafts from text on the simulator's clock. A step takes 4 ms,
2 ms for every row, and 2 ms for every ten of the experts that it reads; a row passes 80 of 1280 in all layers. A
draft row reads as many new ones as a share of a row of another sequence. "rows" prices a step by its rows alone,
as its table has them; "experts" by the experts that rows are expected to read. Each answer has 150 tokens. The
best of off and fixed lengths is what either is compared with.
"""

from pathlib import Path

from benchmarks.runner import about, command_line, numbers, write_json
from benchmarks.simulator.simulation import Machine, Simulation
from benchmarks.simulator.trace import iid_trace
from benchmarks.simulator.workload import parse_workload
from benchmarks.spec_bench.policy_spec import parse_policy
from faser.engine.contract.step_times import CostTable, ExpertCosts, Role, StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel

ACCEPTANCES, SHARES = (0.3, 0.6, 0.85), (1.0, 0.6, 0.2)
FIXED = ("off", "fixed:1", "fixed:2", "fixed:3", "fixed:5", "fixed:8")
CAP, METHOD = 8, "ngram"
EXPERTS = ExpertCosts(total=1280, per_row=80, expert_s=2e-4)
TIMES = StepTimes.proportional(step_s=0.004, row_s=0.002, text_s=1e-5, experts=EXPERTS)
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_STEP = TIMES.tables[Role.STEP]
BY_ROWS = StepTimes(
    tables={
        **TIMES.tables,
        Role.STEP: CostTable(rows=_ROWS, seconds=tuple(_STEP.seconds_at(rows) for rows in _ROWS)),
    }
)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sequences", type=numbers, default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=3, help="of each sequence's place (default 3)")
    options = parser.parse_args()
    cells = []
    for acceptance in ACCEPTANCES:
        for count in options.sequences:
            for share in SHARES:
                cells.append(_cell(acceptance, count, share, options.requests))
                print(*cells[-1].values(), sep="\t", flush=True)
    write_json(
        options.out,
        {**about("speculation.mixture_price"), "unit": "tokens per simulated second", "cells": cells},
    )


def _cell(acceptance: float, count: int, share: float, num_requests: int) -> dict[str, object]:
    def rate(policy: str, times: StepTimes = TIMES) -> float:
        return _tokens_per_s(policy, times, acceptance, count, share, count * num_requests)

    fixed = {policy: rate(policy) for policy in FIXED}
    best = max(fixed, key=fixed.__getitem__)
    by_rows, by_experts = rate("faser", BY_ROWS), rate("faser")
    return {
        "acceptance": acceptance,
        "sequences": count,
        "draft_share": share,
        "best": best,
        "best_over_off": round(fixed[best] / fixed["off"], 3),
        "rows_over_best": round(by_rows / fixed[best], 3),
        "experts_over_best": round(by_experts / fixed[best], 3),
    }


def _tokens_per_s(policy: str, times: StepTimes, acceptance: float, count: int, share: float, limit: int) -> float:
    trace = iid_trace(acceptance, max_tokens=CAP, prompt_len=8, output_len=150, method=METHOD)

    def control(_costs: CostModel, clock: SimulatedClock) -> SpeculationControl | None:
        spec = parse_policy(policy, cap=CAP)
        return spec.make_control(CostModel(times), clock, drafter=METHOD, cap=CAP, num_slots=count)

    machine = Machine(costs=CostModel(TIMES), max_num_seqs=count, draft_share=share)
    arrivals = parse_workload(f"closed:{count}").arrivals(trace, duration_s=None, limit=limit, seed=0)
    outcome = Simulation(trace, machine, control).run(arrivals, clients=count, duration_s=None)
    return outcome.window_tokens / outcome.elapsed_s
