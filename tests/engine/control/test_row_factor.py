"""What draft rows cost beside other programs. Oracle: a machine whose draft rows are known to be that much dearer.

Planted bugs that these tests have caught: the whole step's factor counted as that of the rows; a step without
draft rows taken for proof that they cost what the table says.
"""

import numpy as np
import pytest

from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.step_cost import CostModel, RowFactor

BASE_S, ROW_S = 0.010, 0.0004


def learned(
    dearer: float, *, slower: float = 1.0, noise: float = 0.0, steps: int = 200, plain: int = 2
) -> RowFactor:
    """Steps of 0 to 12 draft rows, every plain-th of them without any."""
    random, found = np.random.default_rng(0), RowFactor()
    for step in range(steps):
        rows_s = ROW_S * int(random.integers(1, 13)) * (step % plain > 0)
        found.add(BASE_S, rows_s, slower * (BASE_S + dearer * rows_s) * float(random.lognormal(0.0, noise)))
    return found


@pytest.mark.parametrize("slower", [1.0, 2.5])
@pytest.mark.parametrize("dearer", [0.8, 1.0, 1.5, 2.5])
def test_rows_that_are_dearer_than_their_table_are_found(dearer: float, slower: float) -> None:
    assert learned(dearer, slower=slower).factor == pytest.approx(dearer, rel=0.15)
    assert learned(dearer, slower=slower, noise=0.05).factor == pytest.approx(dearer, rel=0.25)


def test_rows_that_are_a_small_part_of_the_step_are_found_dear_too() -> None:
    """Planted bug: a prior so firm that rows of a fortieth of a step cost what the table says for ever."""
    found = RowFactor()
    for step in range(200):
        rows_s = 0.02 * BASE_S * (step % 2)
        found.add(BASE_S, rows_s, BASE_S + 3 * rows_s)
    assert found.factor > 1.7


def test_steps_without_draft_rows_say_nothing_about_them() -> None:
    found = RowFactor()
    for _ in range(100):
        found.add(BASE_S, 0.0, 3 * BASE_S)
    assert found.factor == pytest.approx(1.0, abs=0.01)


def test_one_odd_step_is_no_new_machine() -> None:
    found = learned(1.0)
    found.add(BASE_S, 12 * ROW_S, 100 * BASE_S)
    assert found.factor < 2.0


def test_the_cost_model_charges_draft_rows_what_they_cost_now() -> None:
    """Draft rows are twice as dear; the rest of the step is as the table says."""
    table = CostTable(rows=(1, 64), seconds=(BASE_S, BASE_S + 63 * ROW_S))
    costs = CostModel(StepTimes(tables={Role.STEP: table}))
    before = costs.steps_s(4, 20)
    for step in range(200):
        drafts = step % 13
        taken_s = BASE_S + 3 * ROW_S + 2 * drafts * ROW_S
        costs.observe(Role.STEP, costs.verification_s(4 + drafts, drafts, 0, 0), taken_s)
        costs.observe_verification(4 + drafts, drafts, 0, 0, taken_s)
    after = costs.steps_s(4, 20)
    assert after[0] == pytest.approx(before[0], rel=0.05)
    assert after[12] - after[0] == pytest.approx(2 * (before[12] - before[0]), rel=0.1)
    assert costs.verification_s(16, 12, 0, 0) == pytest.approx(after[12])
