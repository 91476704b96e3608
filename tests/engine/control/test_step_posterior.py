"""The posterior of draft rows' price and of the host's work, where both are known.

Planted bugs that these tests have caught: a prior so firm that rows of a fortieth of a step cost what the table
says for ever; levels that share nothing; levels that share everything; an earlier run that counts as much as it
did; gaps of plain steps that count as those of drafts.
"""

import json

import numpy as np
import pytest

from faser.engine.control.step_posterior import DRAFTED, KEPT, PLAIN, StepPosterior

BASE_S, ROW_S = 0.010, 0.0004


def learn(
    found: StepPosterior,
    dearer: float,
    *,
    sequences: int = 4,
    slower: float = 1.0,
    noise: float = 0.0,
    steps: int = 200,
    seed: int = 0,
) -> StepPosterior:
    """Steps of 0 to 12 draft rows, every other one of them without any."""
    random = np.random.default_rng(seed)
    for step in range(steps):
        rows_s = ROW_S * int(random.integers(1, 13)) * (step % 2)
        device_s = slower * (BASE_S + dearer * rows_s) * float(random.lognormal(0.0, noise))
        found.observe_rows(sequences, BASE_S, rows_s, device_s)
    return found


@pytest.mark.parametrize("slower", [1.0, 2.5])
@pytest.mark.parametrize("dearer", [0.8, 1.0, 1.5, 2.5])
def test_rows_that_are_dearer_than_their_table_are_found(dearer: float, slower: float) -> None:
    for noise, off in ((0.0, 0.15), (0.05, 0.25)):
        found = learn(StepPosterior(), dearer, slower=slower, noise=noise)
        assert found.row_factor(4) == pytest.approx(dearer, rel=off)


def test_the_estimate_is_that_of_weighted_least_squares() -> None:
    """Oracle: numpy's solver over the steps of a level, those of all levels, and the prior, with their weights."""
    random, found = np.random.default_rng(1), StepPosterior()
    lines, times, levels = [], [], []
    for _ in range(60):
        rows_s, sequences = ROW_S * int(random.integers(0, 9)), int(random.choice([1, 4]))
        device_s = (BASE_S + 1.4 * rows_s) * float(random.lognormal(0.0, 0.1))
        found.observe_rows(sequences, BASE_S, rows_s, device_s)
        whole_s = BASE_S + rows_s
        lines.append((BASE_S / whole_s, rows_s / whole_s))
        times.append(device_s / whole_s)
        levels.append(sequences)
    last = levels[-1]
    own = np.array([each == last for each in levels])
    age = np.arange(len(levels))[::-1]
    own_age = np.cumsum(own[::-1])[::-1] - 1
    weights = np.sqrt(own * 0.99**own_age + 0.1 * 0.99**age)
    system = np.vstack([np.array(lines) * weights[:, None], [[0.1, -0.1]]])
    (base, rows), *_ = np.linalg.lstsq(system, np.append(np.array(times) * weights, 0.0), rcond=None)
    assert found.row_factor(last) == pytest.approx(rows / base, rel=1e-9)


def test_rows_that_are_a_small_part_of_the_step_are_found_dear_too() -> None:
    found = StepPosterior()
    for step in range(200):
        rows_s = 0.02 * BASE_S * (step % 2)
        found.observe_rows(1, BASE_S, rows_s, BASE_S + 3 * rows_s)
    assert found.row_factor(1) > 1.7


def test_steps_without_draft_rows_say_nothing_about_them() -> None:
    found = StepPosterior()
    for _ in range(100):
        found.observe_rows(1, BASE_S, 0.0, 3 * BASE_S)
    assert found.row_factor(1) == pytest.approx(1.0, abs=0.01)


def test_one_odd_step_is_no_new_machine() -> None:
    found = learn(StepPosterior(), 1.0)
    found.observe_rows(4, BASE_S, 12 * ROW_S, 100 * BASE_S)
    assert found.row_factor(4) < 2.0


def test_a_level_without_steps_begins_with_what_the_others_know() -> None:
    """A ramp: each level after the first needs a few steps, not a hundred."""
    known = learn(StepPosterior(), 2.0, sequences=1)
    assert known.row_factor(16) == pytest.approx(2.0, rel=0.1)
    learn(known, 2.0, sequences=16, steps=6)
    fresh = learn(StepPosterior(), 2.0, sequences=16, steps=6)
    assert abs(known.row_factor(16) - 2.0) < 0.5 * abs(fresh.row_factor(16) - 2.0)


def test_levels_whose_rows_cost_otherwise_keep_apart() -> None:
    found = StepPosterior()
    for turn in range(20):
        learn(found, 0.9, sequences=1, steps=20, seed=turn)
        learn(found, 2.0, sequences=16, steps=20, seed=turn)
    assert found.row_factor(1) == pytest.approx(0.9, rel=0.2)
    assert found.row_factor(16) == pytest.approx(2.0, rel=0.2)


def gaps(found: StepPosterior, drafting_s: float, plain_s: float, *, count: int = 1, steps: int = 150) -> None:
    for _ in range(steps):
        found.observe_gap(count, drafting_s, KEPT)
        found.observe_gap(count, plain_s, PLAIN)


@pytest.mark.parametrize(("count", "milliseconds"), [(1, 2.25), (8, 2.79), (32, 2.57)])
def test_before_any_measurement_gaps_are_those_of_the_benchmark(count: int, milliseconds: float) -> None:
    """Oracle: cycles, passes and steps in benchmarks/results/h200, as docs/gpu.md has them."""
    found = StepPosterior(schedules_async=True)
    assert 1000 * found.host_s(count) == pytest.approx(milliseconds, rel=0.12)


def test_without_asynchronous_scheduling_nothing_is_charged_before_both_kinds_are_measured() -> None:
    found = StepPosterior()
    assert found.host_s(64) == 0.0
    found.observe_gap(1, 0.0015, KEPT)
    assert found.host_s(64) == 0.0
    found.observe_gap(1, 0.0010, PLAIN)
    assert found.host_s(1) == pytest.approx(0.0005)


def test_rows_are_charged_with_what_they_add_on_the_host_once_drafts_are_there() -> None:
    found = StepPosterior(schedules_async=True)
    assert found.kept_s(1) == 0.0
    for _ in range(150):
        found.observe_gap(1, 0.0002, PLAIN)
        found.observe_gap(1, 0.0005, DRAFTED)
        found.observe_gap(1, 0.0009, KEPT)
    assert found.kept_s(1) == pytest.approx(0.0004, rel=0.05)
    assert found.host_s(1) == pytest.approx(0.0007, rel=0.05)


def test_rows_that_only_seemed_dear_on_the_host_are_tried_again() -> None:
    """One slow step, and from then on no row is kept that could show it was an accident."""
    found = StepPosterior()
    found.observe_gap(1, 0.0005, DRAFTED)
    found.observe_gap(1, 0.0030, KEPT)
    dear_s = found.kept_s(1)
    for _ in range(1000):
        found.observe_gap(1, 0.0005, DRAFTED)
    assert dear_s > 0.002
    assert found.kept_s(1) < 0.0005


def test_gaps_follow_what_is_measured() -> None:
    found = StepPosterior(schedules_async=True)
    gaps(found, 0.003, 0.001)
    assert found.host_s(1) == pytest.approx(0.002, rel=0.01)
    gaps(found, 0.001, 0.002)
    assert found.host_s(1) == 0.0


def test_the_usual_gap_counts_as_four_measured_ones() -> None:
    found = StepPosterior(schedules_async=True)
    usual_s = found.host_s(1)
    gaps(found, 2 * usual_s, 0.0, steps=4)
    assert found.host_s(1) == pytest.approx(1.5 * usual_s)
    gaps(found, 2 * usual_s, 0.0, steps=12)
    assert found.host_s(1) == pytest.approx(1.8 * usual_s)


def test_what_is_measured_at_one_load_counts_at_another() -> None:
    found = StepPosterior(schedules_async=True)
    usual_s = [found.host_s(count) for count in (1, 64)]
    gaps(found, 2 * usual_s[0], 0.0)
    assert found.host_s(64) == pytest.approx(2 * usual_s[1], rel=0.01)


def test_one_long_pause_hardly_counts() -> None:
    found = StepPosterior(schedules_async=True)
    usual_s = found.host_s(1)
    gaps(found, usual_s, 0.0)
    found.observe_gap(1, 10.0, KEPT)
    assert found.host_s(1) < 1.2 * usual_s


def test_what_a_run_saves_another_one_begins_with_and_soon_corrects() -> None:
    before = learn(StepPosterior(), 2.0, sequences=16)
    gaps(before, 0.003, 0.001)
    after = StepPosterior()
    after.restore(json.loads(json.dumps(before.saved())))
    assert after.row_factor(16) == pytest.approx(before.row_factor(16), rel=0.05)
    assert after.row_factor(2) == pytest.approx(2.0, rel=0.2)
    assert after.host_s(1) == pytest.approx(0.002, rel=0.01)
    learn(after, 1.0, sequences=16, steps=150)
    gaps(after, 0.001, 0.001, steps=30)
    assert after.row_factor(16) == pytest.approx(1.0, rel=0.1)
    assert after.host_s(1) < 0.0004


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [1.0, 2.0]},
        {"rows": [1.0, -1.0, 0.0, 0.0, 0.0]},
        {"rows": [float("nan")] * 5},
        {"rows": [1e308] * 5},
        {"levels": {"three": [0.0] * 5}},
        {"gaps": [(1.0, 4)] * 2},
        {"gaps": [("x", 4), (1.0, 4), (1.0, 4)]},
        {"gaps": [(float("inf"), 4), (1.0, 4), (1.0, 4)]},
    ],
)
def test_what_is_damaged_is_refused_and_changes_nothing(change: dict[str, object]) -> None:
    found = learn(StepPosterior(), 2.0)
    before = found.row_factor(4), found.host_s(1)
    with pytest.raises((ValueError, KeyError, TypeError)):
        found.restore({**found.saved(), **change})
    assert (found.row_factor(4), found.host_s(1)) == before
