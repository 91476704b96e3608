"""structured_output: only tokens can be sampled that the request's grammar allows next."""

import math
from collections.abc import Collection, Sequence

import numpy as np

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.logits_processors.processor import ProcessedRows
from faser.engine.structure.sequence_matchers import SequenceMatchers
from faser.kernels.interface.sampling.logits_processor_kernels import MaskEdit


class Structure:
    """See LogitsProcessor. It alone starts, advances and releases the matchers; the drafter only asks them."""

    reads_output = True

    def __init__(self, matchers: SequenceMatchers) -> None:
        self._matchers = matchers

    @property
    def slots(self) -> Collection[int]:
        return self._matchers.slots

    def start(self, start: SequenceStart) -> None:
        sampling = start.sampling
        if sampling.structured_output is not None:
            self._matchers.start(
                start.slot,
                sampling.structured_output,
                start.token_ids[start.prompt_len :],
                may_end_from=math.inf if sampling.ignore_eos else start.prompt_len + sampling.min_tokens,
            )

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        structured = self._matchers.slots
        for slot, token_id in zip(slots, token_ids, strict=True):
            if slot in structured:
                self._matchers.accept(slot, token_id)

    def release(self, slot: int) -> None:
        self._matchers.release(slot)

    def edit(self, rows: ProcessedRows) -> MaskEdit | None:
        masked = rows.of(self._matchers.slots)
        if not masked:
            return None
        drafted, positions = _by_sequence(rows, masked)
        return MaskEdit(rows=np.array(masked, dtype=np.int64), words=self._matchers.masks(drafted, positions))


def _by_sequence(rows: ProcessedRows, masked: list[int]) -> tuple[list[tuple[int, tuple[int, ...]]], list[int]]:
    """The sequences of these rows with their whole drafts, and the positions of their first tokens.

    The rows of a sequence follow each other, and the drafts before them grow by a token a row.
    """
    drafted: list[tuple[int, tuple[int, ...]]] = []
    positions: list[int] = []
    for row in masked:
        draft = rows.drafts[row] if rows.drafts else ()
        if draft:
            slot, before = drafted[-1]
            assert slot == rows.slots[row], "the rows of a sequence do not follow each other"
            assert len(before) == len(draft) - 1, "a row of a draft is missing"
            drafted[-1] = (slot, draft)
        else:
            drafted.append((rows.slots[row], ()))
            positions.append(rows.positions[row])
    return drafted, positions
