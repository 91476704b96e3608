"""8-bit products on NVIDIA's tensor cores: a Triton kernel before cuBLAS, and one after it.

cuBLAS multiplies the values and gives float32 sums; one launch then applies scales, bias and residual. cuBLAS
could apply a scale per row itself, but only on compute capability 9, and it has no such kernel for few rows of
many columns, which is what decoding needs (pytorch/ao, issue 4582).

torch's requirements on dtypes, sizes and strides were read in its sources (ScaledBlas.cpp).
"""

import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.interface.fp8 import FP8, Fp8Linear, Fp8Products, Fp8Rows

LOWEST_CAPABILITY = (8, 9)
MULTIPLE = 16  # of both sizes of a weight: 16 bytes are what the tensor cores load at once
# A product of fewer rows takes longer (vllm, pull request 4691); it is padded with rows of arbitrary values.
LEAST_ROWS = 17


class ScaledFp8:
    """See Fp8Products. Three launches; allocates their intermediate tensors, from a graph's pool on capture."""

    def __init__(self, device: torch.device) -> None:
        from faser.kernels.cuda.triton.quantise import quantise_rows
        from faser.kernels.cuda.triton.scale import scale_sums

        self._quantise_rows = quantise_rows
        self._scale_sums = scale_sums
        self._one = torch.ones((), dtype=torch.float32, device=device)

    def check(self, weight: Fp8Rows) -> None:
        rows, columns = weight.values.shape
        if rows % MULTIPLE or columns % MULTIPLE:
            raise ConfigError(
                f"fp8 products need weights with sizes that are multiples of {MULTIPLE}; one is {rows} x {columns}"
            )

    def linear(self, x: Tensor, packed: Fp8Linear, out: Tensor, residual: Tensor | None) -> Tensor:
        rows, width = x.shape
        values = torch.empty((max(rows, LEAST_ROWS), width), dtype=FP8, device=x.device)
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        self._quantise_rows(x, values[:rows], scales)
        # Fast accumulation would keep some 14 bits of a sum (arXiv:2412.19437, section 3.3.2). The public
        # scaled_mm calls the same function on a GPU, but has no implementation on a CPU, where this can be tested.
        sums = torch._scaled_mm(
            values,
            packed.weight.values.t(),
            scale_a=self._one,
            scale_b=self._one,
            out_dtype=torch.float32,
            use_fast_accum=False,
        )
        return self._scale_sums(sums[:rows], scales, packed.weight.scales, packed.bias, residual, out)


def scaled_fp8(device: torch.device, capability: tuple[int, int]) -> Fp8Products | None:
    """The products for a device of this compute capability; None: its tensor cores have none. Imports Triton."""
    return ScaledFp8(device) if capability >= LOWEST_CAPABILITY else None
