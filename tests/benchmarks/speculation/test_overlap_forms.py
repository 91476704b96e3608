"""The closed forms of drafting before and beside a step. Oracle: cycles played out token by token."""

import numpy as np
import pytest

from benchmarks.speculation.overlap_map import (
    BEFORE,
    BESIDE,
    PLAIN,
    Forms,
    ready_share,
    tokens_before,
    tokens_beside,
)
from faser.engine.contract.interference import InterferenceTable
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.timing.cost_model import CostModel

FREE = InterferenceTable.constant(share=0.5, verify=1.0, draft=1.0, verify_alone=1.0, draft_alone=1.0)
COSTS = CostModel(StepTimes.proportional(step_s=0.0055, row_s=0.000027, pass_s=0.001))


def run_length(random: np.random.Generator, acceptance: float, most: int) -> int:
    """Drafted tokens in a row that are right."""
    return next((at for at in range(most) if random.random() >= acceptance), most)


def played_beside(acceptance: float, length: int, cycles: int) -> tuple[float, float]:
    """Share of cycles with a chunk, and tokens a cycle: a chunk of length - 1 tokens, then the border."""
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
def test_a_cycle_beside_brings_what_it_brings_played_out(acceptance: float, length: int) -> None:
    share, tokens = played_beside(acceptance, length, 60_000)
    assert ready_share(acceptance, length) == pytest.approx(share, rel=0.02)
    assert tokens_beside(acceptance, length) == pytest.approx(tokens, rel=0.015)


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
    assert forms.beside(2, FREE) == pytest.approx(8 / step_s)


def test_lanes_that_slow_each_other_down_divide_the_speed_beside() -> None:
    forms = Forms(costs=COSTS, load=8, acceptance=0.8)
    slow = InterferenceTable.constant(share=0.5, verify=1.3, draft=1.3, verify_alone=1.3, draft_alone=1.3)
    assert forms.beside(4, slow) == pytest.approx(forms.beside(4, FREE) / 1.3)


def test_the_best_length_is_at_least_as_good_as_any() -> None:
    forms = Forms(costs=COSTS, load=8, acceptance=0.8)
    best = forms.best(8, FREE)
    assert best[PLAIN] == forms.plain()
    assert best[BEFORE] == max(forms.before(length) for length in range(1, 9))
    assert best[BESIDE] == max(forms.beside(length, FREE) for length in range(1, 9))
