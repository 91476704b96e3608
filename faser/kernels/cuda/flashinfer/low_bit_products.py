"""Products with low-bit weights on a GPU: by codes as they are stored, or dequantised piece by piece for cuBLAS.

Up to SAME_ROWS rows the kernel that reads codes computes all, so a row's bits depend neither on the other rows nor
on their number. For more rows the faster way is measured by classes of their number, as in products.py: reading
codes, the kernel widens weights once for every 64 rows, while cuBLAS reads 16 bits of each, which were written
before.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.cuda.choices import Choices
from faser.kernels.cuda.flashinfer.device_kernels import CudaLinear, LowBitKernels
from faser.kernels.cuda.flashinfer.products import TorchProduct
from faser.kernels.cuda.low_bit import CudaLowBit, pack_low_bit
from faser.kernels.interface.low_bit.rows import LowBitRows

SAME_ROWS = 16
_CLASSES = (32, 64, 128, 256, 512)  # most rows of each; more rows are always dequantised
_DEQUANTISED, _AS_STORED = "dequantised", "as stored"
_TOLERANCE = 2.0**-6  # of the largest value: roundings of bfloat16
_PIECE_BYTES = 64 << 20  # of weights in 16 bits at a time


class LowBitProducts:
    """Products of one backend. by_torch: multiplies with weights in 16 bits."""

    def __init__(self, kernels: LowBitKernels, by_torch: TorchProduct, choices: Choices) -> None:
        self._kernels, self._by_torch, self._choices = kernels, by_torch, choices
        self._reads_codes: dict[tuple[Any, ...], bool] = {}

    def pack(self, weight: LowBitRows, bias: Tensor | None, device: torch.device) -> CudaLowBit:
        """See Backend.pack. Raises ConfigError for sizes without kernels."""
        packed = pack_low_bit(weight, bias, device)
        if packed.shape[0] == 0:
            raise ConfigError("a low-bit weight has no rows")
        return packed

    def linear(self, x: Tensor, packed: CudaLowBit, out: Tensor, residual: Tensor | None) -> Tensor:
        """See Backend.linear. Weights are rounded to the type of x."""
        if packed.order is not None:
            x = x.index_select(1, packed.order)
        run = self._as_stored if self._takes_codes(x, packed, out) else self._dequantised
        return run(x, packed, out, residual)

    def embed(self, token_ids: Tensor, packed: CudaLowBit, out: Tensor) -> Tensor:
        """See Backend.embed."""
        (matrix,) = packed.parts
        return self._kernels.lines(matrix, token_ids, out)

    def _takes_codes(self, x: Tensor, packed: CudaLowBit, out: Tensor) -> bool:
        """Measure the ways on random rows, before graphs are captured."""
        rows = len(x)
        if rows <= SAME_ROWS:
            return True
        most = next((each for each in _CLASSES if rows <= each), None)
        if most is None:
            return False
        known = (
            most,
            packed.shape,
            *(each.kind for each in packed.parts),
            packed.bias is None,
            x.dtype,
            out.dtype,
        )
        if known not in self._reads_codes:
            given = torch.randn((most, x.shape[1]), dtype=torch.float32, device=x.device).to(x.dtype)
            found = out.new_empty((most, out.shape[1]))
            runs: dict[str, Callable[..., Tensor]] = {_DEQUANTISED: self._dequantised, _AS_STORED: self._as_stored}
            ways = {name: partial(run, given, packed, found, None) for name, run in runs.items()}
            key = f"low-bit product, {', '.join(map(str, known))}".replace("torch.", "")
            self._reads_codes[known] = self._choices.fastest(key, ways, tolerance=_TOLERANCE) == _AS_STORED
        return self._reads_codes[known]

    def _as_stored(self, x: Tensor, packed: CudaLowBit, out: Tensor, residual: Tensor | None) -> Tensor:
        first = 0
        for matrix in packed.parts:
            own = slice(first, first + matrix.num_rows)
            bias = None if packed.bias is None else packed.bias[own]
            added = None if residual is None else residual[:, own]
            self._kernels.rows(x, matrix, out[:, own], bias=bias, residual=added)
            first += matrix.num_rows
        return out

    def _dequantised(self, x: Tensor, packed: CudaLowBit, out: Tensor, residual: Tensor | None) -> Tensor:
        """Piece by piece, in room that the next piece overwrites."""
        width = x.shape[1]
        most = max(64, _PIECE_BYTES // (width * x.element_size()) // 64 * 64)
        room = x.new_empty((min(most, packed.shape[0]), width))
        first = 0
        for matrix in packed.parts:
            for start in range(0, matrix.num_rows, most):
                count = min(most, matrix.num_rows - start)
                weight = self._kernels.dequantise(matrix, start, room[:count])
                own = slice(first + start, first + start + count)
                bias = None if packed.bias is None else packed.bias[own]
                added = None if residual is None else residual[:, own].contiguous()
                found = out.new_empty((len(x), count))
                out[:, own] = self._by_torch(x, CudaLinear(weight, bias), found, added)
            first += matrix.num_rows
        return out
