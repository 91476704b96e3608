"""EncoderKernels in native code; see native/rows.cpp."""

import ctypes

import torch
from torch import Tensor

from faser.kernels.cpu import library as native_library
from faser.kernels.cpu.blocks import DTYPES
from faser.kernels.cpu.library import LanePools
from faser.optional import maybe
from faser.types.activation import Activation


class CpuEncoderKernels:
    """Kernels on the threads of a backend's pools."""

    def __init__(self, library: ctypes.CDLL, pools: LanePools) -> None:
        self._library, self._pools = library, pools

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        wide: Tensor | None,
        out: Tensor | None,
    ) -> None:
        for each in (x, wide, out):
            if each is not None:
                assert each.is_contiguous()
                assert each.shape == x.shape, (each.shape, x.shape)
        for each in (x, weight, wide, bias):
            assert each is None or each.dtype is torch.float32, each.dtype
        rows, width = x.shape
        self._library.faser_layer_norm(
            self._pools.address,
            x.data_ptr(),
            rows,
            width,
            weight.data_ptr(),
            maybe(Tensor.data_ptr, bias),
            eps,
            maybe(Tensor.data_ptr, wide),
            maybe(Tensor.data_ptr, out),
            native_library.FLOAT32 if out is None else DTYPES[out.dtype],
        )

    def activate(self, x: Tensor, activation: Activation) -> None:
        assert x.is_contiguous()
        rows, width = x.shape
        code = native_library.ACTIVATIONS[activation]
        self._library.faser_activate(self._pools.address, x.data_ptr(), rows, width, DTYPES[x.dtype], code)
