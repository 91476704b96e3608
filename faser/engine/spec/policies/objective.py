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

from faser.engine.cost_model import CostModel
from faser.engine.spec.policy import Candidates, Floats, Ints


class Objective:
    """One step's worth and time. worth: tokens (weighted) that it brings without drafts."""

    __slots__ = ("_costs", "_kv_tokens", "_rows", "_rows_s", "plain_s", "worth")

    def __init__(self, costs: CostModel, candidates: Candidates) -> None:
        decodes = candidates.num_sequences + candidates.other_sequences
        self.worth = float(np.add.reduce(candidates.weight)) + candidates.other_sequences
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

    def verify_upto_s(self, most: int) -> Floats:
        """[most + 1] seconds of the step with 0 … most drafted tokens among its rows."""
        seconds = self._costs.steps_s(self._rows, self._rows + most, self._kv_tokens)
        seconds += self.plain_s - self._rows_s
        return seconds

    def row_s(self, first: int, last: int) -> float:
        """Seconds a row between first and last drafted tokens adds, on average; last > first."""
        before = self._costs.step_s(self._rows + first, self._kv_tokens)
        after = self._costs.step_s(self._rows + last, self._kv_tokens)
        return (after - before) / (last - first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """lengths: [S]. rate: G with them, in tokens a second; that of the plain step if all are 0."""

    lengths: Ints
    rate: float


def best_prefixes(objective: Objective, values: Floats, lengths: Ints, beside_s: float | Floats = 0.0) -> Choice:
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
    seconds = objective.verify_upto_s(len(offered))
    seconds += beside_s
    worth /= seconds
    best = int(worth.argmax())
    taken = np.bincount(tokens[:best] // values.shape[1], minlength=len(lengths))
    return Choice(lengths=taken, rate=float(worth[best]))


def _best_first(values: Floats, lengths: Ints) -> tuple[Floats, Ints]:
    """The values of the tokens that are there, falling, and the place of each among all, line by line."""
    if len(lengths) == 1:
        count = int(lengths[0])
        return values[0, :count], np.arange(count)
    tokens = upto(values.shape[1]).take(lengths, axis=0).ravel().nonzero()[0]
    offered = values.take(tokens)
    order = (-offered).argsort(kind="stable")
    return offered.take(order), tokens.take(order)


@functools.lru_cache(maxsize=8)
def upto(num_depths: int) -> NDArray[np.bool_]:
    """Line n: the first n depths. Read only."""
    return np.tri(num_depths + 1, num_depths, -1, dtype=np.bool_)
