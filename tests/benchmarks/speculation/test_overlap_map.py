"""The map of overlapped drafting: simulation and closed forms agree, and the picture shows what was found.

Oracle of the closed forms: cycles played out token by token.
"""

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from benchmarks.simulator.co_run import InterferenceTable
from benchmarks.speculation import overlap_map
from benchmarks.speculation.overlap_map import (
    AUTO,
    BEFORE,
    DURING,
    PLAIN,
    Forms,
    Spot,
    picture,
    ready_share,
    shade,
    tokens_before,
    tokens_during,
)
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.step_cost import CostModel

TURNS = 1500
FREE = InterferenceTable.constant(share=0.5, verify=1.0, draft=1.0, verify_alone=1.0, draft_alone=1.0)
COSTS = CostModel(StepTimes.proportional(step_s=0.0055, row_s=0.000027, pass_s=0.001))


def spot(during: float, before: float, *, load: int = 1, acceptance: float = 0.9, auto: float = 100.0) -> Spot:
    return Spot(
        load=load,
        acceptance=acceptance,
        draft_cost=0.18,
        speeds={PLAIN: 80.0, BEFORE: before, DURING: during},
        slowed={DURING: during / 1.15, AUTO: auto},
    )


def run_length(random: np.random.Generator, acceptance: float, most: int) -> int:
    """Drafted tokens in a row that are right."""
    return next((at for at in range(most) if random.random() >= acceptance), most)


def played_during(acceptance: float, length: int, cycles: int) -> tuple[float, float]:
    """Share of cycles with a chunk, and tokens a cycle: a chunk of length - 1 tokens, then the bonus token."""
    random = np.random.default_rng(length)
    ready, with_chunk, tokens = False, 0, 0
    for _ in range(cycles):
        with_chunk += ready
        chunk = length - 1 if ready else 0
        right = run_length(random, acceptance, chunk + 1)
        tokens += min(right, chunk) + 1
        ready = right == chunk + 1
    return with_chunk / cycles, tokens / cycles


@pytest.mark.parametrize(("acceptance", "length"), [(0.5, 2), (0.8, 4), (0.9, 8), (0.3, 1)])
def test_an_overlapped_cycle_brings_what_it_brings_played_out(acceptance: float, length: int) -> None:
    share, tokens = played_during(acceptance, length, 60_000)
    assert ready_share(acceptance, length) == pytest.approx(share, rel=0.02)
    assert tokens_during(acceptance, length) == pytest.approx(tokens, rel=0.015)


@pytest.mark.parametrize(("acceptance", "length"), [(0.5, 2), (0.9, 8), (0.0, 3)])
def test_a_step_after_drafting_brings_what_it_brings_played_out(acceptance: float, length: int) -> None:
    random = np.random.default_rng(length)
    played = [run_length(random, acceptance, length) + 1 for _ in range(30_000)]
    assert tokens_before(acceptance, length) == pytest.approx(sum(played) / len(played), rel=0.015)


def test_what_is_never_right_brings_plain_tokens_and_costs_its_drafts() -> None:
    forms = Forms(costs=COSTS, load=8, acceptance=0.0)
    step_s = 0.0055 + 8 * 0.000027
    assert forms.plain() == pytest.approx(8 / step_s)
    assert forms.before(2) == pytest.approx(8 / (0.0055 + 24 * 0.000027 + 2 * 0.001))
    assert forms.during(2, FREE) == pytest.approx(8 / step_s)


def test_lanes_that_slow_each_other_down_divide_the_speed_during() -> None:
    forms = Forms(costs=COSTS, load=8, acceptance=0.8)
    slow = InterferenceTable.constant(share=0.5, verify=1.3, draft=1.3, verify_alone=1.3, draft_alone=1.3)
    assert forms.during(4, slow) == pytest.approx(forms.during(4, FREE) / 1.3)


def test_the_best_length_is_at_least_as_good_as_any() -> None:
    forms = Forms(costs=COSTS, load=8, acceptance=0.8)
    best = forms.best(8, FREE)
    assert best[PLAIN] == forms.plain()
    assert best[BEFORE] == max(forms.before(length) for length in range(1, 9))
    assert best[DURING] == max(forms.during(length, FREE) for length in range(1, 9))


@pytest.mark.parametrize(("acceptance", "length"), [(0.5, 3), (0.9, 4)])
def test_a_fixed_length_comes_to_the_closed_form_serial_and_overlapped(acceptance: float, length: int) -> None:
    """Mistakes in the share of ready cycles, or in the tokens of a cycle, are three times as large at least."""
    found = list(overlap_map.deviations("8b", acceptances=(acceptance,), lengths=(length,), turns=TURNS))
    assert found == pytest.approx([0.0, 0.0], abs=0.03)


def test_speeds_overlapped_are_those_of_free_lanes_over_the_slowdown() -> None:
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
    assert spot(120, 100).bearable == pytest.approx(1.2)
    assert spot(60, 70).bearable == pytest.approx(60 / 80)


def test_the_summary_counts_who_wins_and_how_near_auto_comes() -> None:
    spots = [spot(120, 100), spot(140, 100, auto=150.0), spot(90, 100, auto=90.0)]
    found = overlap_map.winners(spots)
    assert found["cells where overlap wins"] == {"at slowdown 1": 2, "at slowdown 1.15": 2, "at slowdown 1.3": 1}
    assert overlap_map.auto_shares(spots)["least"] == pytest.approx(0.9)
    assert overlap_map.auto_shares(spots)["below 0.98"] == 2
    assert json.dumps(found)


def test_the_map_by_form_is_the_forms_best() -> None:
    found = overlap_map.by_form("8b", 8, 0.9, 0.18)
    assert found.bearable == pytest.approx(1.33, abs=0.005)
    assert found.speeds[PLAIN] == pytest.approx(8 / (0.0055 + 8 * 0.000027))
    assert found.record()["slowed"] == {}


def test_the_picture_has_every_value_in_its_shade() -> None:
    drawn = ET.fromstring(picture("a map & more", [spot(71, 100, load=8), spot(134, 100, load=8, acceptance=0.5)]))
    texts = ["".join(each.itertext()) for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"0.71", "1.34", "8 requests", "0.5", "0.9", "0.18", "a map & more"} <= set(texts)
    fills = [each.get("fill") for each in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    assert {shade(0.71, plain=False)[0], shade(1.34, plain=False)[0]} <= set(fills)


def test_shades_say_who_wins() -> None:
    assert shade(1.31, plain=False) == shade(1.31, plain=True)
    assert shade(0.99, plain=False) != shade(0.99, plain=True)
    assert len({shade(value, plain=False) for value in (0.99, 1.1, 1.2, 1.4)}) == 4
