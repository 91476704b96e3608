"""Ways to compute products of weights in 8-bit floats with scales of groups (triton/grouped_fp8.py).

    64 rows x 128 outputs …   other tiles of the Triton product, which leaves rows in 16 bits
    blockscale                FlashInfer's product for Hopper, of blocks of 128 x 128: rounds rows to 8 bits as
                              well, as the checkpoint's own arithmetic does; the kernel is DeepGEMM's

The last is called as FlashInfer's Python calls it (gemm_base.py, fp8_blockscale_gemm_sm90).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from faser.kernels.cuda.flashinfer.products import TorchProduct, with_residual
from faser.kernels.interface.fp8 import Fp8Linear

_BLOCK = 128
_OUTPUTS = 64  # of which blockscale takes multiples


class GroupedProducts:
    """Ways of one backend. runner: loads FlashInfer's, when it is first needed, or returns None."""

    def __init__(self, runner: Callable[[], Any] | None) -> None:
        self._load: Callable[[], Any] | None = runner
        self._runner: Any = None

    def ways(self, x: Tensor, packed: Fp8Linear, out: Tensor) -> dict[str, TorchProduct]:
        """Return all kernels that compute such a product but the first tiles, by name."""
        from faser.kernels.cuda.triton.grouped_fp8 import tiles_of

        found: dict[str, TorchProduct] = {
            f"{tiles.rows} rows x {tiles.outputs} outputs": partial(_tiled, tiles)
            for tiles in tiles_of(len(x))[1:]
        }
        weight = packed.weight
        outputs, inputs = weight.values.shape
        fits = weight.group == weight.lines == _BLOCK and inputs % _BLOCK == 0 and outputs % _OUTPUTS == 0
        if fits and packed.bias is None and out.dtype is torch.bfloat16:
            if self._load is not None:
                self._runner, self._load = self._load(), None
            if self._runner is not None:
                found["blockscale"] = partial(with_residual, self._by_blocks)
        return found

    def _by_blocks(self, x: Tensor, packed: Fp8Linear, out: Tensor) -> None:
        outputs, inputs = packed.weight.values.shape
        num_bytes = self._runner.get_workspace_size(len(x), outputs, inputs)
        if num_bytes:
            self._runner.configure_workspace(torch.empty(num_bytes, dtype=torch.uint8, device=x.device))
        self._runner.run_gemm(x, packed.weight.values, out, None, packed.weight.scales)


def _tiled(tiles: Any, x: Tensor, packed: Fp8Linear, out: Tensor, residual: Tensor | None) -> Tensor:
    from faser.kernels.cuda.triton.grouped_fp8 import grouped_product

    return grouped_product(x, packed.weight, packed.bias, out, residual, tiles=tiles)
