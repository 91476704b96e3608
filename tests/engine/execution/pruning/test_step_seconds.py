"""How early pruning predicts steps. Oracle: the control plane's cost model, which follows in the same way."""

import numpy as np
import pytest

from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.step_cost import CostModel
from faser.engine.execution.pruning.step_seconds import StepSeconds

TABLE = CostTable(rows=(1, 8, 64), seconds=(0.01, 0.011, 0.03), kv_token_s=1e-6)


def test_predictions_are_those_of_the_cost_model_while_both_see_the_same_steps() -> None:
    rng = np.random.default_rng(1)
    costs, seconds = CostModel(StepTimes(tables={Role.STEP: TABLE})), StepSeconds(TABLE)
    for rows, kv_tokens in zip(
        rng.integers(1, 80, 300).tolist(), rng.integers(0, 9000, 300).tolist(), strict=True
    ):
        predicted_s = seconds.of(rows, kv_tokens)
        assert predicted_s == costs.step_s(rows, kv_tokens)
        measured_s = predicted_s * float(rng.lognormal(0.3, 1.0))
        costs.observe(Role.STEP, predicted_s, measured_s)
        seconds.observe(predicted_s, measured_s)
    assert seconds.factor > 1.5


@pytest.mark.parametrize("most", [100, 5000])
def test_many_row_counts_at_once_take_what_each_takes_by_itself(most: int) -> None:
    rows = np.array([1, 17, most])
    found = StepSeconds(TABLE).of(rows)
    assert found.tolist() == [StepSeconds(TABLE).of(each) for each in rows.tolist()]


@pytest.mark.parametrize("predicted_s, measured_s", [(0.0, 1.0), (1.0, 0.0), (-0.1, 1.0)])
def test_without_a_prediction_and_a_time_nothing_is_learned(predicted_s: float, measured_s: float) -> None:
    seconds = StepSeconds(TABLE)
    seconds.observe(predicted_s, measured_s)
    assert seconds.factor == 1.0
