"""Map of where plain steps, drafting before them and drafting during them win, simulated or by closed forms.

    python -m benchmarks.speculation.overlap_map OUT_DIR [--target 8b] [--slowdown 1.15] [--turns 800] [--forms]

The real scheduler, control and policy on a simulated clock, as `benchmarks.simulator` has them. Targets have step
times assumed for a large GPU: 8b takes 5.5 ms and .027 ms more for every row, 8b-roofline 5.5 up to 204 rows and
.027 for every further one. The drafter's pass takes a part of a step of one row (a 1B drafter of 8b .18). Only
proportions matter: a 32B target of 22 ms and .107 a row is the same map, its .6B drafter the line of .07. Every
drafted token is right with the same probability.

The lanes are a fixed division of the processors: on its lane, with or without company, everything takes `slowdown`
times as long as on all of them. A cell says how much lanes may cost before overlapped drafting loses: its speed on
free lanes over the best of the other ways. It is simulated at no slowdown, and again, with the way that `auto`
takes, at the given one. Fixed lengths at one request are held against the closed forms.

Closed forms are a mean field: every one of B sequences drafts m tokens, each right with probability a. A step
takes V(rows), a pass of the drafter D:

    plain    B over V(B)
    before   (1 - a^(m+1)) / (1 - a) tokens a sequence, over V(B (m + 1)) + m D
    during   1 - p + p (1 - a^m) / (1 - a), over both lanes' time with V(B (1 - p + p m)) and m D

p = a / (1 + a - a^m) is the share of cycles that begin with a chunk: one that has none gets one if the first
drafted token is right, a; one that has one keeps one if all of it and the bonus token are, a^m. PEARL's scheme
(arXiv 2408.11850) with a row that verifies the first new token during its drafting.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.runner import command_line
from benchmarks.simulator.co_run import InterferenceTable
from benchmarks.simulator.contest import Contest
from benchmarks.simulator.simulation import Machine
from benchmarks.simulator.trace import iid_trace
from benchmarks.simulator.workload import Workload
from benchmarks.spec_bench.policy_spec import parse_policy
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.step_cost import CostModel

CAP = 8
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
DRAFT_COSTS = (0.03, 0.07, 0.12, 0.18, 0.3, 0.5)  # a pass over a step of one row
LOADS = (1, 8, 64)
TARGETS = {  # seconds of a step by rows
    "8b": CostTable(rows=(1, 1001), seconds=(0.005527, 0.032527)),
    "8b-roofline": CostTable(rows=(1, 204, 1204), seconds=(0.0055, 0.0055, 0.0325)),
}
PLAIN, BEFORE, DURING, AUTO = "plain", "before", "during", "auto"
POLICIES = {PLAIN: "off", BEFORE: "faser+serial", DURING: "faser+overlap"}
_PROMPT, _OUTPUT, _SHARE = 8, 400, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """One place of the map, in tokens/s. speeds: by way, free lanes. slowed: during and auto, at the slowdown."""

    load: int
    acceptance: float
    draft_cost: float
    speeds: dict[str, float]
    slowed: dict[str, float]

    @property
    def others(self) -> float:
        return max(self.speeds[PLAIN], self.speeds[BEFORE])

    @property
    def bearable(self) -> float:
        """The slowdown of both lanes at which overlapped drafting is as fast as the best of the others."""
        return self.speeds[DURING] / self.others

    def record(self) -> dict[str, Any]:
        rounded = {
            name: {way: round(speed, 1) for way, speed in getattr(self, name).items()}
            for name in ("speeds", "slowed")
        }
        about = {"load": self.load, "acceptance": self.acceptance, "draft_cost": self.draft_cost}
        return {**about, "bearable": round(self.bearable, 3), **rounded}


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """Closed forms: tokens a second of `load` sequences together. acceptance: 0 … below 1."""

    costs: CostModel
    load: int
    acceptance: float

    def plain(self) -> float:
        return self.load / self._step_s(self.load)

    def before(self, length: int) -> float:
        seconds = self._step_s(self.load * (length + 1)) + self._draft_s(length)
        return self.load * tokens_before(self.acceptance, length) / seconds

    def during(self, length: int, lanes: InterferenceTable) -> float:
        ready = ready_share(self.acceptance, length)
        rows = self.load * (1 - ready + ready * length)
        seconds = lanes.one(self._step_s(rows), self._draft_s(length), rows=round(rows), context=1)
        return self.load * tokens_during(self.acceptance, length) / seconds

    def best(self, cap: int, lanes: InterferenceTable) -> dict[str, float]:
        """Each way at the best of the lengths 1 … cap."""
        lengths = range(1, cap + 1)
        return {
            PLAIN: self.plain(),
            BEFORE: max(map(self.before, lengths)),
            DURING: max(self.during(length, lanes) for length in lengths),
        }

    def _step_s(self, rows: float) -> float:
        """Between two whole numbers of rows time is linear."""
        whole = int(rows)
        low_s = self.costs.step_s(whole)
        return low_s + (rows - whole) * (self.costs.step_s(whole + 1) - low_s)

    def _draft_s(self, length: int) -> float:
        return length * self.costs.pass_s(self.load)


def ready_share(acceptance: float, length: int) -> float:
    """Share of the cycles in which a sequence has a chunk to verify."""
    return acceptance / (1 + acceptance - acceptance**length)


def tokens_before(acceptance: float, length: int) -> float:
    """Return the tokens of a step that verifies `length` drafted tokens, its own one included."""
    return float((1 - acceptance ** (length + 1)) / (1 - acceptance))


def tokens_during(acceptance: float, length: int) -> float:
    """Return the mean tokens of a cycle whose draft lane drafts `length` tokens, with a chunk or without."""
    ready = ready_share(acceptance, length)
    return float(1 - ready + ready * (1 - acceptance**length) / (1 - acceptance))


def main() -> None:
    parser = command_line(__doc__)
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
        spots = [by_form(given.target, *each) for each in wanted]
        found = winners(spots)
    else:
        name, how = given.target, "simulated"
        command = f"{command} --slowdown {given.slowdown:g} --turns {given.turns}"
        spots = [measure(given.target, *each, given.slowdown, given.turns) for each in track(wanted, "map")]
        farthest = max(deviations(given.target), key=abs)
        found = winners(spots) | {
            f"auto over the best way at {given.slowdown:g}": auto_shares(spots),
            "fixed lengths: simulated over closed form, largest deviation": round(farthest, 4),
        }
    title = (
        f"Target {given.target}, {how}: how much lanes may slow each other down before overlapped drafting loses"
    )
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"{name}.svg").write_text(picture(title, spots), encoding="utf-8")
    entries = ",\n  ".join(json.dumps(spot.record()) for spot in spots)
    head = json.dumps({"command": command, **found}, indent=1).removesuffix("\n}")
    (given.out / f"{name}.json").write_text(f'{head},\n "map": [\n  {entries}\n ]\n}}\n', encoding="utf-8")
    print(json.dumps(found, indent=2))


def lanes_of(slowdown: float) -> InterferenceTable:
    """A fixed division: what it costs, it costs also while the other lane is idle."""
    return InterferenceTable.constant(
        share=_SHARE, verify=slowdown, draft=slowdown, verify_alone=slowdown, draft_alone=slowdown
    )


def costs_of(target: str, draft_cost: float) -> CostModel:
    step = TARGETS[target]
    one_pass = CostTable(rows=(1,), seconds=(draft_cost * step.seconds[0],))
    return CostModel(StepTimes(tables={Role.STEP: step, Role.PASS: one_pass}))


def contest(costs: CostModel, load: int, acceptance: float, lanes: InterferenceTable, turns: int) -> Contest:
    """`load` requests at any time, for as long as plain steps would give each of them `turns` tokens."""
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


def measure(target: str, load: int, acceptance: float, draft_cost: float, slowdown: float, turns: int) -> Spot:
    """turns: of one request alone; more requests share them, an eighth at least."""
    costs, long = costs_of(target, draft_cost), max(turns // load, turns // 8)
    unhindered = contest(costs, load, acceptance, lanes_of(1.0), long)
    slowed = contest(costs, load, acceptance, lanes_of(slowdown), long)
    return Spot(
        load=load,
        acceptance=acceptance,
        draft_cost=draft_cost,
        speeds={way: speed(unhindered, policy) for way, policy in POLICIES.items()},
        slowed={DURING: speed(slowed, POLICIES[DURING]), AUTO: speed(slowed, "faser+auto")},
    )


def by_form(target: str, load: int, acceptance: float, draft_cost: float) -> Spot:
    """The same place as the closed forms have it, without the policy's estimates."""
    forms = Forms(costs=costs_of(target, draft_cost), load=load, acceptance=acceptance)
    best = forms.best(CAP, lanes_of(1.0))
    return Spot(load=load, acceptance=acceptance, draft_cost=draft_cost, speeds=best, slowed={})


def deviations(
    target: str,
    *,
    acceptances: tuple[float, ...] = (0.5, 0.8, 0.95),
    lengths: tuple[int, ...] = (1, 3, 8),
    draft_cost: float = 0.18,
    turns: int = 3000,
) -> Iterator[float]:
    """Simulated over closed form, less 1: both schemes at fixed lengths, one request, free lanes.

    A mean over `turns` steps scatters by one to two percent.
    """
    costs, free = costs_of(target, draft_cost), lanes_of(1.0)
    for acceptance, length in product(acceptances, lengths):
        given = contest(costs, 1, acceptance, free, turns)
        forms = Forms(costs=costs, load=1, acceptance=acceptance)
        for overlap, closed in (("serial", forms.before(length)), ("overlap", forms.during(length, free))):
            yield speed(given, f"fixed:{length}+{overlap}") / closed - 1


def winners(spots: list[Spot]) -> dict[str, Any]:
    """Count how often each way wins."""
    return {
        "cells": len(spots),
        "cells where overlap wins": {
            f"at slowdown {bound:g}": sum(spot.bearable > bound for spot in spots) for bound in (1.0, 1.15, 1.3)
        },
        "cells where plain beats both": sum(
            spot.speeds[PLAIN] >= max(spot.speeds[BEFORE], spot.speeds[DURING]) for spot in spots
        ),
        "most bearable slowdown": round(max(spot.bearable for spot in spots), 3),
    }


def auto_shares(spots: list[Spot]) -> dict[str, float]:
    """Return how near auto comes to the best way."""
    values = [spot.slowed[AUTO] / max(spot.others, spot.slowed[DURING]) for spot in spots]
    mean = sum(values) / len(values)
    spread = {"least": round(min(values), 3), "mean": round(mean, 3), "most": round(max(values), 3)}
    return spread | {"below 0.98": sum(value < 0.98 for value in values)}


_CELL_W, _CELL_H, _LEFT, _TOP, _GAP = 44, 34, 64, 78, 26
# From which value on, in which colour, and what the key says.
_SHADES = (
    (1.3, "#e6550d", "overlap also at 1.3"),
    (1.15, "#fdae6b", "also at 1.15"),
    (1.0, "#fee6ce", "overlap, if lanes cost less than 1.15"),
)
_OTHERS = {BEFORE: ("#9ecae1", "before the step wins anyway"), PLAIN: ("#d0d0d0", "plain wins anyway")}


def shade(value: float, *, plain: bool) -> tuple[str, str]:
    """Colour and words where overlap is `value` times as fast, on free lanes, as the best of the others."""
    found = next(((colour, words) for least, colour, words in _SHADES if value > least), None)
    return found or _OTHERS[PLAIN if plain else BEFORE]


def picture(title: str, spots: Sequence[Spot]) -> str:
    """A map for each load: acceptance across, the drafter's cost upwards. Readable on light and on dark ground."""
    across = sorted({spot.acceptance for spot in spots})
    upwards = sorted({spot.draft_cost for spot in spots}, reverse=True)
    loads = list(dict.fromkeys(spot.load for spot in spots))
    panel_w, panel_h = _CELL_W * len(across), _CELL_H * len(upwards)
    width, height = _LEFT + len(loads) * (panel_w + _GAP), _TOP + panel_h + 96
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="12" text-anchor="middle">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(width / 2, 24, title, size=15),
    ]
    used: dict[str, str] = {}
    for spot in spots:
        x = _LEFT + loads.index(spot.load) * (panel_w + _GAP) + _CELL_W * across.index(spot.acceptance)
        y = _TOP + _CELL_H * upwards.index(spot.draft_cost)
        colour, words = shade(spot.bearable, plain=spot.speeds[PLAIN] >= spot.speeds[BEFORE])
        used[colour] = words
        parts.append(f'<rect x="{x}" y="{y}" width="{_CELL_W - 1.5}" height="{_CELL_H - 1.5}" fill="{colour}"/>')
        parts.append(_text(x + _CELL_W / 2, y + _CELL_H / 2 + 4, f"{spot.bearable:.2f}"))
    for number, load in enumerate(loads):
        left = _LEFT + number * (panel_w + _GAP)
        parts.append(
            _text(left + panel_w / 2, _TOP - 12, "1 request" if load == 1 else f"{load} requests", size=13)
        )
        parts += [_text(left + _CELL_W * (i + 0.5), _TOP + panel_h + 17, f"{a:g}") for i, a in enumerate(across)]
    parts += [_text(_LEFT - 20, _TOP + _CELL_H * (i + 0.5) + 4, f"{cost:g}") for i, cost in enumerate(upwards)]
    upright = _text(18, _TOP + panel_h / 2, "pass of the drafter over a step")
    parts.append(f'<g transform="rotate(-90 18 {_TOP + panel_h / 2})">{upright}</g>')
    parts.append(_text(width / 2, _TOP + panel_h + 38, "acceptance of a drafted token"))
    begin: float = (width - sum(42 + 6.4 * len(words) for words in used.values())) / 2
    for colour, words in used.items():
        parts.append(f'<rect x="{begin:.1f}" y="{height - 37}" width="14" height="14" fill="{colour}"/>')
        parts.append(_text(begin + 20, height - 26, words, anchor="start"))
        begin += 42 + 6.4 * len(words)
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "middle") -> str:
    look = f'font-size="{size}" text-anchor="{anchor}" fill="#24292f"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'


if __name__ == "__main__":
    main()
