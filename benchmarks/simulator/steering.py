"""Attainment by load where every request has targets: no drafts, fixed lengths, weights alone, all that steers.

    python -m benchmarks.simulator.steering OUT.json [--trace AZURE.csv] [--machines cpu,h200] [--requests 600]

The real scheduler serves requests at shares of the capacity without drafts, on the simulator's clock. Arms: off
and fixed:N know no targets; `weights` is policy faser whose drafts weigh more for sequences behind their target,
as before there was anything else; `waits` and `refuses` have the order of due times, the rows and the room for
targets, and admission that lets every request in, or refuses those whose targets cannot be met. A refused request
has missed. Targets: a first token within ten times, and tokens within three times, of what a quiet machine takes.
at_90: the highest load, as a share of the capacity, at which 90 % keep them, between two loads by a straight line.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import about, command_line, write_json
from benchmarks.simulator.machines import MACHINES, Asked, MadeMachine, conversation, paced
from benchmarks.simulator.overload import met
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.workload import Workload, read_azure
from benchmarks.spec_bench.policy_spec import parse_policy
from faser.engine.client.admission import Admission
from faser.engine.contract.latency_model import Forecast, Lengths, capacity
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.pace import planned_pace
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.types import NO_TARGETS, REFUSE, WAIT, Slo, SpeculationParams

ARMS = ("off", "fixed:1", "fixed:2", "fixed:4", "weights", "waits", "refuses")
LOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.1)


def main() -> None:
    asked = _arguments()
    found: dict[str, Any] = {}
    for name in asked.machines:
        machine = MACHINES[name]()
        by_arm = {arm: [_mean(machine, arm, load, asked) for load in asked.loads] for arm in asked.arms}
        found[name] = {arm: {"loads": runs, "at_90": at_share(runs, 0.9)} for arm, runs in by_arm.items()}
        for arm, each in found[name].items():
            print(name, arm, each["at_90"], [run["attainment"] for run in each["loads"]], flush=True)
    write_json(asked.out, {**about("benchmarks.simulator.steering"), "machines": found})


def at_share(runs: list[dict[str, float]], share: float) -> float | None:
    """The load at which attainment falls below the share; None: it is below at every load."""
    last: dict[str, float] | None = None
    for run in runs:
        if run["attainment"] < share:
            if last is None:
                return None
            fall = (last["attainment"] - share) / (last["attainment"] - run["attainment"])
            return round(last["load"] + fall * (run["load"] - last["load"]), 3)
        last = run
    return runs[-1]["load"]


def _mean(machine: MadeMachine, arm: str, load: float, asked: argparse.Namespace) -> dict[str, float]:
    runs = [served(machine, arm, load, asked, seed) for seed in range(asked.seeds)]
    return {"load": load} | {name: round(float(np.mean([each[name] for each in runs])), 4) for name in runs[0]}


def served(machine: MadeMachine, arm: str, load: float, asked: argparse.Namespace, seed: int) -> dict[str, float]:
    """One run: shares, and seconds."""
    serving, trace = machine.machine, machine.trace(seed=seed)
    requests = _requests(machine, asked, seed)
    lengths = Lengths.of([each[1:] for each in requests])
    pace = planned_pace(
        serving.costs,
        num_slots=serving.max_num_seqs,
        most_rows=serving.max_num_batched_tokens,
        context=lengths.mean_context,
        gap_s=serving.step_overhead_s,
    )
    rate = capacity(pace, lengths)
    quiet = Forecast(pace, lengths, 1e-3 * rate)
    slo = Slo(ttft_ms=10_000 * quiet.ttft_quantile_s(0.9), tpot_ms=3000 * quiet.tpot_s)
    steers = arm in ("waits", "refuses")
    params = SpeculationParams(slo=slo, admission=REFUSE if arm == "refuses" else WAIT)
    if not steers and arm != "weights":
        params = replace(params, slo=NO_TARGETS)
    spec = parse_policy("faser" if steers or arm == "weights" else arm, cap=trace.max_tokens)

    def control(costs: CostModel, clock: SimulatedClock) -> SpeculationControl:
        return spec.make_control(
            costs, clock, drafter=trace.drafter, cap=trace.max_tokens, num_slots=serving.max_num_seqs
        )

    admission = Admission(lambda _name: params, lambda *_: None) if steers else None
    simulation = Simulation(
        trace, serving, control, seed=seed, classes=[params], admission=admission, steers=steers
    )
    arrivals = Workload(azure=paced(requests, load * rate)).arrivals(trace, duration_s=None, limit=None, seed=seed)
    outcome = simulation.run(arrivals, clients=None, duration_s=None)
    latency = [each.finished_s - each.arrival_s for each in outcome.served]
    return {
        "attainment": sum(met(each, slo) for each in outcome.served) / len(requests),
        "refused": len(outcome.refused) / len(requests),
        "latency_s": float(np.mean(latency)),
        "latency_p99_s": float(np.quantile(latency, 0.99)),
        "ttft_s": float(np.mean([each.first_s - each.arrival_s for each in outcome.served])),
    }


def _requests(machine: MadeMachine, asked: argparse.Namespace, seed: int) -> tuple[Asked, ...]:
    """At any pace: made-up ones, or a part of the trace with its bursts."""
    if asked.trace is None:
        return paced(conversation(asked.requests, seed=seed), 1.0, scale=machine.length_scale)
    trace = read_azure(asked.trace)
    first = len(trace) * (2 * seed + 1) // (2 * asked.seeds) - asked.requests // 2
    return paced(trace[max(first, 0) :][: asked.requests], 1.0, scale=machine.length_scale)


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("out", type=Path, metavar="OUT")
    add("--trace", type=Path, metavar="CSV", help="an Azure LLM inference trace [made-up requests]")
    add("--machines", type=lambda text: text.split(","), default=list(MACHINES))
    add("--arms", type=lambda text: text.split(","), default=list(ARMS))
    add("--loads", type=lambda text: [float(each) for each in text.split(",")], default=list(LOADS))
    add("--requests", type=int, default=600, help="of a run [600]")
    add("--seeds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
