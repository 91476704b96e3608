"""The contract of kernels that edit logits before tokens are sampled, and the edits that they know.

An edit is what one logits processor asks for in one step: arrays on the host, ragged and of all rows at once, so
that a device gets them in one copy. engine/execution/sampling/logits_processors/torch_kernels.py defines the
arithmetic. RowsEdit carries its own arithmetic, for logits processors that have no kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.interface.sampling.sampling_kernels import Ints, Reals


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitPositions:
    """N entries of logits [R, V], in M of the rows. Each entry occurs once.

    rows: [M], ascending. sizes: [M], how many entries a row has. token_ids: [N], row after row.

        rows         |   0   |     3     |  4  |    sizes 2, 3, 1
        token_ids    |  7  1 |  2  5  9  |  0  |
    """

    rows: Ints
    sizes: Ints
    token_ids: Ints

    @classmethod
    def of(cls, rows: Sequence[int], token_ids: Sequence[Ints]) -> "LogitPositions":
        """token_ids: those of each of the rows."""
        return cls(
            rows=np.array(rows, dtype=np.int64),
            sizes=np.array([len(each) for each in token_ids], dtype=np.int64),
            token_ids=np.concatenate(token_ids),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasEdit:
    """Adds values [N] float32 to the entries."""

    at: LogitPositions
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyEdit:
    """Makes tokens that occurred less likely. at: every token of a row's prompt and output.

    output_counts: [N], how often the row's sequence has generated the token. repetition, frequency, presence: [M]
    float64, of the rows.
    """

    at: LogitPositions
    output_counts: Reals
    repetition: Reals
    frequency: Reals
    presence: Reals


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowOnlyEdit:
    """Gives every token of the rows that has no entry a probability of 0. Entries ascend within a row."""

    at: LogitPositions


@dataclass(frozen=True, slots=True, kw_only=True)
class ForbidEdit:
    """Gives the entries a probability of 0."""

    at: LogitPositions


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskEdit:
    """Gives every token of the rows whose bit is 0 a probability of 0.

    rows: [M], ascending. words: [M, W], each row contiguous; token i is bit i % 64 of word i // 64, and W * 64 is
    at least V.
    """

    rows: Ints
    words: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsEdit:
    """Replaces whole rows by function(rows), for processors without a kernel of their own.

    rows: [M], ascending. function: from [M, V] float32 to the same shape and type, each row by itself.
    """

    rows: Ints
    function: Callable[[Tensor], Tensor]

    def apply(self, logits: Tensor) -> None:
        """Edit logits [R, V] in place, by tensor operations on their device."""
        at = torch.from_numpy(self.rows).to(logits.device)
        logits.index_copy_(0, at, self.function(logits.index_select(0, at)))


LogitsEdit = BiasEdit | PenaltyEdit | AllowOnlyEdit | ForbidEdit | MaskEdit | RowsEdit


class MaskKernel(Protocol):
    """Applies a MaskEdit by itself."""

    def __call__(self, logits: Tensor, edit: MaskEdit) -> None:
        """logits: [R, V] float32, each row contiguous; edited in place."""
        ...


class LogitsProcessorKernels(Protocol):
    """Every implementation gives the same bits."""

    def apply(self, logits: Tensor, edits: Sequence[LogitsEdit]) -> None:
        """Edit logits [R, V] float32, each row contiguous, in place and in order.

        Does not wait for the device, except for what a RowsEdit does.
        """
        ...
