"""Closed forms: what plain steps, drafting before them and drafting beside them bring, at a constant acceptance.

Mean field: every one of B sequences drafts m tokens, each right with probability a, and steps have their mean
number of rows. A step takes V(rows), a pass of the drafter D. Knows no estimates, no policy, no ends of answers.

    plain    B over V(B)
    before   (1 - a^(m+1)) / (1 - a) tokens a sequence, over V(B (m + 1)) + m D
    beside   1 - p + p (1 - a^m) / (1 - a), over both lanes' time with V(B (1 - p + p m)) and m D

p = a / (1 + a - a^m) is the share of cycles that begin with a chunk: one that has none gets one if the first
drafted token is right, a; one that has one keeps one if all of it and the border are, a^m. PEARL's scheme (arXiv
2408.11850) with a row that judges the first new token beside its drafting. acceptance below is a, 0 … below 1.

Maps side by side as SVG: acceptance across, the drafter's cost upwards, in a cell how much lanes may cost.

Knows numbers and colours; how they were found is the map's. Readable on light and on dark ground.

Where plain steps, drafting before them and drafting beside them win: a map, simulated.

    python -m benchmarks.speculation.overlap_map OUT_DIR [--target 8b] [--slowdown 1.15] [--turns 800] [--forms]

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.simulator.contest import Contest
from benchmarks.simulator.simulation import Machine
from benchmarks.simulator.trace import iid_trace
from benchmarks.simulator.workload import Workload
from faser.bench.policy_spec import parse_policy
from faser.engine.contract.interference import InterferenceTable
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.timing.cost_model import CostModel

PLAIN, BEFORE, BESIDE = "plain", "before", "beside"


def ready_share(acceptance: float, length: int) -> float:
    """Share of the cycles in which a sequence has a chunk to verify."""
    return acceptance / (1 + acceptance - acceptance**length)


def tokens_before(acceptance: float, length: int) -> float:
    """Of a step that verifies `length` drafted tokens, its own one included."""
    return float((1 - acceptance ** (length + 1)) / (1 - acceptance))


def tokens_beside(acceptance: float, length: int) -> float:
    """Of a cycle whose draft lane drafts `length` tokens, averaged over cycles with and without a chunk."""
    ready = ready_share(acceptance, length)
    return float(1 - ready + ready * (1 - acceptance**length) / (1 - acceptance))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """Tokens a second of `load` sequences together."""

    costs: CostModel
    load: int
    acceptance: float

    def plain(self) -> float:
        return self.load / self._step_s(self.load)

    def before(self, length: int) -> float:
        seconds = self._step_s(self.load * (length + 1)) + self._draft_s(length)
        return self.load * tokens_before(self.acceptance, length) / seconds

    def beside(self, length: int, lanes: InterferenceTable) -> float:
        ready = ready_share(self.acceptance, length)
        rows = self.load * (1 - ready + ready * length)
        seconds = lanes.one(self._step_s(rows), self._draft_s(length), rows=round(rows), context=1)
        return self.load * tokens_beside(self.acceptance, length) / seconds

    def best(self, cap: int, lanes: InterferenceTable) -> dict[str, float]:
        """Each way at the best of the lengths 1 … cap."""
        lengths = range(1, cap + 1)
        return {
            PLAIN: self.plain(),
            BEFORE: max(map(self.before, lengths)),
            BESIDE: max(self.beside(length, lanes) for length in lengths),
        }

    def _step_s(self, rows: float) -> float:
        """Between two whole numbers of rows time is linear."""
        whole = int(rows)
        low_s = self.costs.step_s(whole)
        return low_s + (rows - whole) * (self.costs.step_s(whole + 1) - low_s)

    def _draft_s(self, length: int) -> float:
        return length * self.costs.pass_s(self.load)


_CELL_W, _CELL_H = 44, 34
_LEFT, _TOP, _GAP, _BOTTOM = 64, 78, 26, 96
_GROUND = "#ffffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shade:
    """Of cells whose value is at least `least`. words: for the key."""

    least: float
    colour: str
    words: str


_AHEAD = (
    Shade(least=1.3, colour="#e6550d", words="also at 1.3"),
    Shade(least=1.15, colour="#fdae6b", words="also at 1.15"),
    Shade(least=1.0, colour="#fee6ce", words="ahead, if lanes cost less than 1.15"),
)
_BEFORE = Shade(least=0.0, colour="#9ecae1", words="before the step wins anyway")
_PLAIN = Shade(least=0.0, colour="#d0d0d0", words="plain wins anyway")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """values: by (acceptance, draft cost), 1 for even. plain: where nobody should draft before the step."""

    title: str
    values: dict[tuple[float, float], float]
    plain: set[tuple[float, float]]


def chart(title: str, panels: Sequence[Panel]) -> str:
    """The panels in a row. All have the same axes."""
    across = sorted({acceptance for acceptance, _ in panels[0].values})
    upwards = sorted({cost for _, cost in panels[0].values}, reverse=True)
    panel_width, panel_height = _CELL_W * len(across), _CELL_H * len(upwards)
    width = _LEFT + len(panels) * (panel_width + _GAP)
    height = _TOP + panel_height + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="12" text-anchor="middle">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="{_GROUND}"/>',
        _text(width / 2, 24, title, size=15),
    ]
    for number, panel in enumerate(panels):
        left = _LEFT + number * (panel_width + _GAP)
        parts.append(_text(left + panel_width / 2, _TOP - 12, panel.title, size=13))
        parts += _cells(panel, left, across, upwards)
        for i, acceptance in enumerate(across):
            parts.append(_text(left + _CELL_W * (i + 0.5), _TOP + panel_height + 17, f"{acceptance:g}"))
    for i, cost in enumerate(upwards):
        parts.append(_text(_LEFT - 20, _TOP + _CELL_H * (i + 0.5) + 4, f"{cost:g}"))
    middle = _TOP + panel_height / 2
    parts.append(
        f'<g transform="rotate(-90 18 {middle})">{_text(18, middle, "pass of the drafter over a step")}</g>'
    )
    parts.append(_text(width / 2, _TOP + panel_height + 38, "acceptance of a drafted token"))
    parts += _key({_shade(panel, cell) for panel in panels for cell in panel.values}, width, height - 26)
    return "\n".join([*parts, "</svg>\n"])


def shade(value: float, *, plain: bool) -> Shade:
    """Who wins where drafting ahead is `value` times as fast, on free lanes, as the best of the others."""
    others = _PLAIN if plain else _BEFORE
    return next((each for each in _AHEAD if value > each.least), others)


def _shade(panel: Panel, cell: tuple[float, float]) -> Shade:
    return shade(panel.values[cell], plain=cell in panel.plain)


def _cells(panel: Panel, left: float, across: list[float], upwards: list[float]) -> list[str]:
    parts = []
    for (acceptance, cost), value in panel.values.items():
        x = left + _CELL_W * across.index(acceptance)
        y = _TOP + _CELL_H * upwards.index(cost)
        colour = _shade(panel, (acceptance, cost)).colour
        parts.append(
            f'<rect x="{x}" y="{y}" width="{_CELL_W - 1.5}" height="{_CELL_H - 1.5}" rx="2" fill="{colour}"/>'
        )
        parts.append(_text(x + _CELL_W / 2, y + _CELL_H / 2 + 4, f"{value:.2f}"))
    return parts


def _key(used: set[Shade], width: float, y: float) -> list[str]:
    shades = [each for each in (_PLAIN, _BEFORE, *reversed(_AHEAD)) if each in used]
    widths = [42 + 6.4 * len(each.words) for each in shades]
    x = (width - sum(widths)) / 2
    parts = []
    for each, wide in zip(shades, widths, strict=True):
        parts.append(f'<rect x="{x:.1f}" y="{y - 11}" width="14" height="14" rx="2" fill="{each.colour}"/>')
        parts.append(_text(x + 20, y, each.words, anchor="start"))
        x += wide
    return parts


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="#24292f">'
        f"{escape(text)}</text>"
    )


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
    command = f"python -m benchmarks.speculation.overlap_map OUT --target {given.target}"
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
    (given.out / f"{name}.json").write_text(_overlap_map_text(record), encoding="utf-8")
    print(json.dumps(told, indent=2))


def _overlap_map_text(record: dict[str, Any]) -> str:
    """JSON with a line for each entry of the map."""
    entries = ",\n  ".join(json.dumps(entry) for entry in record["map"])
    head = json.dumps({key: value for key, value in record.items() if key != "map"}, indent=1)
    return f'{head.removesuffix("}").rstrip()},\n "map": [\n  {entries}\n ]\n}}\n'


if __name__ == "__main__":
    main()
