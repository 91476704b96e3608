"""Three classes under three times what a machine can bear: who keeps its targets, who waits, who is refused.

    python -m benchmarks simulator.overload OUT.json [--machines cpu] [--over 3] [--overload 300] [--seeds 3]

Requests of the classes come in turn, at half of the capacity for a minute, at --over times the capacity for
--overload seconds, and at half of it for a minute more; the real scheduler and admission serve them on the
simulator's clock. --splits: of every a + b + c requests in a row, a are interactive, b agents and c batch. With
1:1:1 the interactive ones alone ask for --over / 3 times the capacity, so for all of it at 3; with 1:2:3 for half.

    interactive    a first token, and tokens, within six times of what a quiet machine takes;
                   refused if that cannot be met
    agent          a first token within thirty times; runs as batch if that cannot be met
    batch          no target

Arms: `today` knows no targets (as a server without them), `order` has targets and lets every request in, `all`
decides. attainment: of the requests that were let in as they asked; of_all: of all, a refused or degraded one
being a missed one. recovered_s: from the end of the overload to the first ten seconds in which as many of all
interactive requests, less five in a hundred, keep their targets as in the minute before the overload.

A run is a cell of OUT; cells that are there already are not run again. --seconds ends the program early, to be
started again.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import Json, command_line, resumed
from benchmarks.simulator.machines import MACHINES, Asked, MadeMachine, conversation, paced
from benchmarks.simulator.simulation import Outcome, Served, Simulation
from benchmarks.simulator.workload import Workload
from benchmarks.spec_bench.policy_spec import parse_policy
from faser.engine.client.admission import Admission
from faser.engine.contract.latency_model import Forecast, Lengths, capacity
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.pace import planned_pace
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.step_cost import CostModel
from faser.types.request import NO_TARGETS, REFUSE, WAIT, Slo, SpeculationParams

ARMS = ("today", "order", "all")
_BEFORE_S, _WINDOW_S = 60.0, 10.0


def main() -> None:
    asked = _arguments()
    settings = (
        {"machine": name, "split": split, "arm": arm, "seed": seed}
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds)
        for split in asked.splits
        for name in asked.machines
        for arm in asked.arms
    )

    def run_setting(setting: Json) -> Json:
        return run(MACHINES[setting["machine"]](), setting["arm"], asked, setting["seed"], split=setting["split"])

    resumed("simulator.overload", asked.out, settings, run_setting, seconds=asked.seconds)


def run(machine: MadeMachine, arm: str, asked: argparse.Namespace, seed: int, *, split: str = "1:1:1") -> Json:
    """One run of all three phases: figures by class."""
    serving, trace = machine.machine, machine.trace(seed=seed)
    requests, classes, ends_s = _load(machine, asked, seed)
    sent = classes if arm == "all" else [replace(each, admission=WAIT) for each in classes]
    if arm == "today":
        sent = [replace(each, slo=NO_TARGETS) for each in sent]
    spec = parse_policy("faser", cap=trace.max_tokens)

    def control(costs: CostModel, clock: SimulatedClock) -> SpeculationControl:
        return spec.make_control(
            costs,
            clock,
            drafter=trace.drafter,
            cap=trace.max_tokens,
            num_slots=serving.max_num_seqs,
            classes=classes,
        )

    decisions: Counter[str] = Counter()
    by_name = {each.class_name: each for each in sent}
    admission = Admission(
        by_name.__getitem__,
        lambda name, decision, target: decisions.update([f"{name} {decision} {target}"]),
    )
    in_turn = [each for each, count in zip(sent, split.split(":"), strict=True) for _ in range(int(count))]
    simulation = Simulation(trace, serving, control, seed=seed, classes=in_turn, admission=admission)
    outcome = simulation.run(
        Workload(azure=requests).arrivals(trace, duration_s=None, limit=None, seed=seed),
        clients=None,
        duration_s=None,
    )
    slo = {each.class_name: each.slo for each in classes}
    return {
        "decisions": dict(decisions),
        "lost": len(requests) - len(outcome.served) - len(outcome.refused),
        "classes": {name: _figures(outcome, name, slo[name], begins_s=_BEFORE_S, ends_s=ends_s) for name in slo},
        "recovered_s": recovered_s(outcome, slo["interactive"], ends_s),
        "before": _figures(outcome, "interactive", slo["interactive"], begins_s=0.0, ends_s=_BEFORE_S),
        "tokens_per_s": round(sum(each.num_tokens for each in outcome.served) / outcome.elapsed_s, 1),
    }


def _load(
    machine: MadeMachine, asked: argparse.Namespace, seed: int
) -> tuple[tuple[Asked, ...], list[SpeculationParams], float]:
    """The requests, the classes that they have in turn, and when the overload ends."""
    serving, made = machine.machine, conversation(60_000, seed=seed)
    scaled = paced(made, 1.0, scale=machine.length_scale)
    lengths = Lengths.of([each[1:] for each in scaled[:3000]])
    pace = planned_pace(
        serving.costs,
        num_slots=serving.max_num_seqs,
        most_rows=serving.max_num_batched_tokens,
        context=lengths.mean_context,
        gap_s=serving.step_overhead_s,
    )
    rate = capacity(pace, lengths)
    quiet = Forecast(pace, lengths, 1e-3 * rate)
    first_ms, token_ms = 1000 * quiet.ttft_quantile_s(0.9), 1000 * quiet.tpot_s
    classes = [
        SpeculationParams(
            class_name="interactive", slo=Slo(ttft_ms=6 * first_ms, tpot_ms=6 * token_ms), admission=REFUSE
        ),
        SpeculationParams(class_name="agent", slo=Slo(ttft_ms=30 * first_ms), admission="batch"),
        SpeculationParams(class_name="batch"),
    ]
    found, at_s, place = list[Asked](), 0.0, 0
    for share, seconds in ((0.5, _BEFORE_S), (asked.over, asked.overload), (0.5, _BEFORE_S)):
        part = scaled[place : place + max(round(share * rate * seconds), 2)]
        place += len(part)
        found += [(at_s + moment, prompt, answer) for moment, prompt, answer in paced(part, share * rate)]
        at_s += seconds
    return tuple(found), classes, _BEFORE_S + asked.overload


def met(served: Served, slo: Slo) -> bool:
    in_time = slo.ttft_ms is None or 1000 * (served.first_s - served.arrival_s) <= slo.ttft_ms
    return in_time and (slo.tpot_ms is None or served.num_tokens < 2 or 1000 * served.tpot_s <= slo.tpot_ms)


def _figures(outcome: Outcome, name: str, slo: Slo, *, begins_s: float, ends_s: float) -> dict[str, Any]:
    """Return the figures of the requests of one class that came during the overload."""

    def of_class(requests: Sequence[Served]) -> list[Served]:
        return [each for each in requests if each.class_name == name and begins_s <= each.arrival_s < ends_s]

    served, refused = of_class(outcome.served), of_class(outcome.refused)
    kept = sum(met(each, slo) for each in served)
    waits = [each.first_s - each.arrival_s for each in served] or [0.0]
    return {
        "served": len(served),
        "refused": len(refused),
        "attainment": round(kept / max(len(served), 1), 4),
        "of_all": round(kept / max(len(served) + len(refused), 1), 4),
        "ttft_p50_ms": round(1000 * float(np.median(waits))),
        "ttft_p99_ms": round(1000 * float(np.quantile(waits, 0.99))),
    }


def recovered_s(outcome: Outcome, slo: Slo, ends_s: float) -> float | None:
    """Return the seconds to recovery, see the module; None: not in the minute after the overload."""
    came = [(each.arrival_s, met(each, slo)) for each in outcome.served if each.class_name == "interactive"]
    came += [(each.arrival_s, False) for each in outcome.refused if each.class_name == "interactive"]

    def share(begins_s: float, seconds: float) -> float:
        kept = [good for at_s, good in came if begins_s <= at_s < begins_s + seconds]
        return sum(kept) / max(len(kept), 1)

    wanted = share(0.0, _BEFORE_S) - 0.05
    starts = np.arange(0.0, _BEFORE_S - _WINDOW_S, 0.5)
    return next((float(start) for start in starts if share(ends_s + start, _WINDOW_S) >= wanted), None)


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("out", type=Path, metavar="OUT")
    add("--machines", type=lambda text: text.split(","), default=["cpu"])
    add("--over", type=float, default=3.0, help="times the capacity [3]")
    add("--overload", type=float, default=300.0, help="seconds of it [300]")
    add("--splits", type=lambda text: text.split(","), default=["1:1:1", "1:2:3"])
    add("--arms", type=lambda text: text.split(","), default=list(ARMS))
    add("--seeds", type=int, default=3)
    add("--first-seed", type=int, default=0, help="others than those that rules were chosen by [0]")
    add("--seconds", type=float, default=float("inf"), help="after which no further run begins")
    return parser.parse_args()
