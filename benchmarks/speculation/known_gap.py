"""Worth of knowing the gap that drafts leave on a GPU: simulated tokens per second, known and not known.

    python -m benchmarks speculation.known_gap OUT.json [--sequences 1,16,64] [--requests 6]

The real scheduler and policy `faser` serve synthetic drafts on the simulator's clock. A step takes 5.5 ms and
0.027 ms more for every row, as assumed for an 8B model on a large GPU (docs/measurements.md); steps without drafts
leave no gap, steps with drafts one of 1.1, 1.4 or 2.2 ms at 1, 16 or 64 sequences (docs/gpu.md). Drafts come from
a draft model whose pass takes 0.4 ms, or from text. Tokens are right with a given probability on average.
"""

from pathlib import Path

from benchmarks.runner import about, command_line, numbers, write_json
from benchmarks.simulator.simulation import Machine, Simulation
from benchmarks.simulator.trace import iid_trace
from benchmarks.simulator.workload import parse_workload
from benchmarks.spec_bench.policy_spec import parse_policy
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.engine.control.step_posterior import KEPT, PLAIN

GAPS_S = {1: 0.0011, 16: 0.0014, 64: 0.0022}
ACCEPTANCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
DRAFTERS = {
    "draft_model": (Role.PASS, CostTable(rows=(1, 2), seconds=(0.0004, 0.000402))),
    "suffix": (Role.TEXT, CostTable(rows=(1, 2), seconds=(1e-5, 1.1e-5))),
}
CAP, SLOTS = 6, 64
STEP = CostTable(rows=(1, 2), seconds=(0.0055, 0.005527))
_OBSERVED = 300  # gaps, after which nothing is left of the usual one


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sequences", type=numbers, default=[1, 16, 64])
    parser.add_argument("--requests", type=int, default=6, help="of each sequence's place (default 6)")
    options = parser.parse_args()
    cells = [
        _cell(drafter, count, acceptance, options.requests)
        for drafter in DRAFTERS
        for count in options.sequences
        for acceptance in ACCEPTANCES
    ]
    result = {
        **about("speculation.known_gap"),
        "unit": "tokens per simulated second",
        "cells": cells,
    }
    write_json(options.out, result)
    for cell in cells:
        print(*cell.values(), sep="\t")


def _cell(drafter: str, count: int, acceptance: float, num_requests: int) -> dict[str, object]:
    gap_s = GAPS_S[count]
    off = _tokens_per_s("off", drafter, count, acceptance, gap_s, num_requests, knows=False)
    unknown = _tokens_per_s("faser", drafter, count, acceptance, gap_s, num_requests, knows=False)
    known = _tokens_per_s("faser", drafter, count, acceptance, gap_s, num_requests, knows=True)
    return {
        "drafter": drafter,
        "sequences": count,
        "gap_ms": 1000 * gap_s,
        "acceptance": acceptance,
        "off": round(off, 1),
        "not_known": round(unknown, 1),
        "known": round(known, 1),
        "gain": round(known / unknown, 4),
    }


def _tokens_per_s(
    policy: str, drafter: str, count: int, acceptance: float, gap_s: float, num_requests: int, *, knows: bool
) -> float:
    trace = iid_trace(
        acceptance, max_tokens=CAP, num_requests=16, prompt_len=8, output_len=200, method=drafter, spread=0.2
    )
    role, table = DRAFTERS[drafter]
    times = StepTimes(tables={Role.STEP: STEP, role: table})

    def control(_costs: CostModel, clock: SimulatedClock) -> SpeculationControl:
        costs = CostModel(times, schedules_async=knows)
        for _ in range(_OBSERVED if knows else 0):
            costs.posterior.observe_gap(count, gap_s, KEPT)
            costs.posterior.observe_gap(count, 0.0, PLAIN)
        return parse_policy(policy, cap=CAP).make_control(costs, clock, drafter=drafter, cap=CAP, num_slots=SLOTS)

    machine = Machine(costs=CostModel(times), max_num_seqs=SLOTS, step_overhead_s=0.0, draft_overhead_s=gap_s)
    workload = parse_workload(f"closed:{count}")
    arrivals = workload.arrivals(trace, duration_s=None, limit=num_requests * count, seed=0)
    outcome = Simulation(trace, machine, control, seed=0).run(arrivals, clients=count, duration_s=None)
    return outcome.window_tokens / outcome.elapsed_s
