"""The contract of kernels that accept or reject all sampled drafts of a step where the logits are.

They give the same tokens, bit for bit, as engine/execution/verifiers/rejection.py. Rows lie sequence after
sequence:

    row          |  0    1    2    |   3   |   4     5    |
    first_row    |  0              |   3   |   4          |  end 6
    drafted      |  x_1  x_2   -   |   -   |   x_1   -    |   - is NO_TOKEN: the last row judges no draft token
    draft_probs  |  0    1         |       |   2          |   one line for each draft token
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from faser.kernels.interface.sampling.sampling_kernels import Ints
from faser.kernels.interface.sampling.sampling_metadata import SamplingMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionInputs:
    """S sequences, R rows, T = R - S draft tokens. first_row: [S + 1]. drafted: [R]. metadata: of the R rows."""

    first_row: Ints
    drafted: Ints
    metadata: SamplingMetadata


class RejectionKernels(Protocol):
    """Rejection sampling of drafts that come with their probabilities."""

    def judge(self, logits: Tensor, drafts: RejectionInputs, draft_probs: Tensor) -> tuple[Ints, Ints]:
        """[S] how many draft tokens are accepted, and [S] the bonus or recovered token that follows them.

        A row that has a NaN or no finite maximum accepts nothing; a sequence that ends at such a row gets
        NO_TOKEN. logits: [R, V] float32, each row contiguous, after the logits processors; overwritten.
        draft_probs: [T, V] float64, the distribution that each draft token was drawn from. Waits for the device
        once, at its end.
        """
        ...
