"""Drafts as columns: drafters fill them, the policy cuts them, the target verifies them, estimates learn from
them.

    slots  methods  lengths  token_ids           confidences
    3      suffix   2        17   4   -1  -1     .9  .6   0   0
    5      eagle3   4        8    8   21   3     2.1 1.4  .8  .2

A drafted token stays in this table from the drafter that proposes it to the step that has verified it. Plain
arrays without tensors, so that native code may fill them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from faser.config.speculation import DRAFT_METHODS, PASS_METHODS
from faser.types.arrays import NO_TOKEN, Bools, Floats, Ints

METHOD_IDS = {method: i for i, method in enumerate(DRAFT_METHODS)}
FIRST_TEXT = np.array(len(PASS_METHODS))  # ids of drafters that run a model come before those of text look-ups


class DraftTable(NamedTuple):
    """S drafts of up to K tokens, the engine's cap on γ. A draft may be empty.

    slots: [S].
    methods: [S] index DRAFT_METHODS.
    lengths: [S] tokens of each draft, 0 … K.
    token_ids: [S, K], NO_TOKEN beyond lengths.
    confidences: [S, K], on the method's own scale: the margin in nats between the two largest logits (models), an
        estimated probability (suffix), the length of the match (ngram); 0 beyond lengths.
    """

    slots: Ints
    methods: Ints
    lengths: Ints
    token_ids: Ints
    confidences: Floats

    def take(self, at: Ints | Bools | slice) -> "DraftTable":
        """The drafts at these positions, or where a mask is true; of a slice, views."""
        return DraftTable._make([column[at] for column in self])

    def tokens(self, at: int) -> tuple[int, ...]:
        """The tokens of one draft."""
        return tuple(self.token_ids[at, : self.lengths.item(at)].tolist())

    def cut(self, lengths: Ints) -> "DraftTable":
        """The drafts, shortened to these lengths, none of which is longer than its draft."""
        beyond = np.arange(self.width) >= lengths[:, None]
        return self._replace(
            lengths=lengths,
            token_ids=np.where(beyond, NO_TOKEN, self.token_ids),
            confidences=np.where(beyond, 0.0, self.confidences),
        )

    @property
    def width(self) -> int:
        """K."""
        return int(self.token_ids.shape[1])


def empty_table(slots: Sequence[int] | Ints, method: str, width: int) -> DraftTable:
    """An empty draft for each of these slots."""
    count = len(slots)
    methods, token_ids = np.empty(count, dtype=np.int64), np.empty((count, width), dtype=np.int64)
    methods.fill(METHOD_IDS[method])
    token_ids.fill(NO_TOKEN)
    return DraftTable(
        slots=np.array(slots, dtype=np.int64),
        methods=methods,
        lengths=np.zeros(count, dtype=np.int64),
        token_ids=token_ids,
        confidences=np.zeros((count, width)),
    )


NO_DRAFTS = empty_table((), DRAFT_METHODS[0], 0)


def table_of(
    slots: Sequence[int],
    method: str,
    token_ids: Iterable[Sequence[int]],
    confidences: Iterable[Sequence[float]],
    *,
    width: int,
) -> DraftTable:
    """A table of drafts of one method that are given as sequences, one for each slot."""
    table = empty_table(slots, method, width)
    for at, (tokens, sure) in enumerate(zip(token_ids, confidences, strict=True)):
        table.lengths[at] = len(tokens)
        table.token_ids[at, : len(tokens)] = tokens
        table.confidences[at, : len(tokens)] = sure
    return table


def joined(tables: Sequence[DraftTable]) -> DraftTable:
    """The drafts of all tables, one after the other. Tables of one width; at least one."""
    if len(tables) == 1:
        return tables[0]
    return DraftTable(*[np.concatenate(columns) for columns in zip(*tables, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """The answer to a DraftPlan.

    table: one draft for each request, in their order; of a plan from_text, this for one method after the other.
    run_s: wall time of drafting, from began_s on.
    passes: forwards of a draft model.
    catchup_tokens: rows that only refilled the draft model's KV cache.
    """

    step: int
    table: DraftTable
    run_s: float
    began_s: float = 0.0
    passes: int = 0
    catchup_tokens: int = 0
