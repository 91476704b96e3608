"""The seam between the rejection verifier and kernels that give all its verdicts where the logits are.

The same tokens, bit for bit, as engine/execution/verifiers/rejection.py. Rows lie sequence after sequence:

    row          |  0    1    2    |   3   |   4     5    |
    first_row    |  0              |   3   |   4          |  end 6
    drafted      |  x_1  x_2   -   |   -   |   x_1   -    |   - is NO_TOKEN: the last row judges nothing
    draft_probs  |  0    1         |       |   2          |   one line a drafted token
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from faser.kernels.interface.sampling_kernels import Ints, TruncationParams, Words


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionInputs:
    """Of S sequences, R rows, T = R - S drafted tokens.

    first_row: [S + 1]. drafted: [R]. shaping: of the rows; a temperature of 0 takes the most likely token. seeds,
    positions: [R], of the rows' requests and of the tokens that rows choose.
    """

    first_row: Ints
    drafted: Ints
    shaping: TruncationParams
    seeds: Words
    positions: Ints


class RejectionKernels(Protocol):
    """Verdicts on drafts that were sampled."""

    def judge(self, logits: Tensor, drafts: RejectionInputs, draft_probs: Tensor) -> tuple[Ints, Ints]:
        """[S] how many drafted tokens are accepted, and [S] the sequence's own token behind them.

        A row where a NaN is or no finite maximum accepts nothing, and is NO_TOKEN where a sequence ends there.
        logits: [R, V] float32, rows in line, after bias, penalties and masks; overwritten. draft_probs: [T, V]
        float64, what each drafted token was drawn from. Waits for the device once, at its end.
        """
        ...
