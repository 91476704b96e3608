"""allowed_token_ids: no other token can be sampled, except the end of an answer with a structure."""

from collections.abc import Collection, Sequence

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.logits_processors.processor import ProcessedRows
from faser.engine.execution.sampling.logits_processors.token_ids import distinct
from faser.kernels.interface.sampling.logits_processor_kernels import AllowOnlyEdit, LogitPositions
from faser.kernels.interface.sampling.sampling_kernels import Ints


class AllowedTokens:
    """See LogitsProcessor."""

    reads_output = False

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._by_slot: dict[int, Ints] = {}

    @property
    def slots(self) -> Collection[int]:
        return self._by_slot

    def start(self, start: SequenceStart) -> None:
        allowed = start.sampling.allowed_token_ids
        if allowed is not None:
            ends = () if start.sampling.structured_output is None else self._eos_token_ids
            self._by_slot[start.slot] = distinct(allowed + ends, self._vocab_size)

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        pass

    def release(self, slot: int) -> None:
        self._by_slot.pop(slot, None)

    def edit(self, rows: ProcessedRows) -> AllowOnlyEdit | None:
        masked = rows.of(self._by_slot)
        if not masked:
            return None
        return AllowOnlyEdit(at=LogitPositions.of(masked, [self._by_slot[rows.slots[row]] for row in masked]))
