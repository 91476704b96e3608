"""Rows are medians over repeats, ratios are of the same repeat. Oracle: numpy."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.ablation.report import RATIOS, Run, rows_of, sorted_runs
from benchmarks.simulator.contest import Figures, summarise
from benchmarks.simulator.simulation import Outcome, Served
from faser.types import Slo

RATES = {"off": [10.0, 20.0, 30.0], "fixed:3": [20.0, 10.0, 60.0], "+lengths": [30.0, 30.0, 30.0]}
RNG = np.random.default_rng(4)


def served(count: int) -> list[Served]:
    found = []
    for number in range(count):
        arrival_s, wait_s, answer_s = RNG.random(3) * (10, 2, 5)
        found.append(
            Served(
                number=number,
                arrival_s=arrival_s,
                prompt_len=3,
                first_s=arrival_s + wait_s,
                finished_s=arrival_s + wait_s + answer_s,
                num_tokens=int(RNG.integers(1, 40)),
            )
        )
    return found


def cell_of(tokens_per_s: float, **counts: int) -> Figures:
    outcome = Outcome(served=served(50), window_tokens=round(100 * tokens_per_s), elapsed_s=100.0)
    for name, count in counts.items():
        setattr(outcome, name, count)
    return summarise(outcome, "any", 1.0, duration_s=100.0, slo=Slo(tpot_ms=150.0))


def run_of(arm: str, repeat: int, cell: Figures, *, load: float = 1.0, ahead: int = 0) -> Run:
    return Run(
        arm=arm,
        repeat=repeat,
        load=load,
        cell=cell,
        ahead_steps=ahead,
        different=repeat,
        pace=1.0,
        latencies_s=(),
        tpots_s=(),
    )


def runs() -> list[Run]:
    return [
        run_of(arm, repeat, cell_of(rates[repeat]))
        for repeat in range(3)
        for arm, rates in reversed(RATES.items())
    ]


def test_times_of_a_run_are_numpys_mean_and_percentiles() -> None:
    each = served(77)
    cell = summarise(Outcome(served=each), "off", 1.0, duration_s=10.0, slo=Slo(tpot_ms=150.0))
    latencies = np.array([one.finished_s - one.arrival_s for one in each])
    tpots = np.array([(one.finished_s - one.first_s) / (one.num_tokens - 1) for one in each if one.num_tokens > 1])
    assert cell.e2e.mean_ms == pytest.approx(1000 * latencies.mean())
    assert cell.e2e.p99_ms == pytest.approx(1000 * np.percentile(latencies, 99))
    assert cell.tpot.p99_ms == pytest.approx(1000 * np.percentile(tpots, 99))
    met = np.array(
        [one.num_tokens == 1 or (one.finished_s - one.first_s) / (one.num_tokens - 1) <= 0.15 for one in each]
    )
    assert cell.slo_share == pytest.approx(met.mean())


def test_rows_are_medians_over_repeats_in_the_order_of_the_arms() -> None:
    given = runs()
    rows = rows_of(sorted_runs(given, [*RATES]), base="fixed:3")
    assert [row.arm for row in rows] == [*RATES]
    for row in rows:
        cells = [run.cell for run in given if run.arm == row.arm]
        assert row.repeats == 3
        assert row.num_requests == 150
        assert row.tokens_per_s.median == np.median([cell.tokens_per_s for cell in cells])
        assert (row.tokens_per_s.low, row.tokens_per_s.high) == (min(RATES[row.arm]), max(RATES[row.arm]))
        assert row.ttft.p99_ms == np.median([cell.ttft.p99_ms for cell in cells])
        assert row.e2e.mean_ms == np.median([cell.e2e.mean_ms for cell in cells])
        assert row.tpot.mean_ms == np.median([cell.tpot.mean_ms for cell in cells])
        assert row.slo_share == np.median([cell.slo_share for cell in cells if cell.slo_share is not None])
        assert row.different == 3


def test_arms_are_held_against_the_base_in_the_same_repeat() -> None:
    given = runs()
    rows = {row.arm: row for row in rows_of(given, base="fixed:3")}
    lengths = rows["+lengths"]
    assert lengths.throughput is not None
    assert lengths.latency is not None
    assert lengths.throughput.median == 1.5  # of 1.5, 3 and 0.5; the ratio of medians is 1.5 by chance only
    assert (lengths.throughput.low, lengths.throughput.high) == (0.5, 3.0)
    mean_ms = {(run.arm, run.repeat): run.cell.e2e.mean_ms for run in given}
    shorter = [mean_ms["fixed:3", repeat] / mean_ms["+lengths", repeat] for repeat in range(3)]
    assert lengths.latency.median == pytest.approx(np.median(shorter))
    off = rows["off"]
    assert off.throughput is not None
    assert off.throughput.median == 0.5  # of 0.5, 2 and 0.5; the medians of both are 20


def test_without_the_base_there_is_nothing_to_be_held_against() -> None:
    (row,) = rows_of([run_of("off", 0, cell_of(3.0))], base="fixed:3")
    assert row.throughput is None
    assert row.latency is None


def test_loads_are_rows_of_their_own_with_a_base_of_their_own() -> None:
    given = [
        run_of(arm, 0, cell_of(rate), load=load)
        for load, arm, rate in (
            (2.0, "fixed:3", 40.0),
            (2.0, "off", 10.0),
            (1.0, "fixed:3", 10.0),
            (1.0, "off", 10.0),
        )
    ]
    rows = rows_of(sorted_runs(given, ["off", "fixed:3"]), base="fixed:3")
    assert [(row.load, row.arm) for row in rows] == [
        (1.0, "off"),
        (1.0, "fixed:3"),
        (2.0, "off"),
        (2.0, "fixed:3"),
    ]
    assert [row.throughput.median for row in rows if row.throughput] == [1.0, 1.0, 0.25, 1.0]


def test_shares_weigh_repeats_by_what_happened_in_them() -> None:
    given = [
        run_of("+overlap", 0, cell_of(1.0, verified=100, accepted=50, num_steps=10), ahead=10),
        run_of("+overlap", 1, cell_of(1.0, verified=300, accepted=60, num_steps=30), ahead=0),
    ]
    (row,) = rows_of(given, base="fixed:3")
    assert (row.accepted_share, row.ahead_share) == (110 / 400, 10 / 40)


def test_an_arm_is_as_many_times_as_good_as_the_base_as_it_is_faster_or_has_more() -> None:
    fast = [cell_of(rate) for rate in (10.0, 30.0, 20.0)]
    slow = [
        replace(
            cell,
            tokens_per_s=cell.tokens_per_s / 2,
            e2e=replace(cell.e2e, mean_ms=3 * cell.e2e.mean_ms, p99_ms=4 * cell.e2e.p99_ms),
            ttft=replace(cell.ttft, mean_ms=5 * cell.ttft.mean_ms, p99_ms=6 * cell.ttft.p99_ms),
            tpot=replace(cell.tpot, mean_ms=7 * cell.tpot.mean_ms, p99_ms=8 * cell.tpot.p99_ms),
            slo_share=(cell.slo_share or 0) - 0.25,
        )
        for cell in fast
    ]
    given = [run_of("default", repeat, cell) for repeat, cell in enumerate(fast)]
    off, default = rows_of([run_of("off", repeat, cell) for repeat, cell in enumerate(slow)] + given, base="off")

    assert {name: found.mean for name, found in default.against_base.items()} == pytest.approx(
        dict(zip(RATIOS, (2, 3, 4, 5, 6, 7, 8), strict=True))
    )
    assert all(found.low == pytest.approx(found.high) for found in default.against_base.values())
    assert default.slo_gain is not None
    assert default.slo_gain.mean == pytest.approx(0.25)
    assert (off.against_base, off.slo_gain) == ({}, None)
