"""The report has medians, speed-ups, the best fixed γ, where a policy is slower than off, and changed answers."""

import pytest

from faser.bench.report import Summary, markdown, summaries
from faser.bench.rivals import against_rivals
from tests.bench.recorded_runs import RUNS, run_of

ABOUT = {"command": "faser bench spec", "machine": {"cpu": "one"}, "conditions": {"model": "fake"}}


def found(policy: str, concurrency: int) -> Summary:
    (one,) = [each for each in summaries(RUNS) if (each.policy, each.concurrency) == (policy, concurrency)]
    return one


def test_a_summary_has_the_median_and_the_range_of_its_rounds() -> None:
    one = found("faser", 1)
    assert (one.rounds, one.tokens_per_s, one.slowest, one.fastest) == pytest.approx((3, 18.0, 9.0, 21.6))
    assert one.speed_up == pytest.approx(1.8)
    assert one.acceptance == pytest.approx(0.8)
    assert one.median_step_error == pytest.approx(1 / 12)


def test_a_speed_up_compares_runs_of_one_round_since_a_machine_may_slow_down_between_rounds() -> None:
    runs = [run_of(p, rate, round_=0) for p, rate in (("off", 10.0), ("faser", 15.0))]
    runs += [run_of(p, rate, round_=1) for p, rate in (("off", 2.0), ("faser", 3.0))]
    runs += [run_of("faser", 90.0, round_=2)]
    assert [each.speed_up for each in summaries(runs)] == pytest.approx([1.0, 1.5])


def test_without_a_run_of_off_there_is_no_speed_up() -> None:
    assert [each.speed_up for each in summaries([run_of("faser", 5.0)])] == [None]


def test_the_report_names_the_best_fixed_gamma_and_what_faser_gains_over_it() -> None:
    text = markdown(ABOUT, summaries(RUNS), against_rivals(RUNS, "faser"), ["a.svg"])
    first = next(line for line in text.splitlines() if line.startswith("| 1 |"))
    assert "18.0 (9.0 … 21.6) 1.80x | fixed:3 | +20.0% |" in first
    eighth = next(line for line in text.splitlines() if line.startswith("| 8 |"))
    assert eighth.endswith("| off | +5.0% |")
    assert "![a.svg](a.svg)" in text


def test_the_report_names_the_concurrencies_at_which_a_policy_is_slower_than_off() -> None:
    text = markdown(ABOUT, summaries(RUNS), against_rivals(RUNS, "faser"), [])
    assert "- fixed:3: slower than `off` at 8 at a time" in text
    assert "- faser: never slower than `off`" in text
    assert "best in the other rounds, by requests at a time: 1: 1.200 (1.20 … 1.20), 8: 1.050" in text


def test_the_report_names_changed_answers() -> None:
    assert "All 72 answers are token for token" in markdown(
        ABOUT, summaries(RUNS), against_rivals(RUNS, "faser"), []
    )
    text = markdown(ABOUT, summaries([*RUNS, run_of("faser", 9.0, round_=3, mismatches=2)]), [], [])
    assert "**ANSWERS DIFFER FROM THOSE WITHOUT SPECULATION:**" in text
    assert "- T=0, 1 at a time, faser: 2 of 16" in text
