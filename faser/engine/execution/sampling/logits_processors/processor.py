"""The contract of a logits processor, and the rows that it is asked about."""

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Protocol

from faser.engine.contract.plan import SequenceStart
from faser.kernels.interface.sampling.logits_processor_kernels import LogitsEdit


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """R rows of a step. slots: of the rows, may repeat. positions: of the tokens that the rows sample.

    drafts: per row, the draft tokens before it, which count as output of its sequence; None: no row has any.
    """

    slots: Sequence[int]
    positions: Sequence[int]
    drafts: Sequence[tuple[int, ...]] | None

    def of(self, slots: Container[int]) -> list[int]:
        """The rows that belong to one of these slots, ascending."""
        return [row for row, slot in enumerate(self.slots) if slot in slots]


class LogitsProcessor(Protocol):
    """Edits the logits of the requests that ask for it. Remembers by slot what each of them asked for."""

    @property
    def slots(self) -> Collection[int]:
        """Slots whose request asks for this processor. While there are none, a step does not call it."""
        ...

    @property
    def reads_output(self) -> bool:
        """Whether its edits depend on the output; only then is `accept` called."""
        ...

    def start(self, start: SequenceStart) -> None:
        """A sequence takes over a free slot; tokens that it has generated already are part of its output."""
        ...

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Each slot's sequence is extended by its token, in this order; a slot may occur several times."""
        ...

    def release(self, slot: int) -> None:
        """The slot is free; it need not be one of `slots`."""
        ...

    def edit(self, rows: ProcessedRows) -> LogitsEdit | None:
        """What is done to the logits of these rows; None: nothing. Changes nothing."""
        ...
