"""A step from which draft rows left between two layers, as the control plane counts and learns it. No torch.

draft          x1         x2         x3       x4      x5      rows of x3, x4, x5 left: num_pruned is 3
judged by      row 0      row 1      row 2    -       -       row 2, of x2, stayed: the bonus token judges x3
counted as     verified   verified   pruned   pruned  pruned  the answer has x1, x2 and the bonus token
teaches        yes        yes        yes      no      no      x3 was right if it is the bonus token
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.plan import StepPlan, StepResult
from faser.engine.control.speculation.acceptance.estimator import Outcomes
from faser.engine.control.timing.cost_model import CostModel

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedRows:
    """counts: [S] draft tokens whose rows left. right: [S] 1 where the first of them is the bonus token."""

    counts: Ints
    right: Ints

    def judged(self, outcomes: Outcomes) -> Outcomes:
        """Outcomes of the rows that stayed, with that of the first token whose row left."""
        return replace(
            outcomes,
            verified=outcomes.verified + (self.counts > 0),
            accepted=outcomes.accepted + self.right,
        )


def pruned_rows(slots: Ints, plan: StepPlan, result: StepResult) -> PrunedRows | None:
    """slots: [S]. None: no row left the step."""
    if not any(each.num_pruned for each in result.sequences):
        return None
    counts, right = {}, {}
    for rows, outcome in zip(plan.rows, result.sequences, strict=True):
        if outcome.num_pruned:
            counts[rows.slot] = outcome.num_pruned
            stayed = rows.num_drafts - outcome.num_pruned
            flagged = rows.token_ids[len(rows.token_ids) - outcome.num_pruned]
            right[rows.slot] = len(outcome.token_ids) == stayed + 1 and outcome.token_ids[-1] == flagged
    asked = slots.tolist()
    return PrunedRows(
        counts=np.array([counts.get(slot, 0) for slot in asked], dtype=np.int64),
        right=np.array([right.get(slot, False) for slot in asked], dtype=np.int64),
    )


def saved_s(costs: CostModel, plan: StepPlan, result: StepResult) -> float:
    """Seconds by which the step should be shorter than with all its rows in all layers."""
    left = sum(each.num_pruned for each in result.sequences)
    return (costs.step_s(plan.num_rows) - costs.step_s(plan.num_rows - left)) * (1 - result.pruned_after)
