"""The report says what the runs say: medians, speed-ups, the best fixed γ, where it stops paying, changes."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from faser.bench.campaign import Run
from faser.bench.chart import Chart
from faser.bench.plots import pictures
from faser.bench.report import Summary, markdown, summaries
from faser.bench.rivals import against_rivals
from faser.bench.runner import StepPoint

ABOUT = {"command": "faser bench spec", "machine": {"cpu": "one"}, "conditions": {"model": "fake"}}


def run_of(policy: str, tokens_per_s: float, *, concurrency: int = 1, round_: int = 0, mismatches: int = 0) -> Run:
    drafts = policy != "off"
    return Run(
        policy=policy,
        concurrency=concurrency,
        temperature=0.0,
        round=round_,
        num_jobs=4,
        num_tokens=100,
        wall_s=100 / tokens_per_s,
        window_tokens=100,
        window_s=100 / tokens_per_s,
        num_steps=50,
        gamma_mean=2.0 if drafts else 0.0,
        drafted=60 if drafts else 0,
        verified=50 if drafts else 0,
        accepted=40 if drafts else 0,
        survivals=(0.9, 0.7, None) if drafts else (None, None, None),
        decide_s=0.01,
        mismatches=mismatches,
        points=tuple(
            StepPoint(at_s=0.1 * i, gamma=2.0, predicted_s=0.011, measured_s=0.010 + 0.001 * i) for i in range(3)
        ),
    )


RUNS = [
    run_of(policy, rate * factor, concurrency=concurrency, round_=round_)
    for concurrency, rates in (
        (1, {"off": 10.0, "fixed:3": 15.0, "faser": 18.0}),
        (8, {"off": 40.0, "fixed:3": 30.0, "faser": 42.0}),
    )
    for round_, factor in enumerate((1.0, 0.5, 1.2))
    for policy, rate in rates.items()
]


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


def test_the_report_says_where_a_policy_stops_paying() -> None:
    text = markdown(ABOUT, summaries(RUNS), against_rivals(RUNS, "faser"), [])
    assert "- fixed:3: slower than `off` at 8 at a time" in text
    assert "- faser: never slower than `off`" in text
    assert "best in the other rounds, by requests at a time: 1: 1.200 (1.20 … 1.20), 8: 1.050" in text


def test_the_report_is_loud_about_changed_answers() -> None:
    assert "All 72 answers are token for token" in markdown(
        ABOUT, summaries(RUNS), against_rivals(RUNS, "faser"), []
    )
    text = markdown(ABOUT, summaries([*RUNS, run_of("faser", 9.0, round_=3, mismatches=2)]), [], [])
    assert "**ANSWERS DIFFER FROM THOSE WITHOUT SPECULATION:**" in text
    assert "- T=0, 1 at a time, faser: 2 of 16" in text


def test_every_picture_is_svg_and_names_its_policies() -> None:
    drawn = pictures(RUNS, summaries(RUNS))
    assert list(drawn) == ["speed_up_t0.svg", "acceptance_t0.svg", "gamma_t0.svg", "step_time.svg"]
    for text in drawn.values():
        ET.fromstring(text)
    texts = [element.text for element in ET.fromstring(drawn["speed_up_t0.svg"]).iter() if element.text]
    assert {"off", "fixed:3", "faser"} <= set(texts)


def test_a_picture_without_anything_to_show_is_left_out() -> None:
    plain = [replace(run_of("off", 5.0), points=())]
    assert list(pictures(plain, summaries(plain))) == ["speed_up_t0.svg"]


def test_a_chart_puts_points_where_their_numbers_say() -> None:
    chart = Chart(title="a", x_label="x", y_label="y", low=1, high=16, top=2.0, doubling=True)
    chart.line("<b>", [(1, 0.0), (4, 1.0), (16, 2.0)], marks=False)
    paths = [each.get("d") for each in ET.fromstring(chart.svg()).iter() if each.get("stroke-width") == "2"]
    assert paths[0] == "M64.0 370.0L317.0 205.0L570.0 40.0"


@pytest.mark.parametrize(
    "top, labels",
    [
        (1.82, ["0", "0.5", "1", "1.5"]),
        (1660.0, ["0", "500", "1000", "1500"]),
        (1.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
    ],
)
def test_a_scale_is_marked_with_round_numbers(top: float, labels: list[str]) -> None:
    drawn = ET.fromstring(Chart(title="a", x_label="x", y_label="y", low=0, high=1, top=top).svg())
    assert [each.text for each in drawn.iter() if each.get("text-anchor") == "end"] == labels
