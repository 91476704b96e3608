"""The seam between the sampler and the arithmetic that edits logits before tokens are chosen.

What requests ask for arrives as arrays on the host, ragged and of all rows at once, so that a device gets it in
one copy. Knows nothing of slots and requests; engine/execution/sampling/logits_processors.py defines the arithmetic.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.interface.sampling_kernels import Ints, Reals


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitPositions:
    """N places in logits [R, V], of M of the rows. Each place occurs once.

    rows: [M], ascending. sizes: [M], how many places a row has. token_ids: [N], row after row.

        rows         |   0   |     3     |  4  |    sizes 2, 3, 1
        token_ids    |  7  1 |  2  5  9  |  0  |
    """

    rows: Ints
    sizes: Ints
    token_ids: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """values: [N] float32, to be added."""

    at: LogitPositions
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """at: every token of a row's prompt and output. output_counts: [N], how often it was generated.

    repetition, frequency, presence: [M] float64, of the rows.
    """

    at: LogitPositions
    output_counts: Reals
    repetition: Reals
    frequency: Reals
    presence: Reals


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsEdits:
    """What is done to logits, in the order in which it stands here; None where no row asks for it.

    allowed: these rows keep the named tokens only, which ascend within a row. forbidden: tokens that lose all
    their probability.
    """

    bias: Bias | None = None
    penalties: Penalties | None = None
    allowed: LogitPositions | None = None
    forbidden: LogitPositions | None = None

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.bias, self.penalties, self.allowed, self.forbidden))


class LogitsProcessorKernels(Protocol):
    """Every implementation gives the same bits."""

    def apply(self, logits: Tensor, edits: LogitsEdits) -> None:
        """Edit logits [R, V] float32, rows in line, in place. Does not wait for the device."""
        ...
