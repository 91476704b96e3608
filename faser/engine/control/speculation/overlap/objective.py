"""Which sequences draft while the target verifies, how far, and on what share of the processors, so that G is
largest.

    step        k                            k + 1
    verify      pending, chunk x_1 … x_c  |  y_1, chunk y_2 … y_m        if all of x is accepted and y_1 is right
                                          |  the recovered token         if not: its row judges the new z_1
    draft       y_1 … y_m                 |  z_1 … z_m

A sequence is ready if it has a chunk. Let s_k be the survival of a draft's first k tokens: the sequence becomes
ready with probability s_1 and stays ready with s_m, so it is ready in π = s_1 / (1 + s_1 - s_m) of the steps. A
ready step brings (s_1 + … + s_m) / s_1 tokens, any other step one. For a constant acceptance this is PEARL's
expectation with a pre-verified row (arXiv 2408.11850). G is these tokens over the time that both lanes take
together.
"""

from dataclasses import dataclass

import numpy as np

from faser.engine.contract.interference import InterferenceTable
from faser.engine.control.speculation.policies.objective import Objective
from faser.engine.control.speculation.policies.policy import Candidates, Floats, Ints
from faser.engine.control.timing.cost_model import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapChoice:
    """chosen: [N] positions of the sequences that draft. length: most tokens of each. rate: G, in tokens per
    second.

    lanes: of the share that the drafter gets; None: drafts are not overlapped.
    """

    chosen: Ints
    length: int
    lanes: InterferenceTable | None
    rate: float


def best_overlap(
    candidates: Candidates,
    objective: Objective,
    costs: CostModel,
    lanes: tuple[InterferenceTable, ...],
    *,
    most_rows: int | None = None,
) -> OverlapChoice:
    """The share, the common length and the sequences with the largest G; those that gain most are chosen first.

    most_rows: of an overlapped step, prompts aside; None: any number.
    """
    may_draft = candidates.limit > 0
    if not lanes or not may_draft.any():
        return _not_overlapped(objective)
    lengths = np.minimum(np.arange(1, candidates.survival.shape[1]), np.maximum(candidates.limit, 1)[:, None])
    ready, tokens = (np.take_along_axis(each, lengths - 1, axis=1) for each in expected(candidates.survival))
    gains = np.where(may_draft[:, None], candidates.weight[:, None] * ready * (tokens - 1), -1.0)
    rows = ready * (lengths - 1)
    order = np.argsort(-gains.max(axis=1), kind="stable")[: int(may_draft.sum())]
    worth = objective.worth + gains[order].cumsum(axis=0)  # [sequences that draft, length]
    drafted = np.rint(rows[order].cumsum(axis=0)).astype(np.int64)
    verify_s, draft_s = objective.verify_s(drafted), _draft_s(costs, len(order), worth.shape[1])
    step_rows = drafted + (candidates.num_sequences + candidates.other_rows)
    context = candidates.mean_context  # other sequences are assumed to have as many tokens
    decodes = candidates.num_sequences + candidates.other_sequences
    gap_s = costs.host_gaps.drafting_s(decodes, hidden=candidates.launches_ahead, overlapped=True)
    rates = np.stack([worth / (each.seconds(verify_s, draft_s, step_rows, context) + gap_s) for each in lanes])
    if most_rows is not None:
        rates[:, drafted + decodes > most_rows] = 0.0
        if not rates.any():
            return _not_overlapped(objective)
    best, count, length = (int(each) for each in np.unravel_index(int(rates.argmax()), rates.shape))
    return OverlapChoice(
        chosen=np.sort(order[: count + 1]),
        length=length + 1,
        lanes=lanes[best],
        rate=float(rates[best, count, length]),
    )


def expected(survival: Floats) -> tuple[Floats, Floats]:
    """Share of steps in which a sequence is ready, and tokens of such a step: [S, K] each, by draft length.

    survival: [S, K + 1], column 0 is 1.
    """
    first = survival[:, 1:2]
    ready = first / (1 + first - survival[:, 1:])
    tokens = survival[:, 1:].cumsum(axis=1) / np.maximum(first, 1e-12)
    return ready, np.maximum(tokens, 1.0)


def _draft_s(costs: CostModel, num_sequences: int, most: int) -> Floats:
    """[num_sequences, most] seconds in which 1 … num_sequences sequences draft 1 … most tokens each."""
    counts = np.arange(1, num_sequences + 1)
    found: Floats = costs.text_s(counts)[:, None] + costs.pass_s(counts)[:, None] * np.arange(1, most + 1)
    return found


def _not_overlapped(objective: Objective) -> OverlapChoice:
    return OverlapChoice(
        chosen=np.zeros(0, dtype=np.int64), length=0, lanes=None, rate=objective.rate_without_drafts
    )
