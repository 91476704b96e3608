"""A simulated fleet: what late news, failures and new versions do to it. costs.py has what its real parts cost.

    python -m benchmarks.scale.fleet TRACE.csv H200.json OUT.json [--rate 10] [--scale 1.0]

TRACE: of Azure. H200: benchmarks/results/h200/plain.json, whose step times the replicas have. rate: requests a
second and replica. scale: multiplies the number of replicas and simulated seconds, to try it. Written: OUT.json
and a picture beside it. Arms:

    check       one replica, against the real scheduler on the simulator's clock: how far off is the fleet?
    herding     how late load is reported, by routing rule
    caches      how late events of caches come, and rules that do not know caches
    size        the same load a replica, from 10 replicas to 1,000
    failures    a replica lost every five seconds
    rollouts    every replica replaced, a share of them at a time
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.runner import about, command_line, write_json
from benchmarks.scale.fleet.check import check
from benchmarks.scale.fleet.replicas import ReplicaModel
from benchmarks.scale.fleet.routers import Routing
from benchmarks.scale.fleet.simulation import Rollout, Scenario, Simulation
from benchmarks.scale.fleet.workload import fleet_requests
from benchmarks.simulator.workload import read_azure
from benchmarks.spec_bench.chart import line_chart
from faser.engine.contract.step_times import CostTable

REPORTS_S = (0.05, 0.2, 1.0, 5.0)
EVENTS_S = (0.0, 0.05, 0.5, 5.0, 30.0)
FLEETS = (10, 100, 1000)
LOAD_S = 30.0
_ROLLED = 20  # replicas
AT_ONCE = (1, 2, 5)
_FAIL_EVERY_S = 5.0


def scenarios(model: ReplicaModel, scale: float) -> dict[str, dict[str, Scenario]]:
    """By arm and name."""

    def of(replicas: int, seconds: float, routing: Routing, **changes: Any) -> Scenario:
        plain = Scenario(
            replicas=max(round(replicas * scale), 2),
            model=model,
            routing=routing,
            seconds=seconds * scale,
            warm_s=seconds * scale / 3,
        )
        return replace(plain, **changes)

    herding = {
        f"{rule}, {report_s:g} s": of(150, 18, Routing(rule=rule, report_s=report_s, routers=4))
        for rule in ("least", "two", "counted", "prefix")
        for report_s in REPORTS_S
    }
    caches = {
        f"events, {events_s:g} s": of(50, 60, Routing(events_s=events_s, report_s=0.2)) for events_s in EVENTS_S
    }
    blind = {rule: of(50, 60, Routing(rule=rule, report_s=0.2)) for rule in ("in turn", "counted", "prefix")}
    size = {
        f"{rule}, {replicas} replicas": of(replicas, 9, Routing(rule=rule, report_s=0.2))
        for rule in ("counted", "prefix")
        for replicas in FLEETS
    }
    every = tuple(_FAIL_EVERY_S * scale * number for number in range(4, 13))
    failures = {
        "none": of(50, 65, Routing(report_s=0.2)),
        "one every 5 s": of(50, 65, Routing(report_s=0.2), failures=every, load_s=LOAD_S * scale),
    }
    rollouts = {
        f"{at_once} of {_ROLLED} at once": of(
            _ROLLED,
            20 + _ROLLED / at_once * (LOAD_S + 6),
            Routing(report_s=0.2),
            warm_s=20 * scale,
            rollout=Rollout(at_once=max(round(at_once * scale), 1), load_s=LOAD_S * scale, begins_s=20 * scale),
        )
        for at_once in AT_ONCE
    }
    return {
        "herding": herding,
        "caches": caches | blind,
        "size": size,
        "failures": failures,
        "rollouts": rollouts,
    }


def step_table(path: Path) -> CostTable:
    """Plain decoding of the target, greedy, by sequences."""
    cells = [cell for cell in json.loads(path.read_text())["result"]["target"] if cell["sampling"] == "greedy"]
    return CostTable.measured({cell["sequences"]: cell["period_ms"]["median"] / 1000 for cell in cells})


def run_all(
    arms: Mapping[str, Mapping[str, Scenario]], trace: Sequence[tuple[float, int, int]], rate: float
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for arm, each in arms.items():
        found[arm] = {}
        for name, scenario in track(each.items(), arm, transient=True):
            requests = fleet_requests(
                trace, rate=rate * scenario.replicas, seconds=scenario.seconds, seed=scenario.seed
            )
            found[arm][name] = {
                "replicas": scenario.replicas,
                "seconds": scenario.seconds,
                **Simulation(scenario).run(requests).report(),
            }
            print(arm, name, found[arm][name], flush=True)
    return found


def pictures(found: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
    herding = {
        rule: [
            (report_s, found["herding"][f"{rule}, {report_s:g} s"]["first token s"]["p99"])
            for report_s in REPORTS_S
        ]
        for rule in ("least", "two", "counted", "prefix")
    }
    return {
        "herding": line_chart(
            "First token, p99, by how late load is reported", "seconds between reports", "seconds", herding
        )
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("h200", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--scale", type=float, default=1.0)
    given: argparse.Namespace = parser.parse_args()
    trace, model = read_azure(given.trace), ReplicaModel(costs=step_table(given.h200))
    checked = check(trace, model, rate=given.rate * 0.6, seconds=60 * given.scale)
    print(checked, flush=True)
    found = run_all(scenarios(model, given.scale), trace, given.rate)
    write_json(
        given.out,
        {
            **about("benchmarks.scale.fleet"),
            "settings": {"rate": given.rate, "scale": given.scale},
            "check": checked,
            **found,
        },
    )
    for name, svg in pictures(found).items():
        if svg is not None:
            given.out.with_name(f"{given.out.stem}-{name}.svg").write_text(svg, "utf-8")


if __name__ == "__main__":
    main()
