"""The map of drafting ahead: simulation and closed forms agree, and the picture shows what was found."""

import json
import xml.etree.ElementTree as ET

import pytest

from benchmarks.speculation import overlap_map
from benchmarks.speculation.overlap_map import AUTO, BEFORE, BESIDE, PLAIN, Cell, Check, Panel, chart, shade

TURNS = 1500


def cell(beside: float, before: float, *, load: int = 1, auto: float = 100.0) -> Cell:
    return Cell(
        load=load,
        acceptance=0.9,
        draft_cost=0.18,
        speeds={PLAIN: 80.0, BEFORE: before, BESIDE: beside},
        slowed={BESIDE: beside / 1.15, AUTO: auto},
        closed={PLAIN: 80.0, BEFORE: before, BESIDE: beside},
    )


@pytest.mark.parametrize(("acceptance", "length"), [(0.5, 3), (0.9, 4)])
def test_a_fixed_length_comes_to_the_closed_form_before_and_beside(acceptance: float, length: int) -> None:
    """Mistakes in the share of ready cycles, or in the tokens of a cycle, are three times as large at least."""
    held = list(overlap_map.checks("8b", acceptances=(acceptance,), lengths=(length,), turns=TURNS))
    assert [each.way for each in held] == [BEFORE, BESIDE]
    for each in held:
        assert each.simulated == pytest.approx(each.closed, rel=0.03), each


def test_speeds_beside_are_those_of_free_lanes_over_the_slowdown() -> None:
    costs = overlap_map.costs_of("8b", 0.18)
    free, slow = (
        overlap_map.speed(
            overlap_map.contest(costs, 4, 0.8, overlap_map.lanes_of(slowdown), 100), "fixed:3+overlap"
        )
        for slowdown in (1.0, 1.3)
    )
    assert slow * 1.3 == pytest.approx(free, rel=0.03)


def test_a_step_of_8b_takes_a_little_more_with_every_row() -> None:
    costs = overlap_map.costs_of("8b", 0.18)
    assert costs.step_s(65) == pytest.approx(0.0055 + 65 * 0.000027)
    assert costs.pass_s(64) == pytest.approx(0.18 * costs.step_s(1))


def test_a_roofline_target_is_flat_up_to_its_bend() -> None:
    costs = overlap_map.costs_of("8b-roofline", 0.2)
    assert costs.step_s(1) == costs.step_s(204) == pytest.approx(0.0055)
    assert costs.step_s(304) - costs.step_s(204) == pytest.approx(100 * 0.000027, rel=1e-6)
    assert costs.pass_s(8) == pytest.approx(0.2 * 0.0055)


def test_the_bearable_slowdown_is_against_the_best_of_the_others() -> None:
    assert cell(120, 100).bearable == pytest.approx(1.2)
    assert cell(60, 70).bearable == pytest.approx(60 / 80)


def test_the_summary_counts_who_wins_and_names_the_farthest_check() -> None:
    held = [
        Check(way=BEFORE, acceptance=0.5, length=3, simulated=101, closed=100),
        Check(way=BESIDE, acceptance=0.8, length=8, simulated=95, closed=100),
    ]
    cells = [cell(120, 100), cell(140, 100, auto=150.0), cell(90, 100, auto=90.0)]
    told = overlap_map.winners(cells) | overlap_map.accuracy(cells, held, 1.15)
    assert told["cells where beside wins"] == {"at slowdown 1": 2, "at slowdown 1.15": 2, "at slowdown 1.3": 1}
    assert told["fixed lengths: simulated over closed form"] == {
        "points": 2,
        "largest deviation": -0.05,
        "of": "beside, acceptance 0.8, 8 tokens",
    }
    assert told["auto over the best way at 1.15"]["least"] == pytest.approx(0.9)
    assert told["auto over the best way at 1.15"]["below 0.98"] == 2
    assert json.dumps(told)


def test_the_map_by_form_is_the_forms_best() -> None:
    found = overlap_map.by_form("8b", 8, 0.9, 0.18)
    assert found.bearable == pytest.approx(1.33, abs=0.005)
    assert found.speeds[PLAIN] == pytest.approx(8 / (0.0055 + 8 * 0.000027))
    assert found.record()["slowed"] == {}


def test_the_picture_has_every_value_in_its_shade() -> None:
    panel = Panel(title="8 requests", values={(0.5, 0.1): 0.71, (0.9, 0.1): 1.34}, plain={(0.5, 0.1)})
    picture = ET.fromstring(chart("a map & more", [panel]))
    texts = ["".join(each.itertext()) for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"0.71", "1.34", "8 requests", "0.5", "0.9", "0.1", "a map & more"} <= set(texts)
    fills = [each.get("fill") for each in picture.iter("{http://www.w3.org/2000/svg}rect")]
    assert shade(0.71, plain=True).colour in fills
    assert shade(1.34, plain=False).colour in fills


def test_shades_say_who_wins() -> None:
    assert shade(1.31, plain=False) == shade(1.31, plain=True)
    assert shade(0.99, plain=False) != shade(0.99, plain=True)
    colours = {shade(value, plain=False).colour for value in (0.99, 1.1, 1.2, 1.4)}
    assert len(colours) == 4
