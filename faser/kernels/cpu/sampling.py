"""The choice of tokens by the native kernels: turns arrays into addresses. The arithmetic: native/choose.cpp."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from faser.kernels.cpu import library as native_library
from faser.kernels.cpu.thread_pools import LanePools
from faser.kernels.interface.sampling_kernels import Ints, Reals, TruncationParams, Words, best_then_drawn


class CpuSamplingKernels:
    """See TokenChoice. pools: of the backend, kept alive here too. pool: address of the one in use."""

    def __init__(self, library: ctypes.CDLL, pools: LanePools, pool: int) -> None:
        self._pools = pools
        self._pool = pool
        self._best_call = library.faser_best
        self._draw_call = library.faser_draw
        self._nearest_call = library.faser_nearest
        self._masses_call = library.faser_masses
        self._philox_call = library.faser_philox

    def use(self, pool: int) -> None:
        """From the next call on, run on these threads."""
        self._pool = pool

    def best(self, logits: Tensor) -> Ints:
        return self.best_and_lead(logits)[0]

    def best_and_lead(self, logits: Tensor) -> tuple[Ints, Reals]:
        num_rows, width = logits.shape
        found, leads = np.empty(num_rows, dtype=np.int64), np.empty(num_rows)
        self._best_call(
            self._pool,
            logits.data_ptr(),
            _stride(logits),
            num_rows,
            width,
            found.ctypes.data,
            leads.ctypes.data,
        )
        return found, leads

    def take(self, logits: Tensor, shaping: TruncationParams, uniforms: Reals) -> Ints:
        return best_then_drawn(self, logits, shaping, uniforms)

    def draw(self, logits: Tensor, rows: Ints, best: Ints, shaping: TruncationParams, uniforms: Reals) -> Ints:
        found = np.empty(len(rows), dtype=np.int64)
        choice = _Choice(rows, best, shaping)
        self._draw_call(
            self._pool,
            logits.data_ptr(),
            _stride(logits),
            logits.shape[1],
            choice.address,
            len(rows),
            uniforms.ctypes.data,
            found.ctypes.data,
        )
        return found

    def nearest(
        self, logits: Tensor, rows: Ints, best: Ints, shaping: TruncationParams, uniforms: Reals, window: float
    ) -> tuple[Ints, Reals]:
        found, leads = np.empty(len(rows), dtype=np.int64), np.empty(len(rows))
        choice = _Choice(rows, best, shaping)
        self._nearest_call(
            self._pool,
            logits.data_ptr(),
            _stride(logits),
            logits.shape[1],
            choice.address,
            len(rows),
            uniforms.ctypes.data,
            window,
            found.ctypes.data,
            leads.ctypes.data,
        )
        return found, leads

    def masses(self, logits: Tensor, rows: Ints, best: Ints, shaping: TruncationParams) -> None:
        choice = _Choice(rows, best, shaping)
        self._masses_call(
            self._pool, logits.data_ptr(), _stride(logits), logits.shape[1], choice.address, len(rows)
        )

    def philox(self, counters: Words, keys: Words) -> Words:
        words = np.empty_like(counters)
        self._philox_call(counters.ctypes.data, keys.ctypes.data, counters.shape[1], words.ctypes.data)
        return words


class _Choice:
    """A FaserChoice, and the arrays it points to. address: its own."""

    __slots__ = ("_kept", "address")

    def __init__(self, rows: Ints, best: Ints, shaping: TruncationParams) -> None:
        arrays = (
            np.ascontiguousarray(rows),
            np.ascontiguousarray(best),
            np.ascontiguousarray(shaping.temperature),
            torch.from_numpy(shaping.min_p)
            .log()
            .float()
            .numpy(),  # rounded as engine/execution/sampling/distribution.py does
            np.ascontiguousarray(shaping.top_k),
            np.ascontiguousarray(shaping.top_p),
        )
        struct = native_library.ChoiceStruct(*(each.ctypes.data for each in arrays))
        self.address = ctypes.addressof(struct)
        self._kept = (struct, arrays)


def _stride(logits: Tensor) -> int:
    stride, step = logits.stride()
    assert step == 1, step
    return stride
