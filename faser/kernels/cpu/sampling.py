"""Sampling and masks by the native kernels: turns arrays into addresses. See native/sampling.cpp and masks.cpp."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from faser.kernels.cpu import library as native_library
from faser.kernels.cpu.library import LanePools
from faser.kernels.interface.sampling import SamplingMetadata, best_then_drawn
from faser.optional import maybe
from faser.types.arrays import Floats, Ints, Words


class CpuMaskKernel:
    """Native mask kernel. pools: of the backend; the one in use computes."""

    def __init__(self, library: ctypes.CDLL, pools: LanePools) -> None:
        self._pools = pools
        self._call = library.faser_mask

    def __call__(self, logits: Tensor, rows: Ints, words: Ints) -> None:
        assert logits.stride(1) == 1, "the logits of a row are not contiguous"
        assert words.shape[1] * 64 >= logits.shape[1], "the mask is shorter than a row"
        self._call(
            self._pools.address,
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            rows.ctypes.data,
            len(rows),
            words.ctypes.data,
            words.strides[0] // words.itemsize,
        )


class CpuSamplingKernels:
    """Native sampling kernels. pools: of the backend; the one in use computes."""

    def __init__(self, library: ctypes.CDLL, pools: LanePools) -> None:
        self._pools = pools
        self._best_call = library.faser_best
        self._draw_call = library.faser_draw
        self._fixed_point_probs_call = library.faser_fixed_point_probs
        self._philox_call = library.faser_philox

    def best(self, logits: Tensor) -> Ints:
        return self.best_and_margin(logits)[0]

    def best_and_margin(self, logits: Tensor) -> tuple[Ints, Floats]:
        num_rows, width = logits.shape
        found, margins = np.empty(num_rows, dtype=np.int64), np.empty(num_rows)
        self._best_call(
            self._pools.address,
            logits.data_ptr(),
            _stride(logits),
            num_rows,
            width,
            found.ctypes.data,
            margins.ctypes.data,
        )
        return found, margins

    def take(self, logits: Tensor, metadata: SamplingMetadata, noise: Words) -> Ints:
        return best_then_drawn(self, logits, metadata, noise)

    def draw(self, logits: Tensor, rows: Ints, best: Ints, metadata: SamplingMetadata, noise: Words) -> Ints:
        found = np.empty(len(rows), dtype=np.int64)
        self._draw(logits, _Rows(rows, best, metadata), noise, found, None)
        return found

    def predict(
        self,
        logits: Tensor,
        rows: Ints,
        best: Ints,
        metadata: SamplingMetadata,
        noise: Words,
        token_ids: Ints | None = None,
    ) -> tuple[Ints, Floats]:
        found, margins = np.empty(len(rows), dtype=np.int64), np.empty(len(rows))
        self._draw(logits, _Rows(rows, best, metadata, token_ids), noise, found, margins)
        return found, margins

    def _draw(self, logits: Tensor, asked: "_Rows", noise: Words, found: Ints, margins: Floats | None) -> None:
        self._draw_call(
            self._pools.address,
            logits.data_ptr(),
            _stride(logits),
            logits.shape[1],
            asked.address,
            len(found),
            noise.ctypes.data,
            found.ctypes.data,
            native_library.address_of(margins),
        )

    def fixed_point_probs(self, logits: Tensor, rows: Ints, best: Ints, metadata: SamplingMetadata) -> None:
        asked = _Rows(rows, best, metadata)
        self._fixed_point_probs_call(
            self._pools.address, logits.data_ptr(), _stride(logits), logits.shape[1], asked.address, len(rows)
        )

    def philox(self, counters: Words, keys: Words) -> Words:
        words = np.empty_like(counters)
        self._philox_call(counters.ctypes.data, keys.ctypes.data, counters.shape[1], words.ctypes.data)
        return words


class _Rows:
    """A FaserChoice, which names rows and how they are sampled, and the arrays it points to. address: its own."""

    __slots__ = ("_kept", "address")

    def __init__(self, rows: Ints, best: Ints, metadata: SamplingMetadata, ids: Ints | None = None) -> None:
        arrays = (
            np.ascontiguousarray(rows),
            np.ascontiguousarray(best),
            np.ascontiguousarray(metadata.temperature),
            # Rounded as engine/execution/sampling/distribution.py does.
            torch.from_numpy(metadata.min_p).log().float().numpy(),
            np.ascontiguousarray(metadata.top_k),
            np.ascontiguousarray(metadata.top_p),
            maybe(np.ascontiguousarray, ids),
        )
        struct = native_library.ChoiceStruct(*map(native_library.address_of, arrays))
        self.address = ctypes.addressof(struct)
        self._kept = (struct, arrays)


def _stride(logits: Tensor) -> int:
    stride, step = logits.stride()
    assert step == 1, step
    return stride
