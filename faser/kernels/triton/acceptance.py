"""Verdicts on drafts that are point masses: how many of each sequence's drafted tokens are the chosen ones.

The rows of a step lie sequence after sequence, γ + 1 of each, γ as it comes:

    first_row    |  0    1    2    |   3   |   4     5    |  end
    drafted      |  x_1  x_2   -   |   -   |   x_1   -    |   - is NO_TOKEN: the last row judges nothing

The rule is engine/spec/verifiers/coupled.py: accepted as long as the chosen token is the drafted one. One launch
for all sequences. Knows nothing of how tokens are chosen.
"""

import torch
import triton.language as tl
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.triton.masses import NO_ID
from faser.kernels.triton.tensors import expect, jit, next_power_of_2


@jit
def _accept(chosen, drafted, first_row, num_accepted, own, SPAN: tl.constexpr):
    s = tl.program_id(0)
    begin = tl.load(first_row + s)
    num_rows = tl.load(first_row + s + 1) - begin
    i = tl.arange(0, SPAN)
    inside = i < num_rows
    choice = tl.load(chosen + begin + i, mask=inside, other=NO_ID)
    draft = tl.load(drafted + begin + i, mask=inside, other=NO_ID)
    same = (choice == draft) & (draft != NO_ID) & (i < num_rows - 1)
    accepted = tl.min(tl.where(same, SPAN, i))
    tl.store(num_accepted + s, accepted)
    tl.store(own + s, tl.load(chosen + begin + accepted))


def accept_drafts(
    chosen: Tensor, drafted: Tensor, first_row: Tensor, num_accepted: Tensor, own: Tensor, *, max_draft: int
) -> None:
    """num_accepted [S] int32: drafted tokens before the first that was not chosen. own [S] int64: chosen there.

    chosen, drafted: [R] int64; NO_TOKEN as chosen accepts nothing, and is its sequence's own where it stops there.
    first_row: [S + 1] int32, where each sequence's rows begin, R at the end; each has from 1 to max_draft + 1.
    Raises EngineError for tensors that do not fit; what first_row says is trusted, for it is on the device.
    """
    num_sequences = len(first_row) - 1
    if max_draft < 0:
        raise EngineError(f"max_draft is {max_draft}; the least is 0")
    expect("chosen", chosen, (len(chosen),), torch.int64, like=chosen)
    expect("drafted", drafted, (len(chosen),), torch.int64, like=chosen)
    expect("first_row", first_row, (num_sequences + 1,), torch.int32, like=chosen)
    expect("num_accepted", num_accepted, (num_sequences,), torch.int32, like=chosen)
    expect("own", own, (num_sequences,), torch.int64, like=chosen)
    if num_sequences:
        span = next_power_of_2(max_draft + 1)
        _accept[(num_sequences,)](chosen, drafted, first_row, num_accepted, own, SPAN=span)
