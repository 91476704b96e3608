"""The objective G of several policies: tokens per second of a step, as a function of the draft tokens in it.

    G = (worth of the tokens of a step without drafts + expected worth of accepted drafts) / seconds of the whole
    step

Prompts share the step, but their time is spent with or without drafts. So a draft row is charged what it adds to
the step as it is, and the rest of the step counts as one that only decodes; otherwise a long prompt would make
drafts look cheap. A draft row attends to the mean context of the candidates, so that time depends on the number of
draft rows alone.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.engine.control.speculation.policies.policy import Candidates, Floats, Ints
from faser.engine.control.step_cost import CostModel

_NOTHING = np.array(0.0)


class Objective:
    """One step's worth and time. worth: weighted tokens that it brings without drafts.

    drafting_gap_s: host time by which drafts delay the step, however many there are; no part of verify_s.
    Holds the times for up to K + 1 draft tokens of each candidate.
    """

    __slots__ = ("_steps_s", "_verify_s", "drafting_gap_s", "seconds_without_drafts", "worth")

    def __init__(self, costs: CostModel, candidates: Candidates) -> None:
        count, num_columns = candidates.survival.shape
        decodes = count + candidates.other_sequences
        self.worth = float(np.add.reduce(candidates.weight)) + candidates.other_sequences
        self.drafting_gap_s = costs.host_gaps.drafting_s(decodes, hidden=candidates.launches_ahead)
        rows = count + candidates.other_rows
        self._steps_s = self._verify_s = costs.steps_s(
            rows, rows + count * num_columns, candidates.kv_tokens, candidates.mean_context
        )
        self.seconds_without_drafts = self._steps_s.item(0)
        if decodes != rows:
            self.seconds_without_drafts = costs.step_s(decodes, candidates.kv_tokens)
            self._verify_s = self._steps_s + (self.seconds_without_drafts - self._steps_s.item(0))

    @property
    def rate_without_drafts(self) -> float:
        """In tokens per second."""
        return self.worth / self.seconds_without_drafts

    def verify_s(self, num_drafted: Ints) -> Floats:
        """Seconds of the step with num_drafted draft rows; any shape."""
        return self._verify_s.take(num_drafted)

    def verify_upto_s(self, most: int) -> Floats:
        """[most + 1] seconds of the step with 0 … most draft rows. Read only."""
        return self._verify_s[: most + 1]

    def row_s(self, first: int, last: int) -> float:
        """Mean seconds that a draft row adds from the first to the last number of rows; last > first."""
        return (self._steps_s.item(last) - self._steps_s.item(first)) / (last - first)


@dataclass(slots=True, kw_only=True)
class Choice:
    """lengths: [S] tokens. rate: G with them, in tokens per second."""

    lengths: Ints
    rate: float


def best_prefixes(
    objective: Objective, values: Floats, lengths: Ints, extra_s: float | Floats = _NOTHING
) -> Choice:
    """How many of each sequence's draft tokens to verify so that G is largest; exact.

    values: [S, K] worth of the k-th token, falling in k: its survival times a weight. lengths: [S] tokens of each
    draft, N in all. extra_s: seconds in addition to the step, or [N + 1] for every number of tokens. The best
    tokens of all sequences come first, and since values fall they form prefixes. Every number of them is tried,
    because time is a staircase.
    """
    offered, tokens = _best_first(values, lengths)
    worth = np.empty(len(offered) + 1)
    worth[0] = objective.worth
    worth[1:] = offered
    np.add.accumulate(worth, out=worth)
    worth /= objective.verify_upto_s(len(offered)) + extra_s
    best = int(worth.argmax())
    if len(lengths) == 1:
        return Choice(lengths=np.array([best]), rate=worth.item(best))
    taken = np.bincount(tokens[:best] // values.shape[1], minlength=len(lengths))
    return Choice(lengths=taken, rate=worth.item(best))


def _best_first(values: Floats, lengths: Ints) -> tuple[Floats, Ints]:
    """The values of the drafts' tokens, falling, and the index of each in the flattened values."""
    if len(lengths) == 1:
        count = lengths.item(0)
        return values[0, :count], np.arange(count)
    tokens = upto(values.shape[1]).take(lengths, axis=0).ravel().nonzero()[0]
    offered = values.take(tokens)
    order = (-offered).argsort(kind="stable")
    return offered.take(order), tokens.take(order)


@functools.lru_cache(maxsize=8)
def upto(num_depths: int) -> NDArray[np.bool_]:
    """[K + 1, K]; line n is True for the first n depths. Read only."""
    return np.tri(num_depths + 1, num_depths, -1, dtype=np.bool_)
