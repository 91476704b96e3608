"""Small arrays on their way to the device for one eager step, through pinned memory where the device has it.

A copy from other memory makes the host wait until the driver has read it.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.interface.backend import Backend
from faser.kernels.interface.graph_capture import StagingBuffer

_LEAST_NUMBERS = 64  # of a staging buffer; sizes are powers of 2


class StagedNumbers:
    """Sends whole numbers. Each size has a staging buffer of its own, made at its first use."""

    def __init__(self, backend: Backend) -> None:
        self._device = backend.device
        self._capture = backend.graph_capture
        self._buffers: dict[int, StagingBuffer] = {}

    def send(self, *arrays: NDArray[np.int64]) -> list[Tensor]:
        """The arrays on the device, valid until the next call. Does not wait for the device."""
        if self._capture is None:
            return [torch.from_numpy(each).to(self._device) for each in arrays]
        ends = np.cumsum([len(each) for each in arrays]).tolist()
        capacity = max(_LEAST_NUMBERS, 1 << (ends[-1] - 1).bit_length() if ends[-1] else 0)
        buffer = self._buffers.get(capacity)
        if buffer is None:
            buffer = self._buffers[capacity] = self._capture.staging_buffer(capacity, torch.int64)
        np.concatenate(arrays, out=buffer.host()[: ends[-1]])
        buffer.send()
        starts = [0, *ends]
        return [buffer.device[start:end] for start, end in zip(starts, ends, strict=False)]
