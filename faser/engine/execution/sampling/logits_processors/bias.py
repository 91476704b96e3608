"""logit_bias: numbers added to the logits of some tokens."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.logits_processors.processor import ProcessedRows
from faser.engine.execution.sampling.logits_processors.token_ids import distinct
from faser.kernels.interface.sampling.logits_processor_kernels import BiasEdit, LogitPositions
from faser.kernels.interface.sampling.sampling_kernels import Ints


class Bias:
    """See LogitsProcessor. A token that a request names several times gets the sum."""

    reads_output = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._by_slot: dict[int, tuple[Ints, NDArray[np.float32]]] = {}

    @property
    def slots(self) -> Collection[int]:
        return self._by_slot

    def start(self, start: SequenceStart) -> None:
        if not start.sampling.logit_bias:
            return
        total: dict[int, float] = {}
        for token_id, bias in start.sampling.logit_bias:
            total[token_id] = total.get(token_id, 0.0) + bias
        token_ids = distinct(total, self._vocab_size)
        self._by_slot[start.slot] = (token_ids, np.array([total[i] for i in sorted(total)], np.float32))

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        pass

    def release(self, slot: int) -> None:
        self._by_slot.pop(slot, None)

    def edit(self, rows: ProcessedRows) -> BiasEdit | None:
        biased = rows.of(self._by_slot)
        if not biased:
            return None
        asked = [self._by_slot[rows.slots[row]] for row in biased]
        at = LogitPositions.of(biased, [token_ids for token_ids, _ in asked])
        return BiasEdit(at=at, values=np.concatenate([values for _, values in asked]))
