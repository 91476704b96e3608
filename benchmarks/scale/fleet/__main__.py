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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    """Return the scenarios by arm and name."""

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


def run(
    arm: Mapping[str, Scenario], trace: Sequence[tuple[float, int, int]], rate: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every scenario of an arm, by name."""
    for name, scenario in arm.items():
        requests = fleet_requests(
            trace, rate=rate * scenario.replicas, seconds=scenario.seconds, seed=scenario.seed
        )
        outcome = Simulation(scenario).run(requests)
        yield name, {"replicas": scenario.replicas, "seconds": scenario.seconds, **outcome.report()}


def picture(herding: Mapping[str, Any]) -> str | None:
    """Without the rule `least`, which is so much worse that the others would lie on one line."""
    lines = {
        rule: [(report_s, herding[f"{rule}, {report_s:g} s"]["first token s"]["p99"]) for report_s in REPORTS_S]
        for rule in ("two", "counted", "prefix")
    }
    title = "First token, p99, by how late load is reported"
    return line_chart(title, "seconds between reports", "seconds", lines, doubling=True)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("h200", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--scale", type=float, default=1.0)
    given: argparse.Namespace = parser.parse_args()
    trace, model = read_azure(given.trace), ReplicaModel(costs=step_table(given.h200))
    found: dict[str, Any] = {
        **about("benchmarks.scale.fleet"),
        "settings": {"rate": given.rate, "scale": given.scale},
        "check": check(trace, model, rate=given.rate * 0.6, seconds=60 * given.scale),
    }
    print(found["check"], flush=True)
    for arm, wanted in scenarios(model, given.scale).items():
        found[arm] = {}
        for name, report in run(wanted, trace, given.rate):
            found[arm][name] = report
            print(arm, name, report, flush=True)
        write_json(given.out, found)
    if (svg := picture(found["herding"])) is not None:
        given.out.with_name(f"{given.out.stem}-herding.svg").write_text(svg, "utf-8")


if __name__ == "__main__":
    main()
