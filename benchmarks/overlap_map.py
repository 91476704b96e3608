"""Where plain steps, drafting before them and drafting beside them win: a map, simulated.

    python -m benchmarks.overlap_map OUT_DIR [--slowdown 1.15] [--share 0.25] [--output-tokens 200]

The real scheduler, control and policy on a simulated clock, as `faser bench simulate` has them. The machine is
like a large GPU: a step takes V up to 180 rows and rises from there; a pass of the drafter takes a given part.
Two lanes slow each other down by `slowdown`. Acceptance is the same for every token. For every cell the map shows
the fastest way, and what drafting ahead is worth against the best of the others. For one request the simulated
speeds are held against the closed forms, which know no estimates and no ends of answers.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from html import escape
from itertools import product
from pathlib import Path

from rich.progress import track

from faser.engine.co_run import CoRun
from faser.engine.cost_model import CostModel, CostTable, Role
from faser.sim.contest import Contest
from faser.sim.policy_spec import parse_policy
from faser.sim.simulation import Machine
from faser.sim.synthetic import iid_trace
from faser.sim.workload import Workload

CAP = 8
VERIFY_S = 0.010
ACCEPTANCES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
DRAFT_COSTS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)  # a pass over a step
LOADS = (1, 8, 64)
WAYS = ("off", "faser+serial", "faser+overlap")
AUTO = "faser+auto"
BAR = 0.98
COLOURS = {"off": "#bdbdbd", "faser+serial": "#6baed6", "faser+overlap": "#fd8d3c"}
NAMES = {"off": "plain", "faser+serial": "serial", "faser+overlap": "overlap"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """speeds: tokens a second of every way and of auto. closed: of two by formula, where there is one request."""

    load: int
    acceptance: float
    draft_cost: float
    speeds: dict[str, float]
    closed: dict[str, float] | None

    @property
    def best(self) -> str:
        return max(WAYS, key=lambda way: self.speeds[way])

    @property
    def overlap_gain(self) -> float:
        return self.speeds["faser+overlap"] / max(self.speeds["off"], self.speeds["faser+serial"]) - 1


def costs_of(draft_cost: float) -> CostModel:
    step = CostTable(rows=(1, 180, 360, 1024), seconds=(VERIFY_S, 1.05 * VERIFY_S, 1.9 * VERIFY_S, 5.0 * VERIFY_S))
    pass_s = draft_cost * VERIFY_S
    return CostModel({Role.STEP: step, Role.PASS: CostTable(rows=(1, 256), seconds=(pass_s, 1.1 * pass_s))})


def closed_forms(acceptance: float, draft_cost: float, lanes: CoRun) -> dict[str, float]:
    """Tokens a second of one request at the best length: serial with a bonus token, ahead with a pre-verified row.

    SPECULATION: (1 - a^(m+1)) / (1 - a) over V + m D, and 1 - p + p (1 - a^m) / (1 - a) over both lanes' time,
    p = a / (1 + a - a^m).
    """
    serial, ahead = 1 / VERIFY_S, 0.0
    for m in range(1, CAP + 1):
        draft_s = m * draft_cost * VERIFY_S
        serial = max(serial, (1 - acceptance ** (m + 1)) / (1 - acceptance) / (VERIFY_S + draft_s))
        ready = acceptance / (1 + acceptance - acceptance**m)
        tokens = 1 - ready + ready * (1 - acceptance**m) / (1 - acceptance)
        ahead = max(ahead, tokens / lanes.one(VERIFY_S, draft_s))
    return {"faser+serial": serial, "faser+overlap": ahead}


def measure(load: int, acceptance: float, draft_cost: float, lanes: CoRun, output_tokens: int) -> Cell:
    trace = iid_trace(acceptance, max_tokens=CAP, num_requests=16, prompt_len=8, output_len=output_tokens)
    machine = Machine(
        costs=costs_of(draft_cost),
        lanes=(lanes,),
        max_num_seqs=max(LOADS),
        max_num_batched_tokens=1024,
        step_overhead_s=0.0,
        draft_overhead_s=0.0,
    )
    contest = Contest(
        trace=trace,
        machine=machine,
        workload=Workload(clients=load, in_order=True),
        duration_s=None,
        limit=max(3 * load, 8),
    )
    speeds = {way: contest.run(parse_policy(way, cap=CAP)).tokens_per_s for way in (*WAYS, AUTO)}
    closed = closed_forms(acceptance, draft_cost, lanes) if load == 1 else None
    return Cell(load=load, acceptance=acceptance, draft_cost=draft_cost, speeds=speeds, closed=closed)


def drawn(load: int, cells: list[Cell], about: str) -> str:
    """One map as SVG: acceptance across, the drafter's cost upwards."""
    size, left, top = 78, 90, 64
    width, height = left + size * len(ACCEPTANCES) + 20, top + size * len(DRAFT_COSTS) + 90
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<style>text{font:12px sans-serif;text-anchor:middle;fill:#808080}.in{fill:#202020}</style>",
        _text(width / 2, 22, f"{load} requests at a time: the fastest way, and the gain of drafting ahead"),
        _text(width / 2, 42, about),
    ]
    for cell in cells:
        x = left + size * ACCEPTANCES.index(cell.acceptance)
        y = top + size * (len(DRAFT_COSTS) - 1 - DRAFT_COSTS.index(cell.draft_cost))
        colour = COLOURS[cell.best]
        parts.append(f'<rect x="{x}" y="{y}" width="{size - 2}" height="{size - 2}" fill="{colour}"/>')
        middle = x + size / 2 - 1
        parts.append(_text(middle, y + 30, NAMES[cell.best], inside=True))
        parts.append(_text(middle, y + 50, f"{cell.overlap_gain:+.0%}", inside=True))
    for i, acceptance in enumerate(ACCEPTANCES):
        parts.append(_text(left + size * (i + 0.5), top + size * len(DRAFT_COSTS) + 18, f"{acceptance:g}"))
    for i, draft_cost in enumerate(reversed(DRAFT_COSTS)):
        parts.append(_text(left - 26, top + size * (i + 0.5), f"{draft_cost:g}"))
    parts.append(_text(width / 2, height - 40, "acceptance of a drafted token"))
    parts.append(
        f'<g transform="rotate(-90 22 {height / 2})">{_text(22, height / 2, "pass of the drafter / step")}</g>'
    )
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, *, inside: bool = False) -> str:
    look = ' class="in"' if inside else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{look}>{escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for map.json and a picture for each load")
    parser.add_argument("--slowdown", type=float, default=1.15, help="of either lane beside the other [1.15]")
    parser.add_argument("--share", type=float, default=0.25, help="of the draft lane; a name, no more [0.25]")
    parser.add_argument("--output-tokens", type=int, default=200)
    given = parser.parse_args()
    lanes = CoRun(
        share=given.share, verify=given.slowdown, draft=given.slowdown, verify_alone=1.0, draft_alone=1.0
    )
    wanted = list(product(LOADS, ACCEPTANCES, DRAFT_COSTS))
    cells = [measure(*each, lanes, given.output_tokens) for each in track(wanted, "cells")]
    given.out.mkdir(parents=True, exist_ok=True)
    for load in LOADS:
        of_load = [cell for cell in cells if cell.load == load]
        about = f"simulated; lanes slow each other down {given.slowdown:g} times"
        (given.out / f"map-{load}.svg").write_text(drawn(load, of_load, about), encoding="utf-8")
    result = summary(cells) | {
        "command": f"python -m benchmarks.overlap_map OUT --slowdown {given.slowdown:g}",
        "cells": [asdict(cell) for cell in cells],
    }
    (given.out / "map.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary(cells), indent=2))


def summary(cells: list[Cell]) -> dict[str, object]:
    """How near auto comes to the best way, and simulation to the closed forms."""
    shares = [cell.speeds[AUTO] / cell.speeds[cell.best] for cell in cells]
    errors = {
        way: [cell.speeds[way] / cell.closed[way] - 1 for cell in cells if cell.closed is not None]
        for way in ("faser+serial", "faser+overlap")
    }
    return {
        "auto over the best way": {
            "least": round(min(shares), 4),
            "mean": round(sum(shares) / len(shares), 4),
            f"cells below {BAR}": sum(share < BAR for share in shares),
            "cells": len(shares),
        },
        "simulated over closed form, one request": {
            NAMES[way]: {
                "least": round(min(each) + 1, 3),
                "mean": round(sum(each) / len(each) + 1, 3),
                "most": round(max(each) + 1, 3),
            }
            for way, each in errors.items()
        },
        "cells won": {NAMES[way]: sum(cell.best == way for cell in cells) for way in WAYS},
    }


if __name__ == "__main__":
    main()
