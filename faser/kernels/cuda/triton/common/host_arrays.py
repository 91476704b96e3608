"""Uploads host arrays for a kernel, all in one asynchronous copy."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.cuda.device import Accelerator

_LINE = 2  # words: each array begins at a multiple of 16 bytes, so that Triton compiles for such addresses only


def upload_words(accelerator: Accelerator, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
    """The arrays' bits on the device, [N] int64 each. arrays: [N] each, of 64-bit numbers."""
    starts = [0]
    for each in arrays:
        starts.append(starts[-1] + -(-len(each) // _LINE) * _LINE)
    host = accelerator.host_numbers(max(starts[-1], 1), torch.int64)
    words = host.numpy()
    for start, each in zip(starts, arrays, strict=False):
        words[start : start + len(each)] = each.view(np.int64)
    sent = accelerator.upload(host)
    return [sent[start : start + len(each)] for start, each in zip(starts, arrays, strict=False)]
