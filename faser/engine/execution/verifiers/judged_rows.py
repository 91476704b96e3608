"""The rows of a step as the verifiers see them: which draft token each row judges, and which rows are reached.

    sequence          |      s = 0      | s = 1 |    s = 2     |
    row r             |  0    1    2    |   3   |   4     5    |
    drafted           |  x_1  x_2  none | none  |  x_1  none   |   the last row of a sequence judges no token
    accepted          |  yes  no   no   | no    |  yes  no     |
    last row reached  |       1         |   3   |         5    |   the bonus or recovered token is sampled there

Turns a step's sequences into arrays over rows, and accepted rows into acceptance results. Knows no rule of
acceptance.
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
    """S sequences, R rows, T = R - S draft tokens.

    first: [S] first row of each sequence. num_drafts: [S] γ. drafted: [R] draft token that each row judges,
    NO_TOKEN in the last row of a sequence. sequence: [R] index of the row's sequence.
    """

    sequences: Sequence[DraftedRows]
    first: Ints
    num_drafts: Ints
    drafted: Ints
    sequence: Ints

    @property
    def depth(self) -> Ints:
        """[R] how many draft tokens come before each row."""
        return np.arange(len(self.drafted)) - self.first[self.sequence]

    @property
    def judging(self) -> Ints:
        """[T] rows that judge a draft token, in the order of the drafts."""
        return np.flatnonzero(self.drafted != NO_TOKEN)

    def prepare(self, sampler: Sampler, logits: Tensor) -> PreparedRows:
        """Sampler.prepare; in every row the draft tokens before it count as output."""
        return sampler.prepare(logits, *self._arguments())

    def sample(self, sampler: Sampler, logits: Tensor) -> tuple[PreparedRows, Ints]:
        """`prepare`, and a token of every row: [R], NO_TOKEN where there is none."""
        return sampler.sample_rows(logits, *self._arguments())

    def process(self, sampler: Sampler, logits: Tensor) -> ProcessedLogits:
        """Sampler.process, which does not find out whether a row has a token."""
        return sampler.process(logits, *self._arguments())

    def _arguments(self) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
        """Slots, positions, and draft tokens before each row."""
        slots: list[int] = []
        positions: list[int] = []
        drafts: list[tuple[int, ...]] = []
        for each in self.sequences:
            num = len(each.draft) + 1
            slots += [each.slot] * num
            positions += range(each.position, each.position + num)
            drafts += [each.draft[:i] for i in range(num)]
        return slots, positions, drafts

    def last_reached(self, accepted: Bools) -> Ints:
        """[S] each sequence's first row whose draft token is not accepted. accepted: [R]."""
        rejected = np.flatnonzero(~accepted | (self.drafted == NO_TOKEN))
        return rejected[np.searchsorted(rejected, self.first)]

    def acceptance_results(
        self, sampler: Sampler, prepared: PreparedRows, last: Ints, final_ids: Ints
    ) -> list[AcceptanceResult]:
        """last: [S] the last row reached of each sequence. final_ids: [S] the bonus or recovered token there."""
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
