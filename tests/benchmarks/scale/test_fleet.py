"""The fleet on paper: against the real scheduler, by counting, and where the answer is plain."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.scale.fleet.check import scheduled
from benchmarks.scale.fleet.replicas import PrefixCache, ReplicaModel
from benchmarks.scale.fleet.routers import RULES, Router, Routing
from benchmarks.scale.fleet.simulation import Outcome, Rollout, Scenario, Simulation
from benchmarks.scale.fleet.workload import BEGINNING_TOKENS, FleetRequest, fleet_requests
from faser.engine.contract.step_times import CostTable

MODEL = ReplicaModel(
    costs=CostTable.measured({1: 0.005, 32: 0.0065, 256: 0.018}), max_num_seqs=32, cache_tokens=200_000
)
# Some bursts: as uneven as the recorded trace, but made up.
TRACE = [
    (0.7 * number + (number % 7) * 0.4, 50 + 97 * number % 1500, 20 + 31 * number % 300) for number in range(400)
]
TRACE.sort()


def run(requests: Sequence[FleetRequest], rule: str = "counted", **given: object) -> Outcome:
    scenario = Scenario(replicas=8, model=MODEL, routing=Routing(rule=rule), seconds=20)
    return Simulation(replace(scenario, **given)).run(requests)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [2.0, 6.0])
def test_a_replica_takes_as_long_as_the_real_scheduler(rate: float) -> None:
    """Oracle: the scheduler that serves, on a simulated clock with the same step times."""
    alone = replace(MODEL, cache_tokens=0)
    requests = fleet_requests(TRACE, rate=rate, seconds=30, seed=0)
    fleet = run(requests, replicas=1, model=alone)
    first_s, total_s = scheduled(requests, alone)
    assert len(fleet.total_s) == len(total_s) == len(requests)
    assert statistics.fmean(fleet.first_s) == pytest.approx(statistics.fmean(first_s), rel=0.2, abs=0.02)
    assert statistics.fmean(fleet.total_s) == pytest.approx(statistics.fmean(total_s), rel=0.1)


def test_the_workload_has_its_rate_and_the_lengths_of_the_trace() -> None:
    requests = fleet_requests(TRACE, rate=40, seconds=50, seed=3)
    assert len(requests) == pytest.approx(40 * 50, rel=0.1)
    assert {each[1:3] for each in TRACE} >= {each[1:3] for each in requests}
    assert [each.at_s for each in requests] == sorted(each.at_s for each in requests)
    first = {each.session: each for each in reversed(requests)}
    assert all(each.shared_tokens == 0 for each in first.values())
    for each in requests:
        assert 0 <= each.shared_tokens < each.prompt_tokens


@pytest.mark.parametrize("rule", RULES)
def test_every_request_is_answered_once_also_beside_failures_and_a_rollout(rule: str) -> None:
    requests = fleet_requests(TRACE, rate=60, seconds=20, seed=0)
    plain = run(requests, rule)
    assert len(plain.total_s) == len(requests)
    assert plain.broken == plain.moved == 0
    hurt = run(requests, rule, failures=(3.0, 5.0, 8.0), load_s=4.0, rollout=Rollout(at_once=2, load_s=2.0))
    assert hurt.broken > 0
    assert len(hurt.total_s) + hurt.broken == len(requests)
    assert hurt.unserved == 0
    assert hurt.rolled_s is not None
    # Four pairs, each of which loads for 2 s, after at most 25 s for its requests.
    assert 4 * 2 <= hurt.rolled_s <= 4 * (2 + 25)


def test_requests_that_find_no_replica_are_counted() -> None:
    requests = fleet_requests(TRACE, rate=20, seconds=20, seed=0)
    found = run(requests, replicas=2, rollout=Rollout(at_once=2, load_s=5.0, begins_s=2.0))
    assert found.unserved > 0
    assert len(found.total_s) + found.broken + found.unserved == len(requests)


def test_a_rollout_that_lets_answers_end_breaks_none() -> None:
    requests = fleet_requests(TRACE, rate=20, seconds=20, seed=0)
    found = run(requests, routing=Routing(rule="in turn", report_s=1.0), rollout=Rollout(at_once=1, load_s=1.0))
    assert found.broken == found.moved == 0
    assert len(found.total_s) == len(requests)
    assert found.refused > 0


def test_sessions_find_their_cache_where_the_router_knows_it() -> None:
    requests = fleet_requests(TRACE, rate=30, seconds=40, seed=0)
    most = sum(max(each.shared_tokens, min(BEGINNING_TOKENS, each.prompt_tokens - 1)) for each in requests) / sum(
        each.prompt_tokens for each in requests
    )
    shares = {}
    for name, routing in {
        "in turn": Routing(rule="in turn"),
        "sent": Routing(),
        "events": Routing(events_s=0.0),
        "events too late": Routing(events_s=100.0),
        "counted": Routing(rule="counted"),
    }.items():
        found = run(requests, routing=routing, seconds=40)
        shares[name] = found.reused_tokens / found.prompt_tokens
    assert shares["in turn"] < shares["events"] <= shares["sent"] + 0.02 < most + 0.02
    assert shares["sent"] > 0.7 * most
    assert shares["events too late"] == pytest.approx(shares["counted"], abs=0.03)


def test_late_reports_herd_requests_unless_a_router_counts_its_own() -> None:
    requests = fleet_requests(TRACE, rate=60, seconds=20, seed=0)

    def busiest(rule: str, report_s: float) -> float:
        found = run(requests, routing=Routing(rule=rule, report_s=report_s))
        return statistics.fmean(found.fullest) / statistics.fmean(found.mean)

    assert busiest("least", 0.01) < 2 < busiest("least", 2.0)
    assert busiest("counted", 2.0) < 2


def test_a_router_asks_for_the_least_busy_unless_a_cache_is_worth_it() -> None:
    """The rule of faser/engine/client/replicas.py: four requests and a quarter more, and not one beyond."""
    request = FleetRequest(0.0, 100, 10, session=1, beginning=0, shared_tokens=64)
    router = Router(Routing(), 2, seed=0)
    router.sent(request, 0)
    router.report(np.array([9, 4]), np.array([True, True]))
    assert router.choose(request, 0.0) == 0
    router.report(np.array([10, 4]), np.array([True, True]))
    assert router.choose(request, 0.0) == 1
    router.report(np.array([5, 4]), np.array([False, True]))
    assert router.choose(request, 0.0) == 1


def test_a_cache_forgets_what_was_used_longest_ago() -> None:
    cache = PrefixCache(2 * (BEGINNING_TOKENS + 110))
    asked = [FleetRequest(0.0, 100, 10, session=number, beginning=number, shared_tokens=0) for number in range(3)]
    assert [list(cache.keep(each)) for each in asked[:2]] == [[(-1, True), (0, True)], [(-2, True), (1, True)]]
    later = asked[0]._replace(prompt_tokens=200, shared_tokens=110)
    assert cache.reusable(later) == 192  # of its beginning, which is longer; whole blocks
    list(cache.keep(asked[2]))
    assert [key in cache for key in (0, 1, 2, -1, -2, -3)] == [True, False, True, True, False, True]
