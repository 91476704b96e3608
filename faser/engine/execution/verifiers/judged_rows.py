"""The rows of a step as the verifiers see them: which drafted token each of them judges, and what came of it.

    sequence          |      s = 0      | s = 1 |    s = 2     |
    row r             |  0    1    2    |   3   |   4     5    |
    drafted           |  x_1  x_2  none | none  |  x_1  none   |   the last row of a sequence judges nothing
    accepted          |  yes  no   no   | no    |  yes  no     |
    last row reached  |       1         |   3   |         5    |   its token is the target's own

Owns the way from a step's sequences to arrays over rows, and back to verdicts. Knows no rule of acceptance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.execution.sampling.sampler import NO_TOKEN, PreparedRows, ProcessedLogits, Sampler
from faser.engine.execution.verifiers.verifier import AcceptanceResult, DraftedRows

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRows:
    """S sequences, R rows, T = R - S drafted tokens.

    first: [S] first row of each sequence; num_drafts: [S] γ. drafted: [R] token that each row judges, NO_TOKEN in
    the last row of a sequence. sequence: [R] the one it belongs to.
    """

    sequences: Sequence[DraftedRows]
    first: Ints
    num_drafts: Ints
    drafted: Ints
    sequence: Ints

    @property
    def depth(self) -> Ints:
        """[R] drafted tokens before each row."""
        return np.arange(len(self.drafted)) - self.first[self.sequence]

    @property
    def judging(self) -> Ints:
        """[T] rows that judge a drafted token, in the order of the drafts."""
        return np.flatnonzero(self.drafted != NO_TOKEN)

    def prepare(self, sampler: Sampler, logits: Tensor) -> PreparedRows:
        """Bias, penalties and masks; every row takes the drafted tokens before it for output."""
        return sampler.prepare(logits, *self._asked())

    def sample(self, sampler: Sampler, logits: Tensor) -> tuple[PreparedRows, Ints]:
        """`prepare`, and a token of every row: [R], NO_TOKEN where none can be chosen."""
        return sampler.sample_rows(logits, *self._asked())

    def process(self, sampler: Sampler, logits: Tensor) -> ProcessedLogits:
        """The first part of `prepare`, in which nobody asks whether a token can be chosen."""
        return sampler.process(logits, *self._asked())

    def _asked(self) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
        """Slots, positions, and drafted tokens before each row."""
        slots: list[int] = []
        positions: list[int] = []
        ahead: list[tuple[int, ...]] = []
        for each in self.sequences:
            num = len(each.draft) + 1
            slots += [each.slot] * num
            positions += range(each.position, each.position + num)
            ahead += [each.draft[:i] for i in range(num)]
        return slots, positions, ahead

    def last_reached(self, accepted: Bools) -> Ints:
        """[S] each sequence's first row whose drafted token is not accepted. accepted: [R]."""
        refused = np.flatnonzero(~accepted | (self.drafted == NO_TOKEN))
        return refused[np.searchsorted(refused, self.first)]

    def verdicts(self, sampler: Sampler, prepared: PreparedRows, last: Ints, final_ids: Ints) -> list[AcceptanceResult]:
        """last: [S] the last row reached of each sequence; own: [S] the target's own token there."""
        token_ids = self.drafted.copy()
        token_ids[last] = final_ids
        reaching = last[self.sequence]
        reached = np.arange(len(token_ids)) <= reaching
        scored = [row for row in prepared.raw_row if reached[row] and int(reaching[row]) not in prepared.errors]
        reports = sampler.report(prepared, scored, token_ids.tolist())
        return [
            AcceptanceResult(error=prepared.errors[end])
            if end in prepared.errors
            else AcceptanceResult(
                token_ids=(*each.draft[: end - begin], token_id),
                logprobs=tuple(reports[row] for row in range(begin, end + 1)) if begin in reports else None,
            )
            for each, begin, end, token_id in zip(
                self.sequences, self.first.tolist(), last.tolist(), final_ids.tolist(), strict=True
            )
        ]


def lay_out(sequences: Sequence[DraftedRows]) -> JudgedRows:
    """The rows of these sequences, one after the other."""
    num_drafts = np.array([len(each.draft) for each in sequences], dtype=np.int64)
    drafted = [token_id for each in sequences for token_id in (*each.draft, NO_TOKEN)]
    return JudgedRows(
        sequences=sequences,
        first=np.cumsum(num_drafts + 1) - num_drafts - 1,
        num_drafts=num_drafts,
        drafted=np.array(drafted, dtype=np.int64),
        sequence=np.repeat(np.arange(len(sequences)), num_drafts + 1),
    )
