"""What a step is worth and what it takes, as a function of the drafted tokens in it. Shared by several policies.

    G = (worth of the tokens everybody gets anyway + expected worth of accepted drafts) / seconds of the whole step

Prompts share the step, but their time would have to be spent anyway: a drafted row is charged what it adds to the
step as it is, and the rest of the step counts as one that only decodes. Else every long prompt would make drafts
look cheap.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.engine.control.speculation.policies.policy import Candidates, Floats, Ints
from faser.engine.control.timing.cost_model import CostModel

_NOTHING = np.array(0.0)


class Objective:
    """One step's worth and time. worth: tokens (weighted) that it brings without drafts.

    Knows the times of as many drafted tokens as there could be, K of each candidate, and one more of each.
    """

    __slots__ = ("_steps_s", "_verify_s", "seconds_without_drafts", "worth")

    def __init__(self, costs: CostModel, candidates: Candidates) -> None:
        count, num_columns = candidates.survival.shape
        decodes = count + candidates.other_sequences
        self.worth = float(np.add.reduce(candidates.weight)) + candidates.other_sequences
        rows = count + candidates.other_rows
        self._steps_s = self._verify_s = costs.steps_s(rows, rows + count * num_columns, candidates.kv_tokens)
        self.seconds_without_drafts = self._steps_s.item(0)
        if decodes != rows:
            self.seconds_without_drafts = costs.step_s(decodes, candidates.kv_tokens)
            self._verify_s = self._steps_s + (self.seconds_without_drafts - self._steps_s.item(0))

    @property
    def rate_without_drafts(self) -> float:
        """G without drafts, in tokens a second."""
        return self.worth / self.seconds_without_drafts

    def verify_s(self, num_drafted: Ints) -> Floats:
        """Seconds of the step with so many drafted tokens among its rows; any shape."""
        return self._verify_s.take(num_drafted)

    def verify_upto_s(self, most: int) -> Floats:
        """[most + 1] seconds of the step with 0 … most drafted tokens among its rows. Read only."""
        return self._verify_s[: most + 1]

    def row_s(self, first: int, last: int) -> float:
        """Seconds a row between first and last drafted tokens adds, on average; last > first."""
        return (self._steps_s.item(last) - self._steps_s.item(first)) / (last - first)


@dataclass(slots=True, kw_only=True)
class Choice:
    """lengths: [S]. rate: G with them, in tokens a second; that of the plain step if all are 0."""

    lengths: Ints
    rate: float


def best_prefixes(
    objective: Objective, values: Floats, lengths: Ints, beside_s: float | Floats = _NOTHING
) -> Choice:
    """How many of each sequence's drafted tokens to verify, so that G is largest; exact.

    values: [S, K] worth of the k-th token, falling in k (its survival times a weight). lengths: [S] tokens that
    are there, N in all. beside_s: seconds that the step takes beside, or [N + 1] for every number of tokens. The
    best tokens of all sequences come first, and since values fall they are prefixes; every number of them is
    tried, for time is a staircase.
    """
    offered, tokens = _best_first(values, lengths)
    worth = np.empty(len(offered) + 1)
    worth[0] = objective.worth
    worth[1:] = offered
    np.add.accumulate(worth, out=worth)
    worth /= objective.verify_upto_s(len(offered)) + beside_s
    best = int(worth.argmax())
    if len(lengths) == 1:
        return Choice(lengths=np.array([best]), rate=worth.item(best))
    taken = np.bincount(tokens[:best] // values.shape[1], minlength=len(lengths))
    return Choice(lengths=taken, rate=worth.item(best))


def _best_first(values: Floats, lengths: Ints) -> tuple[Floats, Ints]:
    """The values of the tokens that are there, falling, and the place of each among all, line by line."""
    if len(lengths) == 1:
        count = lengths.item(0)
        return values[0, :count], np.arange(count)
    tokens = upto(values.shape[1]).take(lengths, axis=0).ravel().nonzero()[0]
    offered = values.take(tokens)
    order = (-offered).argsort(kind="stable")
    return offered.take(order), tokens.take(order)


@functools.lru_cache(maxsize=8)
def upto(num_depths: int) -> NDArray[np.bool_]:
    """Line n: the first n depths. Read only."""
    return np.tri(num_depths + 1, num_depths, -1, dtype=np.bool_)
