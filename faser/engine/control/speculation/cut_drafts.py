"""What the control plane learns from a step that cut drafts before it verified them. No torch.

draft          x1      x2      x3      x4      x5     the step cut x3, x4, x5: num_cut is 3
verified by    row 0   row 1   row 2   -       -      row 2, of x2, stayed: its bonus token judges x3
counted as     sent    sent    pruned  pruned  pruned  if all is well the answer has x1, x2 and the bonus token
acceptance     yes     yes     yes     never   never  x3 was right if it equals the bonus token
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.plan import StepPlan, StepResult
from faser.engine.control.speculation.acceptance.estimator import Outcomes

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutDrafts:
    """num_cut: [S] drafted tokens cut. first_is_right: [S] 1 where the first of them equals the bonus token."""

    num_cut: Ints
    first_is_right: Ints

    def with_first_cut(self, outcomes: Outcomes) -> Outcomes:
        """outcomes: of the tokens that were verified. Adds the first cut token of each draft to them."""
        return replace(
            outcomes,
            verified=outcomes.verified + (self.num_cut > 0),
            accepted=outcomes.accepted + self.first_is_right,
        )


def cut_drafts(slots: Ints, plan: StepPlan, result: StepResult) -> CutDrafts | None:
    """Of the sequences in slots, [S]; None where the step cut no draft."""
    if not any(each.num_cut for each in result.sequences):
        return None
    num_cut, first_is_right = {}, {}
    for rows, outcome in zip(plan.rows, result.sequences, strict=True):
        if outcome.num_cut:
            num_cut[rows.slot] = outcome.num_cut
            num_verified = rows.num_drafts - outcome.num_cut
            first_cut = rows.token_ids[len(rows.token_ids) - outcome.num_cut]
            all_accepted = len(outcome.token_ids) == num_verified + 1
            first_is_right[rows.slot] = all_accepted and outcome.token_ids[-1] == first_cut
    asked = slots.tolist()
    return CutDrafts(
        num_cut=np.array([num_cut.get(slot, 0) for slot in asked], dtype=np.int64),
        first_is_right=np.array([first_is_right.get(slot, False) for slot in asked], dtype=np.int64),
    )
