"""Errors of the latency model against the simulator, by load: means and tails of TTFT, TPOT and whole answers.

    python -m benchmarks simulator.latency_model OUT.json [--trace AZURE.csv] [--requests 500] [--seeds 3]

The real scheduler serves requests at shares of what the model calls capacity, on the simulator's clock. Against it
stand the closed form with a pace planned from the machine's step times, and with the pace that the engine itself
has fitted during that run. Lengths are those of a trace, or made-up ones; arrivals a Poisson process, and, with a
trace, also its own, which come in bursts that the model does not know. An error is predicted / simulated - 1, of
the mean of the seeds; that of attainment is a difference, at targets that a quiet machine keeps three times over.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import about, command_line, write_json
from benchmarks.simulator.machines import MACHINES, Asked, MadeMachine, conversation, paced
from benchmarks.simulator.simulation import Outcome, Served, Simulation
from benchmarks.simulator.workload import Workload, read_azure
from benchmarks.spec_bench.policy_spec import parse_policy
from faser.engine.contract.latency_model import Forecast, Lengths, Pace, capacity
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.pace import NO_DRAFTS, PlannedDrafts, planned_pace
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.types.request import Slo

LOADS = (0.1, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9)
POLICIES = ("off", "fixed:2", "faser")
_WARM = 0.1  # of the requests of a run, which find an empty machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """served: after those that found an empty machine. pace: that the engine had fitted when arrivals ended."""

    served: Sequence[Served]
    pace: Pace


def main() -> None:
    asked = _arguments()
    cells = []
    for machine in (MACHINES[name]() for name in asked.machines):
        for source in ("made", *(["poisson", "trace"] if asked.trace else [])):
            for policy in asked.policies:
                for load in asked.loads:
                    cells.append(cell(machine, source, policy, load, asked))
                    print(_line(cells[-1]), flush=True)
                    _write(asked.out, cells)


def _write(out: Path, cells: Sequence[dict[str, Any]]) -> None:
    """Write the cells so far."""
    write_json(
        out,
        {
            **about("simulator.latency_model"),
            "errors": "predicted / simulated - 1; attainment: a difference",
            "worst": worst(cells),
            "cells": cells,
        },
    )


def cell(machine: MadeMachine, source: str, policy: str, load: float, asked: argparse.Namespace) -> dict[str, Any]:
    """source: made lengths, those of the trace at Poisson times, or the trace."""
    requests = [_requests(machine, source, seed, asked) for seed in range(asked.seeds)]
    lengths = Lengths.of([each[1:] for run in requests for each in run])
    pace = _planned(machine, policy, lengths)
    rate = load * capacity(pace, lengths)
    runs = [simulated(machine, policy, paced(each, rate)) for each in requests]
    slo = _slo(pace, lengths)
    found = _figures([figures(run.served, slo) for run in runs])
    fitted = _figures([predicted(run.pace, lengths, rate, slo) for run in runs])
    planned = predicted(pace, lengths, rate, slo)
    return {
        "machine": machine.name,
        "requests": source,
        "policy": policy,
        "load": load,
        "rate": round(rate, 4),
        "simulated_ms": _rounded(found),
        "planned": None if policy == "faser" else errors(planned, found),
        "fitted": errors(fitted, found),
    }


def simulated(machine: MadeMachine, policy: str, requests: tuple[Asked, ...], *, seed: int = 0) -> Run:
    """Serve these requests to their ends."""
    trace, serving = machine.trace(seed=seed), machine.machine
    spec = parse_policy(policy, cap=trace.max_tokens)

    def control(costs: CostModel, clock: SimulatedClock) -> SpeculationControl:
        return spec.make_control(
            costs, clock, drafter=trace.drafter, cap=trace.max_tokens, num_slots=serving.max_num_seqs
        )

    simulation = Simulation(trace, serving, control, seed=seed)
    workload, pace = Workload(azure=requests), simulation.pace.pace()

    def look(now_s: float, _answers: int) -> None:
        nonlocal pace
        if now_s <= requests[-1][0]:
            pace = simulation.pace.pace()

    outcome: Outcome = simulation.run(
        workload.arrivals(trace, duration_s=None, limit=None, seed=seed),
        clients=None,
        duration_s=None,
        progress=look,
    )
    served = sorted(outcome.served, key=lambda each: each.number)
    return Run(served=served[int(_WARM * len(served)) :], pace=pace)


def figures(served: Sequence[Served], slo: Slo) -> dict[str, float]:
    """In seconds, and a share."""
    ttft = np.array([each.first_s - each.arrival_s for each in served])
    latency = np.array([each.finished_s - each.arrival_s for each in served])
    tpot = np.array([each.tpot_s for each in served if each.num_tokens > 1])
    met = [
        (each.first_s - each.arrival_s) * 1000 <= (slo.ttft_ms or np.inf)
        and (each.num_tokens < 2 or each.tpot_s * 1000 <= (slo.tpot_ms or np.inf))
        for each in served
    ]
    return {
        "ttft": float(ttft.mean()),
        "tpot": float(tpot.mean()),
        "latency": float(latency.mean()),
        "ttft p90": float(np.quantile(ttft, 0.9)),
        "ttft p99": float(np.quantile(ttft, 0.99)),
        "latency p90": float(np.quantile(latency, 0.9)),
        "latency p99": float(np.quantile(latency, 0.99)),
        "attainment": float(np.mean(met)),
    }


def predicted(pace: Pace, lengths: Lengths, rate: float, slo: Slo) -> dict[str, float]:
    forecast = Forecast(pace, lengths, rate)
    if not forecast.is_stable:
        return {}
    return {
        "ttft": forecast.ttft_s,
        "tpot": forecast.tpot_s,
        "latency": forecast.latency_s,
        "ttft p90": forecast.ttft_quantile_s(0.9),
        "ttft p99": forecast.ttft_quantile_s(0.99),
        "latency p90": forecast.latency_quantile_s(0.9),
        "latency p99": forecast.latency_quantile_s(0.99),
        "attainment": forecast.attainment(slo),
    }


def errors(guess: dict[str, float], found: dict[str, float]) -> dict[str, float] | None:
    """None: it says that it is beyond capacity."""
    if not guess:
        return None
    off = {name: guess[name] / value - 1 for name, value in found.items() if name != "attainment"}
    return _rounded({**off, "attainment": guess["attainment"] - found["attainment"]}, scale=1.0)


def worst(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The largest error of each number by the way to the pace, kind of requests and load."""
    found: dict[str, Any] = {}
    for each in cells:
        for way in ("planned", "fitted"):
            if each[way]:
                of = found.setdefault(f"{way}, {each['requests']}, {each['load']:g}", {})
                for name, error in each[way].items():
                    of[name] = max(of.get(name, 0.0), error, key=abs)
    return found


def _requests(machine: MadeMachine, source: str, seed: int, asked: argparse.Namespace) -> tuple[Asked, ...]:
    """At any pace."""
    made = conversation(asked.requests, seed=seed)
    if source == "made":
        return paced(made, 1.0, scale=machine.length_scale)
    trace = read_azure(asked.trace)
    first = len(trace) * (2 * seed + 1) // (2 * asked.seeds) - asked.requests // 2
    part = trace[max(first, 0) :][: asked.requests]
    if source == "poisson":
        part = tuple((at_s, prompt, answer) for (at_s, _, _), (_, prompt, answer) in zip(made, part, strict=True))
    return paced(part, 1.0, scale=machine.length_scale)


def _planned(machine: MadeMachine, policy: str, lengths: Lengths) -> Pace:
    """Plan the pace of policy off or fixed; for any other, that of off: loads are shares of its capacity."""
    spec, serving = parse_policy(policy, cap=machine.max_draft), machine.machine
    drafts = NO_DRAFTS
    if spec.name == "fixed":
        assert spec.gamma is not None
        drafts = PlannedDrafts(gamma=spec.gamma, acceptance=machine.acceptance)
    gap_s = serving.step_overhead_s + (serving.draft_overhead_s if drafts.gamma else 0.0)
    return planned_pace(
        serving.costs,
        num_slots=serving.max_num_seqs,
        most_rows=serving.max_num_batched_tokens,
        context=lengths.mean_context,
        drafts=drafts,
        gap_s=gap_s,
    )


def _slo(pace: Pace, lengths: Lengths) -> Slo:
    alone = Forecast(pace, lengths, 1e-3 * capacity(pace, lengths))
    return Slo(ttft_ms=3000 * alone.ttft_quantile_s(0.9), tpot_ms=3000 * alone.tpot_s)


def _figures(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means of the runs; nothing if one of them has none."""
    if not all(runs):
        return {}
    return {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}


def _rounded(values: dict[str, float], scale: float = 1000.0) -> dict[str, float]:
    return {name: round(value * (1.0 if name == "attainment" else scale), 3) for name, value in values.items()}


def _line(found: dict[str, Any]) -> str:
    shown = found["planned"] or found["fitted"] or {}
    labels = f"{found['machine']} {found['requests']} {found['policy']} at {found['load']:g}:"
    return labels + "".join(f" {name} {error:+.0%}" for name, error in shown.items())


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("out", type=Path, metavar="OUT")
    add("--trace", type=Path, metavar="CSV", help="an Azure LLM inference trace")
    add("--requests", type=int, default=500, help="of a run [500]")
    add("--seeds", type=int, default=3)
    add("--machines", type=lambda text: text.split(","), default=list(MACHINES))
    add("--policies", type=lambda text: text.split(","), default=list(POLICIES))
    add("--loads", type=lambda text: [float(each) for each in text.split(",")], default=list(LOADS))
    return parser.parse_args()
