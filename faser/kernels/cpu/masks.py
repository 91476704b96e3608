"""Masks of logits by the native kernel: turns arrays into addresses. The arithmetic is in native/masks.cpp."""

import ctypes

from torch import Tensor

from faser.kernels.cpu.thread_pools import LanePools
from faser.kernels.interface.sampling import Ints


class CpuMaskKernel:
    """See MaskKernel. pools: of the backend, kept alive here too. pool: address of the thread pool in use."""

    def __init__(self, library: ctypes.CDLL, pools: LanePools, pool: int) -> None:
        self._pools = pools
        self._pool = pool
        self._call = library.faser_mask

    def use(self, pool: int) -> None:
        """Run on these threads from the next call on."""
        self._pool = pool

    def __call__(self, logits: Tensor, rows: Ints, words: Ints) -> None:
        assert logits.stride(1) == 1, "the logits of a row are not contiguous"
        assert words.shape[1] * 64 >= logits.shape[1], "the mask is shorter than a row"
        self._call(
            self._pool,
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            rows.ctypes.data,
            len(rows),
            words.ctypes.data,
            words.strides[0] // words.itemsize,
        )
