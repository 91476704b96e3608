"""Rows are medians over repeats, ratios are of the same repeat. Oracle: numpy."""

import numpy as np
import pytest

from benchmarks.ablation.report import Run, rows_of
from benchmarks.simulator.contest import Figures, summarise
from benchmarks.simulator.simulation import Outcome, Served
from faser.types.request import Slo

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
