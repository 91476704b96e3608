"""Arrays of the host for kernels, all in one copy that nobody waits for."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.cuda.device import Accelerator

_LINE = 2  # words: parts begin at multiples of 16 bytes, so that kernels are compiled for such addresses only


def upload_words(accelerator: Accelerator, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
    """The arrays on the device, [N] int64 each, as bits. arrays: one axis, 64 bits a number."""
    starts = [0]
    for each in arrays:
        starts.append(starts[-1] + -(-len(each) // _LINE) * _LINE)
    host = accelerator.host_numbers(max(starts[-1], 1), torch.int64)
    words = host.numpy()
    for start, each in zip(starts, arrays, strict=False):
        words[start : start + len(each)] = each.view(np.int64)
    sent = accelerator.upload(host)
    return [sent[start : start + len(each)] for start, each in zip(starts, arrays, strict=False)]
