"""Attainment by load where every request has targets: no drafts, fixed lengths, drafts alone, all that steers.

    python -m benchmarks simulator.steering OUT.json [--trace AZURE.csv] [--machines cpu,h200] [--requests 600]
        [--seeds 3] [--first-seed 0]

The real scheduler serves requests at shares of the capacity without drafts, on the simulator's clock. Arms:

    off, fixed:N    know no targets
    drafts          policy faser, whose drafts know the targets, and nothing else does
    waits           besides, the order of due times, the rows and the room for targets; every request is let in
    refuses         as waits, and requests whose targets cannot be met are refused; a refused request has missed
    oracle          as waits, and it knows which drafted tokens will be accepted and how long answers will be

Targets: a first token within ten times, and tokens within three times, of what a quiet machine takes. at_90: the
highest load, as a share of the capacity, at which 90 % keep them, between two loads by a straight line.

A run is a cell of OUT; cells that are there already are not run again. --seconds ends the program early, to be
started again.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.runner import Json, command_line, resumed
from benchmarks.simulator.machines import MACHINES, Asked, MadeMachine, conversation, paced
from benchmarks.simulator.oracle import Knowledge
from benchmarks.simulator.overload import met
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.workload import Workload, read_azure
from benchmarks.spec_bench.policy_spec import parse_policy
from faser.engine.build import native_acceptance
from faser.engine.client.admission import Admission
from faser.engine.contract.latency_model import Forecast, Lengths, capacity
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.pace import planned_pace
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.engine.execution.drafting.registry import load_index
from faser.types.request import NO_TARGETS, REFUSE, WAIT, Slo, SpeculationParams

DRAFTS, WAITS, REFUSES, ORACLE = "drafts", "waits", "refuses", "oracle"
ARMS = ("off", "fixed:1", "fixed:2", "fixed:3", "fixed:4", DRAFTS, WAITS, REFUSES, ORACLE)
LOADS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)

MakeMachine = Callable[[], MadeMachine]


def main() -> None:
    asked = _arguments()
    settings = (
        {"machine": name, "arm": arm, "load": load, "seed": seed}
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds)
        for name in asked.machines
        for load in asked.loads
        for arm in asked.arms
    )

    def run(setting: Json) -> Json:
        return served(MACHINES[setting["machine"]](), setting["arm"], setting["load"], asked, setting["seed"])

    resumed("simulator.steering", asked.out, settings, run, seconds=asked.seconds, summary=summary)


def summary(cells: list[Json]) -> Json:
    """Summarize each arm on each machine: means over the seeds by load, and at_90."""
    found = []
    for machine, arm in dict.fromkeys((each["machine"], each["arm"]) for each in cells):
        own = [each for each in cells if (each["machine"], each["arm"]) == (machine, arm)]
        loads = [_means([each for each in own if each["load"] == load]) for load in sorted(_loads(own))]
        found.append({"machine": machine, "arm": arm, "at_90": at_share(loads, 0.9), "loads": loads})
    return {"arms": found}


def _loads(cells: list[Json]) -> set[float]:
    return {each["load"] for each in cells}


def _means(cells: list[Json]) -> dict[str, float]:
    figures = [name for name, value in cells[0].items() if isinstance(value, float) and name != "load"]
    means = {name: round(float(np.mean([each[name] for each in cells])), 4) for name in figures}
    return {"load": cells[0]["load"], "runs": len(cells), **means}


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


def served(machine: MadeMachine, arm: str, load: float, asked: argparse.Namespace, seed: int) -> Json:
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
    steers = arm in (WAITS, REFUSES, ORACLE)
    params = SpeculationParams(slo=slo, admission=REFUSE if arm == REFUSES else WAIT)
    if not steers and arm != DRAFTS:
        params = replace(params, slo=NO_TARGETS)
    spec = parse_policy("faser" if steers or arm == DRAFTS else arm, cap=trace.max_tokens)
    knowledge = (
        Knowledge(serving.max_num_seqs, trace.max_tokens, native_acceptance(load_index)) if arm == ORACLE else None
    )

    def control(costs: CostModel, clock: SimulatedClock) -> SpeculationControl:
        return spec.make_control(
            costs,
            clock,
            drafter=trace.drafter,
            cap=trace.max_tokens,
            num_slots=serving.max_num_seqs,
            acceptance=knowledge,
            policy=None if knowledge is None else knowledge.policy(costs),
        )

    simulation = Simulation(
        trace,
        serving,
        control,
        seed=seed,
        classes=[params],
        admission=Admission(lambda _name: params, lambda *_: None) if steers else None,
        steers=steers,
        announces=arm == ORACLE,
    )
    if knowledge is not None:
        knowledge.executor = simulation.executor
    arrivals = Workload(azure=paced(requests, load * rate)).arrivals(trace, duration_s=None, limit=None, seed=seed)
    outcome = simulation.run(arrivals, clients=None, duration_s=None)
    latency = [each.finished_s - each.arrival_s for each in outcome.served]
    kept = {
        "attainment": slo,
        "ttft_attainment": replace(slo, tpot_ms=None),
        "tpot_attainment": replace(slo, ttft_ms=None),
    }
    return {
        **{
            name: sum(met(each, targets) for each in outcome.served) / len(requests)
            for name, targets in kept.items()
        },
        "refused": len(outcome.refused) / len(requests),
        "latency_s": float(np.mean(latency)),
        "latency_p99_s": float(np.quantile(latency, 0.99)),
        "ttft_s": float(np.mean([each.first_s - each.arrival_s for each in outcome.served])),
        "drafted": outcome.verified / max(outcome.turns, 1),
        "accepted": outcome.accepted / max(outcome.turns, 1),
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
    add("--first-seed", type=int, default=0, help="others than those that rules were chosen by [0]")
    add("--seconds", type=float, default=float("inf"), help="after which no further run begins")
    return parser.parse_args()
