"""Drafts under a cost model that lies: tokens per simulated second of `faser`, guarded and not, over those of off.

    python -m benchmarks speculation.guarded OUT.json [--sequences 1,4,16,32] [--requests 60] [--seeds 3]

The real scheduler and policy serve synthetic drafts from text on the simulator's clock, whose steps vary by a
tenth. A step takes as long as one of the default model does: 2.5 ms, .15 ms for every row of the first eight and
.25 ms for every further one. The lies:

    rows, cheap and dear    the model believes that draft rows cost 20 % less, or more, than they do
    step, cheap and dear    the same of the whole step without draft rows
    host                    what drafts cost the host, a twentieth of a step without drafts, is not known

Prices of rows and steps are corrected by the times of steps while they run, so what is left of the first four is
what correcting takes. Nothing corrects the last one but the guard. `guarded` counts the whole run, in which it
has to find out first; `guarded, late` counts what comes after the first half of the requests.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.runner import about, command_line, numbers, write_json
from benchmarks.simulator.simulation import Machine, Simulation
from benchmarks.simulator.trace import iid_trace
from benchmarks.simulator.workload import parse_workload
from benchmarks.spec_bench.policy_spec import parse_policy
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel

ACCEPTANCES = (0.2, 0.35, 0.5, 0.7)
LIES = {
    "none": (1.0, 1.0, 0.0),
    "rows cheap": (1.0, 0.8, 0.0),
    "rows dear": (1.0, 1.2, 0.0),
    "step cheap": (0.8, 1.0, 0.0),
    "step dear": (1.2, 1.0, 0.0),
    "host": (1.0, 1.0, 0.05),
}
CAP, METHOD, OUTPUT = 8, "ngram", 120
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class _Lie:
    """step, rows: factors on what the model believes. host: share of a plain step that drafts cost in secret."""

    step: float
    rows: float
    host: float


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sequences", type=numbers, default=[1, 4, 16, 32])
    parser.add_argument("--requests", type=int, default=60, help="of each sequence's place (default 60)")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    cells = []
    for name, lie in LIES.items():
        for acceptance in ACCEPTANCES:
            for count in options.sequences:
                cells.append(
                    {
                        "lie": name,
                        "acceptance": acceptance,
                        "sequences": count,
                        **_cell(_Lie(*lie), acceptance, count, options.requests, options.seeds),
                    }
                )
                print(*cells[-1].values(), sep="\t", flush=True)
    write_json(
        options.out,
        {
            **about("speculation.guarded"),
            "unit": "times the tokens per simulated second of off",
            "worst": {way: min(each[way] for each in cells) for way in ("unguarded", "guarded", "guarded, late")},
            "cells": cells,
        },
    )


def _cell(lie: _Lie, acceptance: float, count: int, num_requests: int, seeds: int) -> dict[str, float]:
    def rates(policy: str, *, guarded: bool = False) -> tuple[float, float]:
        """Tokens a second, of the whole runs and after their first halves."""
        whole, late = [], []
        for seed in range(seeds):
            half, both = (
                _served(policy, lie, acceptance, count, number, seed, guarded=guarded)
                for number in (num_requests // 2, num_requests)
            )
            whole.append(both[0] / both[1])
            late.append((both[0] - half[0]) / (both[1] - half[1]))
        return fmean(whole), fmean(late)

    (off, late_off), (guarded, late_guarded) = rates("off"), rates("faser", guarded=True)
    return {
        "unguarded": round(rates("faser")[0] / off, 3),
        "guarded": round(guarded / off, 3),
        "guarded, late": round(late_guarded / late_off, 3),
    }


def _served(
    policy: str, lie: _Lie, acceptance: float, count: int, num_requests: int, seed: int, *, guarded: bool
) -> tuple[float, float]:
    """Tokens, and seconds."""
    trace = iid_trace(acceptance, max_tokens=CAP, prompt_len=8, output_len=OUTPUT, method=METHOD)

    def control(_costs: CostModel, clock: SimulatedClock) -> SpeculationControl | None:
        spec = parse_policy(policy, cap=CAP)
        costs = CostModel(_times(lie.step, lie.rows))
        return spec.make_control(costs, clock, drafter=METHOD, cap=CAP, num_slots=count, guarded=guarded)

    machine = Machine(
        costs=CostModel(_times()),
        max_num_seqs=count,
        noise=0.1,
        step_overhead_s=0.0,
        draft_overhead_s=lie.host * _step_s(count),
    )
    arrivals = parse_workload(f"closed:{count}").arrivals(
        trace, duration_s=None, limit=count * num_requests, seed=seed
    )
    outcome = Simulation(trace, machine, control, seed=seed).run(arrivals, clients=count, duration_s=None)
    return outcome.window_tokens, outcome.elapsed_s


def _step_s(rows: int) -> float:
    return 0.0025 + 0.00015 * min(rows, 8) + 0.00025 * max(rows - 8, 0)


def _times(step: float = 1.0, rows: float = 1.0) -> StepTimes:
    """Return the model's beliefs: the first row takes step times as long, and each further one rows times."""
    plain = StepTimes.proportional(step_s=0.001, text_s=1e-5)
    seconds = tuple(step * _step_s(1) + rows * (_step_s(each) - _step_s(1)) for each in _ROWS)
    return replace(plain, tables={**plain.tables, Role.STEP: CostTable(rows=_ROWS, seconds=seconds)})
