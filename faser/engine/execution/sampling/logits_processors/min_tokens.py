"""min_tokens: tokens that would end a sequence cannot be sampled before it is long enough."""

from collections.abc import Collection, Sequence

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.logits_processors.processor import ProcessedRows
from faser.engine.execution.sampling.logits_processors.token_ids import distinct
from faser.kernels.interface.sampling.logits_processor_kernels import ForbidEdit, LogitPositions
from faser.kernels.interface.sampling.sampling_kernels import Ints


class MinTokens:
    """See LogitsProcessor.

    The tokens are the request's stop_token_ids and, unless it ignores them, the EOS ones. Where the answer has a
    structure, its mask holds back the EOS tokens.
    """

    reads_output = False

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._by_slot: dict[int, tuple[int, Ints]] = {}  # the first position at which it may end, and the tokens

    @property
    def slots(self) -> Collection[int]:
        return self._by_slot

    def start(self, start: SequenceStart) -> None:
        sampling = start.sampling
        if sampling.min_tokens:
            by_eos = not sampling.ignore_eos and sampling.structured_output is None
            ends = sampling.stop_token_ids + (self._eos_token_ids if by_eos else ())
            self._by_slot[start.slot] = (start.prompt_len + sampling.min_tokens, distinct(ends, self._vocab_size))

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        pass

    def release(self, slot: int) -> None:
        self._by_slot.pop(slot, None)

    def edit(self, rows: ProcessedRows) -> ForbidEdit | None:
        short = [row for row in rows.of(self._by_slot) if rows.positions[row] < self._by_slot[rows.slots[row]][0]]
        if not short:
            return None
        return ForbidEdit(at=LogitPositions.of(short, [self._by_slot[rows.slots[row]][1] for row in short]))
