"""The reference of short convolutions: interface/short_conv.py with torch, sequence by sequence."""

import torch
from torch import Tensor
from torch.nn import functional

from faser.kernels.interface.delta_net import StateStep
from faser.kernels.interface.short_conv import ConvShape, ShortConv
from faser.kernels.torch_delta_net import LayerStates, before, keep


def short_conv(
    bcx: Tensor, shape: ConvShape, net: ShortConv, held: LayerStates, step: StateStep, out: Tensor
) -> None:
    """Compute a short convolution: see Backend.short_conv."""
    past = shape.kernel - 1
    for slot, start, count, first in zip(step.slots, step.starts, step.counts, step.first_rows, strict=True):
        rows = slice(first, first + count)
        b, c, x = bcx[rows].chunk(3, -1)
        new, kept = b * x, held.inputs[slot]
        known = before(kept, max(start - past, 0), start)
        whole = functional.pad(torch.cat((known, new)).float(), (0, 0, past - len(known), 0))
        keep(kept, new, start)
        windows = torch.stack([whole[tap : tap + count] for tap in range(shape.kernel)], 1)
        out[rows] = (c * (windows * net.conv).sum(1)).to(out.dtype)
