"""What a step is worth and what it takes, as a function of the drafted tokens in it. Shared by several policies.

    G = (worth of the tokens everybody gets anyway + expected worth of accepted drafts) / seconds of the whole step

Prompts share the step, but their time would have to be spent anyway: a drafted row is charged what it adds to the
step as it is, and the rest of the step counts as one that only decodes. Else every long prompt would make drafts
look cheap.
"""

from dataclasses import dataclass

import numpy as np

from faser.engine.cost_model import CostModel
from faser.engine.spec.policy import Candidates, Floats, Ints


class Objective:
    """One step's worth and time. worth: tokens (weighted) that it brings without drafts."""

    __slots__ = ("_costs", "_kv_tokens", "_rows", "_rows_s", "plain_s", "worth")

    def __init__(self, costs: CostModel, candidates: Candidates) -> None:
        decodes = candidates.num_sequences + candidates.other_sequences
        self.worth = float(candidates.weight.sum()) + candidates.other_sequences
        self.plain_s = costs.step_s(decodes, candidates.kv_tokens)
        self._costs = costs
        self._kv_tokens = candidates.kv_tokens
        self._rows = candidates.num_sequences + candidates.other_rows
        self._rows_s = costs.step_s(self._rows, candidates.kv_tokens)

    @property
    def plain_rate(self) -> float:
        """G without drafts, in tokens a second."""
        return self.worth / self.plain_s

    def verify_s(self, num_drafted: Ints) -> Floats:
        """Seconds of the step with so many drafted tokens among its rows; any shape."""
        seconds = self._costs.step_s(self._rows + num_drafted, self._kv_tokens)
        seconds += self.plain_s - self._rows_s
        return seconds

    def row_s(self, first: int, last: int) -> float:
        """Seconds a row between first and last drafted tokens adds, on average; last > first."""
        before, after = self.verify_s(np.array([first, last])).tolist()
        return float(after - before) / (last - first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """lengths: [S]. rate: G with them, in tokens a second; that of the plain step if all are 0."""

    lengths: Ints
    rate: float


def best_prefixes(objective: Objective, values: Floats, lengths: Ints, sunk_s: float = 0.0) -> Choice:
    """How many of each sequence's drafted tokens to verify, so that G is largest; exact.

    values: [S, K] worth of the k-th token, falling in k (its survival times a weight). lengths: [S] tokens that
    are there. sunk_s: seconds of the step already spent. The best tokens of all sequences come first, and since
    values fall they are prefixes; every number of them is tried, for time is a staircase.
    """
    num_columns = values.shape[1]
    there = np.flatnonzero((np.arange(num_columns) < lengths[:, None]).ravel())
    if not len(there):
        return Choice(lengths=np.zeros_like(lengths), rate=objective.worth / (objective.plain_s + sunk_s))
    offered = values.ravel()[there]
    order = np.argsort(-offered, kind="stable")
    worth = np.empty(len(there) + 1)
    worth[0] = objective.worth
    np.cumsum(offered[order], out=worth[1:])
    worth[1:] += objective.worth
    seconds = objective.verify_s(np.arange(len(there) + 1))
    seconds += sunk_s
    rates = worth / seconds
    best = int(rates.argmax())
    kept = np.bincount(there[order[:best]] // num_columns, minlength=len(lengths))
    return Choice(lengths=kept, rate=float(rates[best]))
