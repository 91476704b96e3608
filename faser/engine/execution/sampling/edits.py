"""The seam of the logits processors, and the arithmetic of what they do to logits.

A logits processor remembers by slot what requests ask for. For the rows of a step it returns an edit: a function
that changes logits [R, V] float32 in place, by tensor operations where the logits are, without waiting for the
device. All edits of a step are made on the host before the first one is applied.

An entry is one (row, token id) pair; each pair occurs at most once in an edit. Rows may belong to different
sequences or to the same one, so the entries of a row contain all that the edit depends on.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.types.answer import SequenceError
from faser.types.arrays import Ints

LogitsEdit = Callable[[Tensor], None]
Asked = TypeVar("Asked")  # what a processor remembers of a slot

_LARGEST = torch.finfo(torch.float32).max
_CERTAIN = 1e6  # a logit beside which the probability of every other token is 0


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """R rows of a step.

    slots: of the rows; may repeat.
    positions: of the tokens that the rows sample.
    drafts: per row, the draft tokens before it, which count as output of its sequence.
    """

    slots: Sequence[int]
    positions: Sequence[int]
    drafts: Sequence[tuple[int, ...]]

    def of(self, slots: Container[int]) -> list[int]:
        """The rows that belong to one of these slots, ascending."""
        return [row for row, slot in enumerate(self.slots) if slot in slots]


class LogitsProcessor(ABC, Generic[Asked]):
    """Edits the logits of the requests that ask for it. A new one has to say `start` and `edit`.

    reads_output: whether its edits depend on the output; only then is `accept` called.
    without_token: after an edit, the slots that get no token in this step, whatever their logits; with the reason
        why they cannot go on, or None where their rows are to be computed again.
    """

    reads_output = False

    def __init__(self) -> None:
        self._by_slot: dict[int, Asked] = {}
        self.without_token: Mapping[int, SequenceError | None] = {}

    @property
    def slots(self) -> Collection[int]:
        """Slots whose request asks for this processor. While there are none, a step does not call it."""
        return self._by_slot

    @abstractmethod
    def start(self, start: SequenceStart) -> None:
        """A sequence takes over a free slot; tokens that it has generated already are part of its output."""

    @abstractmethod
    def edit(self, rows: ProcessedRows) -> LogitsEdit | None:
        """Return the edit of these rows' logits; None: none. Changes nothing."""

    def accept(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Each slot's sequence is extended by its token, in this order; a slot may occur several times."""
        raise AssertionError(f"its edits do not depend on {token_ids} of slots {slots}")

    def is_late(self, slot: int) -> bool:  # noqa: ARG002
        """Return whether the slot's next edit is still being computed; it need not be one of `slots`."""
        return False

    def release(self, slot: int) -> None:
        """The slot is free; it need not be one of `slots`."""
        self._by_slot.pop(slot, None)


def distinct(token_ids: Iterable[int], vocab_size: int) -> Ints:
    """Return the distinct ids [N], ascending. Requests with ids outside the vocabulary are refused before."""
    found = np.unique(np.array(tuple(token_ids), dtype=np.int64))
    assert not len(found) or 0 <= found[0] <= found[-1] < vocab_size, "token id outside the vocabulary"
    return found


@dataclass(frozen=True, slots=True)
class Entries:
    """N entries in M rows of logits.

    rows: [M], ascending.
    sizes: [M], how many entries a row has.
    token_ids: [N], row after row.

        rows         |   0   |     3     |  4  |    sizes 2, 3, 1
        token_ids    |  7  1 |  2  5  9  |  0  |
    """

    rows: Ints
    sizes: Ints
    token_ids: Ints

    @classmethod
    def of(cls, rows: Sequence[int], token_ids: Sequence[Ints]) -> "Entries":
        """token_ids: those of each of the rows."""
        sizes = np.array([len(each) for each in token_ids], dtype=np.int64)
        return cls(np.array(rows, dtype=np.int64), sizes, np.concatenate(token_ids))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """An index of logits."""
        return to_device(self.rows.repeat(self.sizes), device), to_device(self.token_ids, device)


def add_bias(logits: Tensor, at: Entries, bias: NDArray[np.float32]) -> None:
    """Add bias [N] to the entries."""
    logits.index_put_(at.on(logits.device), to_device(bias, logits.device), accumulate=True)


def allow_only(logits: Tensor, allowed: Entries) -> None:
    """In the rows of the entries, give every token without an entry a probability of exactly 0."""
    at = allowed.on(logits.device)
    kept = logits[at]
    logits[to_device(allowed.rows, logits.device)] = -torch.inf
    logits[at] = kept


def force(logits: Tensor, at: Entries) -> None:
    """Give the entries a probability of exactly 1; a later edit that forbids one leaves its row as it was."""
    logits[at.on(logits.device)] = _CERTAIN


def forbid(logits: Tensor, at: Entries) -> None:
    """Give the entries a probability of exactly 0."""
    logits[at.on(logits.device)] = -torch.inf


def mask(logits: Tensor, rows: Ints, words: Ints) -> None:
    """Forbid the tokens whose bits are 0, by tensor operations: see MaskKernel."""
    at, given = to_device(rows, logits.device), to_device(words, logits.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=given.device)
    bits = (given.view(torch.uint8)[:, :, None] >> shifts) & 1  # the machine's integers begin with the low byte
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[at] = logits[at].masked_fill_(~allowed, -torch.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPenalties:
    """Per entry, [N] float64 each. output_counts: how often the row's sequence has generated the token so far."""

    output_counts: NDArray[np.float64]
    repetition: NDArray[np.float64]
    frequency: NDArray[np.float64]
    presence: NDArray[np.float64]


def penalise(logits: Tensor, at: Entries, penalties: EntryPenalties) -> None:
    """Make tokens that occurred less likely. The entries: every token of the row's prompt and output.

    Repetition (Keskar et al., arXiv:1909.05858, section 4.1): a positive logit is divided by it, a negative
    one multiplied. Then frequency * count and presence are subtracted where the count is not 0. A result outside
    the range of float32 becomes the nearest end of it, so no penalty turns a logit into infinity.
    """
    device, place = logits.device, at.on(logits.device)
    counts, repetition = to_device(penalties.output_counts, device), to_device(penalties.repetition, device)
    values = logits[place].double()
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= to_device(penalties.frequency, device) * counts
    values -= to_device(penalties.presence, device) * (counts > 0)
    logits[place] = values.clamp_(-_LARGEST, _LARGEST).float()


def edit_rows(logits: Tensor, rows: Sequence[int], function: Callable[[Tensor], Tensor]) -> None:
    """Replace these rows [M] by function([M, V]), for processors with an arithmetic of their own."""
    at = to_device(np.array(rows, dtype=np.int64), logits.device)
    logits.index_copy_(0, at, function(logits.index_select(0, at)))


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """The host does not wait for the copy."""
    found = torch.from_numpy(values)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)
