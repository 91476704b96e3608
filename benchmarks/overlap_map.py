"""Where plain steps, drafting before them and drafting beside them win: a map, simulated.

    python -m benchmarks.overlap_map OUT_DIR [--target 8b] [--slowdown 1.15] [--turns 800] [--forms]

The real scheduler, control and policy on a simulated clock, as `benchmarks.simulator` has them. Targets have step
times assumed for a large GPU: 8b takes 5.5 ms and .027 ms more for every row, 8b-roofline 5.5 up to 204 rows and
.027 for every further one. The drafter's pass takes a part of a step of one row (a 1B drafter of 8b .18). Only
proportions matter: a 32B target of 22 ms and .107 a row is the same map, its .6B drafter the line of .07. Every
drafted token is right with the same probability.

The lanes are a fixed division of the processors: on its lane, with or without company, everything takes
`slowdown` times as long as on all of them. So speeds beside are those of free lanes over the slowdown, and a cell
tells how much lanes may cost before drafting ahead loses: its speed on free lanes over the best of the other ways.
It is simulated at no slowdown, and again, with the way that `auto` takes, at the given one.

Two checks against closed forms (overlap_forms) are recorded: fixed lengths, one request, where simulation and
form describe the same and differ by chance alone; and the policy's own choice in every cell, where they need not.
With --forms the map is that of the closed forms, and nothing is simulated: a second instead of some minutes.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.overlap_chart import Panel, chart
from benchmarks.overlap_forms import BEFORE, BESIDE, PLAIN, Forms
from benchmarks.simulator.contest import Contest
from benchmarks.simulator.simulation import Machine
from benchmarks.simulator.synthetic import iid_trace
from benchmarks.simulator.workload import Workload
from benchmarks.spec_bench.policy_spec import parse_policy
from faser.engine.contract.step_times import CostTable, InterferenceTable, Role, StepTimes
from faser.engine.control.step_cost import CostModel

CAP = 8
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
DRAFT_COSTS = (0.03, 0.07, 0.12, 0.18, 0.3, 0.5)  # a pass over a step of one row
LOADS = (1, 8, 64)
TARGETS = {  # seconds of a step by rows
    "8b": CostTable(rows=(1, 1001), seconds=(0.005527, 0.032527)),
    "8b-roofline": CostTable(rows=(1, 204, 1204), seconds=(0.0055, 0.0055, 0.0325)),
}
POLICIES = {PLAIN: "off", BEFORE: "faser+serial", BESIDE: "faser+overlap"}
AUTO = "auto"
GOOD = 0.98
_PROMPT, _OUTPUT, _SHARE = 8, 400, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Tokens a second. speeds: by way, free lanes; closed: by form. slowed: beside and auto, at the slowdown."""

    load: int
    acceptance: float
    draft_cost: float
    speeds: dict[str, float]
    slowed: dict[str, float]
    closed: dict[str, float]

    @property
    def others(self) -> float:
        return max(self.speeds[PLAIN], self.speeds[BEFORE])

    @property
    def bearable(self) -> float:
        """The slowdown of both lanes at which drafting ahead is as fast as the best of the others."""
        return self.speeds[BESIDE] / self.others

    def record(self) -> dict[str, Any]:
        rounded = {
            name: {way: round(speed, 1) for way, speed in getattr(self, name).items()}
            for name in ("speeds", "slowed", "closed")
        }
        return {
            "load": self.load,
            "acceptance": self.acceptance,
            "draft_cost": self.draft_cost,
            "bearable": round(self.bearable, 3),
            **rounded,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A fixed length, one request, free lanes: tokens a second simulated, and by the form."""

    way: str
    acceptance: float
    length: int
    simulated: float
    closed: float

    @property
    def deviation(self) -> float:
        return self.simulated / self.closed - 1


def lanes_of(slowdown: float) -> InterferenceTable:
    """A fixed division: what it costs, it costs also while the other lane is idle."""
    return InterferenceTable.constant(
        share=_SHARE, verify=slowdown, draft=slowdown, verify_alone=slowdown, draft_alone=slowdown
    )


def costs_of(target: str, draft_cost: float) -> CostModel:
    step = TARGETS[target]
    return CostModel(
        StepTimes(
            tables={Role.STEP: step, Role.PASS: CostTable(rows=(1,), seconds=(draft_cost * step.seconds[0],))}
        )
    )


def contest(costs: CostModel, load: int, acceptance: float, lanes: InterferenceTable, turns: int) -> Contest:
    """`load` requests at any time, for as long as plain steps would bring each of them `turns` tokens."""
    machine = Machine(
        costs=costs,
        lanes=(lanes,),
        max_num_seqs=max(LOADS),
        max_num_batched_tokens=1024,
        step_overhead_s=0.0,
        draft_overhead_s=0.0,
    )
    return Contest(
        trace=iid_trace(acceptance, max_tokens=CAP, num_requests=32, prompt_len=_PROMPT, output_len=_OUTPUT),
        machine=machine,
        workload=Workload(clients=load, in_order=True),
        duration_s=turns * costs.step_s(load),
    )


def speed(given: Contest, policy: str) -> float:
    return given.run(parse_policy(policy, cap=CAP)).tokens_per_s


def measure(target: str, load: int, acceptance: float, draft_cost: float, slowdown: float, turns: int) -> Cell:
    """turns: of one request alone; more requests share them, an eighth at least."""
    costs, free = costs_of(target, draft_cost), lanes_of(1.0)
    long = max(turns // load, turns // 8)
    unhindered = contest(costs, load, acceptance, free, long)
    slowed = contest(costs, load, acceptance, lanes_of(slowdown), long)
    return Cell(
        load=load,
        acceptance=acceptance,
        draft_cost=draft_cost,
        speeds={way: speed(unhindered, policy) for way, policy in POLICIES.items()},
        slowed={BESIDE: speed(slowed, POLICIES[BESIDE]), AUTO: speed(slowed, "faser+auto")},
        closed=Forms(costs=costs, load=load, acceptance=acceptance).best(CAP, free),
    )


def by_form(target: str, load: int, acceptance: float, draft_cost: float) -> Cell:
    """The same cell as the closed forms have it, without the policy's estimates."""
    forms = Forms(costs=costs_of(target, draft_cost), load=load, acceptance=acceptance)
    best = forms.best(CAP, lanes_of(1.0))
    return Cell(load=load, acceptance=acceptance, draft_cost=draft_cost, speeds=best, slowed={}, closed=best)


def checks(
    target: str,
    *,
    acceptances: tuple[float, ...] = (0.5, 0.8, 0.95),
    lengths: tuple[int, ...] = (1, 3, 8),
    draft_cost: float = 0.18,
    turns: int = 3000,
) -> Iterator[Check]:
    """Both schemes at fixed lengths. A mean over `turns` steps scatters by one to two percent."""
    costs, free = costs_of(target, draft_cost), lanes_of(1.0)
    for acceptance, length in product(acceptances, lengths):
        given = contest(costs, 1, acceptance, free, turns)
        forms = Forms(costs=costs, load=1, acceptance=acceptance)
        for way, ahead, closed in (
            (BEFORE, "serial", forms.before(length)),
            (BESIDE, "overlap", forms.beside(length, free)),
        ):
            found = speed(given, f"fixed:{length}+{ahead}")
            yield Check(way=way, acceptance=acceptance, length=length, simulated=found, closed=closed)


def winners(cells: list[Cell]) -> dict[str, Any]:
    """Who wins how often."""
    return {
        "cells": len(cells),
        "cells where beside wins": {
            f"at slowdown {bound:g}": sum(cell.bearable > bound for cell in cells) for bound in (1.0, 1.15, 1.3)
        },
        "cells where plain beats both": sum(
            cell.speeds[PLAIN] >= max(cell.speeds[BEFORE], cell.speeds[BESIDE]) for cell in cells
        ),
        "most bearable slowdown": round(max(cell.bearable for cell in cells), 3),
    }


def accuracy(cells: list[Cell], held: list[Check], slowdown: float) -> dict[str, Any]:
    """How near auto comes to the best way, and how far simulation and closed forms are apart."""
    farthest = max(held, key=lambda each: abs(each.deviation))
    shares = [cell.slowed[AUTO] / max(cell.others, cell.slowed[BESIDE]) for cell in cells]
    scaled = [cell.slowed[BESIDE] * slowdown / cell.speeds[BESIDE] for cell in cells]
    return {
        f"auto over the best way at {slowdown:g}": _spread(shares)
        | {f"below {GOOD}": sum(s < GOOD for s in shares)},
        "beside, slowed times slowdown over free": _spread(scaled),
        "fixed lengths: simulated over closed form": {
            "points": len(held),
            "largest deviation": round(farthest.deviation, 4),
            "of": f"{farthest.way}, acceptance {farthest.acceptance:g}, {farthest.length} tokens",
        },
        "policy's choice: simulated over closed form": {
            way: _spread([cell.speeds[way] / cell.closed[way] for cell in cells]) for way in POLICIES
        },
    }


def _spread(values: list[float]) -> dict[str, float]:
    mean = sum(values) / len(values)
    return {"least": round(min(values), 3), "mean": round(mean, 3), "most": round(max(values), 3)}


def panels(cells: list[Cell]) -> list[Panel]:
    return [
        Panel(
            title="1 request" if load == 1 else f"{load} requests",
            values={(cell.acceptance, cell.draft_cost): cell.bearable for cell in cells if cell.load == load},
            plain={
                (cell.acceptance, cell.draft_cost)
                for cell in cells
                if cell.load == load and cell.speeds[PLAIN] >= cell.speeds[BEFORE]
            },
        )
        for load in LOADS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for TARGET.json and TARGET.svg")
    parser.add_argument("--target", choices=TARGETS, default="8b")
    parser.add_argument("--slowdown", type=float, default=1.15, help="of either lane, for auto [1.15]")
    parser.add_argument("--turns", type=int, default=800, help="simulated steps of a request alone [800]")
    parser.add_argument("--forms", action="store_true", help="closed forms alone; files are TARGET-forms")
    given = parser.parse_args()
    wanted = list(product(LOADS, ACCEPTANCES, DRAFT_COSTS))
    command = f"python -m benchmarks.overlap_map OUT --target {given.target}"
    if given.forms:
        name, how, command = f"{given.target}-forms", "closed forms", f"{command} --forms"
        cells = [by_form(given.target, *each) for each in wanted]
        told = winners(cells)
    else:
        name, how = given.target, "simulated"
        command = f"{command} --slowdown {given.slowdown:g} --turns {given.turns}"
        cells = [measure(given.target, *each, given.slowdown, given.turns) for each in track(wanted, "cells")]
        told = winners(cells) | accuracy(cells, list(checks(given.target)), given.slowdown)
    title = f"Target {given.target}, {how}: how much lanes may slow each other down before drafting ahead loses"
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"{name}.svg").write_text(chart(title, panels(cells)), encoding="utf-8")
    record = {"command": command, **told, "map": [cell.record() for cell in cells]}
    (given.out / f"{name}.json").write_text(_text(record), encoding="utf-8")
    print(json.dumps(told, indent=2))


def _text(record: dict[str, Any]) -> str:
    """JSON with a line for each entry of the map."""
    entries = ",\n  ".join(json.dumps(entry) for entry in record["map"])
    head = json.dumps({key: value for key, value in record.items() if key != "map"}, indent=1)
    return f'{head.removesuffix("}").rstrip()},\n "map": [\n  {entries}\n ]\n}}\n'


if __name__ == "__main__":
    main()
