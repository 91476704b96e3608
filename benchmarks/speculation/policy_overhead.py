"""Cost of deciding: the host time a step of all that speculation adds to the control plane.

    python -m benchmarks speculation.policy_overhead OUT.json [--sequences 1,4,16,64,256] [--cap 8] [--requests 3]

The real scheduler, control, estimates and policy `faser` run on the simulator's clock, with a draft model whose
tokens are accepted at a rate of .8 and step times so flat that every sequence drafts. Counts the time that the
control reports for deciding: draft lengths, cuts, and learning from outcomes. Means over all steps, since some
decisions serve several steps; the median of five runs.
"""

import statistics
from pathlib import Path

from benchmarks.runner import about, command_line, numbers, write_json
from benchmarks.simulator.simulation import Machine, Simulation
from benchmarks.simulator.trace import Trace, iid_trace
from benchmarks.simulator.workload import parse_workload
from faser.config.speculation import SpeculationConfig
from faser.engine.build import native_acceptance
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.engine.execution.drafting.registry import load_index
from faser.types import SpeculationStats

BAR_MS = 0.2  # up to 64 sequences
STEP = CostTable(rows=(1, 16, 64, 256, 1024), seconds=(0.020, 0.021, 0.024, 0.05, 0.2))
PASS = CostTable(rows=(1, 64, 1024), seconds=(0.001, 0.002, 0.02))
RUNS = 5


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sequences", type=numbers, default=[1, 4, 16, 64, 256])
    parser.add_argument("--cap", type=int, default=8)
    parser.add_argument("--requests", type=int, default=3, help="of each sequence's place (default 3)")
    options = parser.parse_args()
    measured = {str(count): _measure(count, options.cap, options.requests) for count in options.sequences}
    result = {
        **about("speculation.policy_overhead"),
        "unit": "ms a step",
        "bar_ms": BAR_MS,
        "sequences": measured,
    }
    write_json(options.out, result, show=True)


def _measure(num_sequences: int, cap: int, num_requests: int) -> dict[str, float]:
    trace = iid_trace(
        0.8, max_tokens=cap, num_requests=16, prompt_len=8, output_len=200, method="draft_model", seed=0
    )
    runs = [_run(trace, num_sequences, num_requests * num_sequences) for _ in range(RUNS)]
    return {
        "decide_ms": round(statistics.median(each[0] for each in runs), 4),
        "gamma_mean": round(runs[0][1], 2),
    }


def _run(trace: Trace, num_sequences: int, num_requests: int) -> tuple[float, float]:
    """Milliseconds a step, and mean γ."""
    made: list[SpeculationControl] = []
    num_slots = max(64, num_sequences)

    def control(costs: CostModel, clock: SimulatedClock) -> SpeculationControl:
        config = SpeculationConfig(method="draft_model", num_speculative_tokens=trace.max_tokens)
        native = native_acceptance(load_index)
        made.append(SpeculationControl(config, costs, num_slots=num_slots, clock=clock, make_native=native))
        return made[0]

    costs = CostModel(StepTimes(tables={Role.STEP: STEP, Role.PASS: PASS}))
    machine = Machine(costs=costs, max_num_seqs=num_slots, max_num_batched_tokens=1024)
    workload = parse_workload(f"closed:{num_sequences}")
    arrivals = workload.arrivals(trace, duration_s=None, limit=num_requests, seed=0)
    outcome = Simulation(trace, machine, control, seed=0).run(arrivals, clients=workload.clients, duration_s=None)
    stats: SpeculationStats = made[0].stats()
    return 1000 * stats.decide_s / outcome.num_steps, outcome.verified / max(outcome.turns, 1)
