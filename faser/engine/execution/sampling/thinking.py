"""The processor that ends the thinking of an answer whose budget is spent: the next token closes it.

    budget 3      <think>  a    b    c   </think>  answer
    tokens spent       0   1    2    3
    forced                                 yes

Where a structure does not allow the mark yet, within a character of several tokens, the thinking goes on until it
does. A row behind draft tokens counts them as well, so a draft that goes past the budget is verified against the
mark, and answers are those without drafts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.edits import (
    Entries,
    LogitsEdit,
    LogitsProcessor,
    ProcessedRows,
    forbid,
    force,
)
from faser.types.sampling import ThinkingBudget

_LEADING = 2  # tokens of white space that may stand before the mark which opens the thinking


class _Place(NamedTuple):
    """Place of an answer relative to its thinking.

    may_begin: thinking may still be opened. spent: tokens of thinking so far. before: the last ones outside of it.
    """

    budget: ThinkingBudget
    is_thinking: bool
    may_begin: bool = True
    spent: int = 0
    before: tuple[int, ...] = ()

    def after(self, token_id: int) -> "_Place":
        budget = self.budget
        if self.is_thinking:
            if token_id != budget.end:
                return self._replace(spent=self.spent + 1)
            return self._replace(is_thinking=False, may_begin=budget.repeats)
        if not self.may_begin:
            return self
        before, size = (*self.before, token_id), len(budget.begin)
        if before[-size:] == budget.begin:
            return self._replace(is_thinking=True, before=())
        may_begin = budget.repeats or len(before) < size + _LEADING
        return self._replace(before=before[-size - _LEADING :], may_begin=may_begin)

    @property
    def is_spent(self) -> bool:
        return self.spent >= self.budget.max_tokens

    @property
    def refused(self) -> int | None:
        """The token that would begin another block of thinking although nothing is left for it."""
        begin = self.budget.begin
        again = self.budget.repeats and self.is_spent and not self.is_thinking
        return begin[1] if again and self.before[-1:] == begin[:1] else None


class Thinking(LogitsProcessor[_Place]):
    """thinking_budget. Once an answer cannot think any more it is edited no longer."""

    reads_output = True

    def start(self, start: SequenceStart) -> None:
        budget = start.sampling.thinking_budget
        if budget is not None:
            self._by_slot[start.slot] = _Place(budget, budget.is_open)
            output = start.token_ids[start.prompt_len :]
            self.accept([start.slot] * len(output), output)

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, token_id in zip(slots, token_ids, strict=True):
            if (place := self._by_slot.get(slot)) is not None:
                place = place.after(token_id)
                if place.is_thinking or place.may_begin:
                    self._by_slot[slot] = place
                else:
                    del self._by_slot[slot]

    def edit(self, rows: ProcessedRows) -> LogitsEdit | None:
        forced: dict[int, int] = {}
        refused: dict[int, int] = {}
        place: _Place | None = None
        for row in rows.of(self._by_slot):
            draft = rows.drafts[row]
            if draft:  # the row before it is that of the same sequence with one draft token less
                assert place is not None, "the rows of a sequence do not follow each other"
                place = place.after(draft[-1])
            else:
                place = self._by_slot[rows.slots[row]]
            if place.is_thinking and place.is_spent:
                forced[row] = place.budget.end
            elif (token_id := place.refused) is not None:
                refused[row] = token_id
        if not forced and not refused:
            return None

        def edit(logits: Tensor) -> None:
            for by_row, change in ((forced, force), (refused, forbid)):
                if by_row:
                    change(logits, _entries(by_row))

        return edit


def _entries(by_row: dict[int, int]) -> Entries:
    return Entries.of([*by_row], [np.array([token_id], dtype=np.int64) for token_id in by_row.values()])
