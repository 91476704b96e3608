"""A step's worth and time. Oracle: the cost model, asked for every number of rows."""

import numpy as np
import pytest

from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.speculation.policies.objective import Objective
from faser.engine.control.speculation.policies.policy import Candidates
from faser.engine.control.step_cost import CostModel

CAP = 8
STEP = CostTable(rows=(1, 16, 64, 256), seconds=(0.02, 0.021, 0.03, 0.09), kv_token_s=1e-6, kv_row_token_s=1e-7)


@pytest.mark.parametrize("count, other_rows, other_sequences", [(1, 0, 0), (5, 3, 3), (5, 70, 2)])
def test_a_steps_times_are_those_of_the_cost_model(count: int, other_rows: int, other_sequences: int) -> None:
    costs = CostModel(StepTimes(tables={Role.STEP: STEP}))
    costs.observe(Role.STEP, 1.0, 1.3)
    candidates = Candidates(
        slots=np.arange(count),
        limit=np.full(count, CAP),
        survival=np.ones((count, CAP + 1)),
        weight=np.full(count, 2.0),
        missing_kv=np.zeros(count, dtype=np.int64),
        other_rows=other_rows,
        other_sequences=other_sequences,
        kv_tokens=1000,
    )
    objective = Objective(costs, candidates)
    rows, most, context = count + other_rows, count * CAP, 1000 / count
    plain_s = costs.step_s(count + other_sequences, 1000)

    def with_drafts_s(n: int) -> float:
        return costs.step_s(rows + n, 1000) + 1.03 * 1e-7 * context * n

    expected = [plain_s + with_drafts_s(n) - with_drafts_s(0) for n in range(most + 1)]
    assert objective.worth == 2.0 * count + other_sequences
    assert objective.seconds_without_drafts == plain_s
    assert objective.verify_upto_s(most) == pytest.approx(expected)
    assert objective.verify_s(np.arange(most + 1)) == pytest.approx(expected)
    row_s = (with_drafts_s(most + count) - with_drafts_s(1)) / (most + count - 1)
    assert objective.row_s(1, most + count) == pytest.approx(row_s)


def test_where_two_of_four_sequences_draft_a_row_attends_to_the_mean_context_of_all_four() -> None:
    costs = CostModel(StepTimes.proportional(step_s=0.01, kv_row_token_s=1e-7))
    four = Candidates(
        slots=np.arange(4),
        limit=np.full(4, CAP),
        survival=np.ones((4, CAP + 1)),
        weight=np.ones(4),
        missing_kv=np.zeros(4, dtype=np.int64),
        other_rows=0,
        kv_tokens=4 * 2500,
    )
    two = four.among(np.array([0, 3]))
    for candidates in (four, two, two.among(np.array([1])), two.drafted(two.limit, two.survival)):
        assert Objective(costs, candidates).row_s(0, CAP) == pytest.approx(2500 * 1e-7)
