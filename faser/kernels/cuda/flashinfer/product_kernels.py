"""FlashInfer's products of bfloat16, for where they are faster than torch's: cublasLt's algorithms, and few rows.

    algorithm 0 …   cublasLt's own list for a product, the likeliest first; torch takes what cuBLAS takes of them
    tinygemm        for few rows; the weights' first tiles are on their way before the kernel in front has ended

Both are called as FlashInfer's Python calls them (gemm_base.py, routergemm.py), without its search of its own.
Kernels of one backend run one after the other, so all its products share a workspace.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from faser.kernels.cuda.flashinfer.build import Module, package_sources, spec_of

MOST_ALGORITHMS = 8
_ALGORITHM_BYTES = 64  # _CUBLASLT_ALGO_BYTES of FlashInfer
_WORKSPACE_BYTES = 32 << 20  # what cuBLAS takes on Hopper
_FEW_ROWS = 16
_TILE_OUTPUTS, _TILE_INPUTS = 16, 64

_log = logging.getLogger("faser")

Product = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
"""Computes out [R, N] from x [R, K], weight [N, K] and bias [N] or None; all contiguous, inputs in bfloat16."""


class ProductKernels:
    """Kernels of one backend.

    modules: compiled ones by name, see build.PRODUCTS; missing ones have no ways. handle: cuBLAS's of the calling
    thread.
    """

    def __init__(
        self, device: torch.device, modules: dict[str, Any], handle: Callable[[], int] | None = None
    ) -> None:
        self._modules = modules
        self._handle = torch.cuda.current_blas_handle if handle is None else handle
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def ways(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> dict[str, Product]:
        """Return all kernels that compute such a product, by name."""
        found: dict[str, Product] = {}
        if "cublaslt" in self._modules and (bias is None or out.dtype is torch.bfloat16):
            algorithms = torch.zeros(MOST_ALGORITHMS * _ALGORITHM_BYTES, dtype=torch.uint8)
            given = (x, weight, bias, out, self._workspace, self._handle(), algorithms)
            for number in range(self._modules["cublaslt"].mm_bf16_cublaslt_get_algos(*given)):
                found[f"algorithm {number}"] = partial(self._by_algorithm, algorithms, number)
        fits = len(x) <= _FEW_ROWS and len(weight) % _TILE_OUTPUTS == 0 and x.shape[1] % _TILE_INPUTS == 0
        if "tinygemm" in self._modules and fits and out.dtype is torch.bfloat16:
            found["tinygemm"] = self._few_rows
        return found

    def _by_algorithm(
        self, algorithms: Tensor, number: int, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        given = (x, weight, bias, out, self._workspace, self._handle(), algorithms, number)
        self._modules["cublaslt"].mm_bf16_cublaslt_run_with_algo(*given)

    def _few_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        module = self._modules["tinygemm"]
        if bias is None:
            module.tinygemm2_nobias_op(x, weight, out, True)
        else:
            module.tinygemm2_op(x, weight, bias, out, True)


def load_products(modules: Iterable[Module], load: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Load compiled modules of products, by name; FlashInfer compiles what is missing, if it may.

    Those that cannot be loaded are left out with a warning: torch has its own products.
    """
    found = {}
    for each in modules:
        try:
            found[each.name] = _load(each.name) if load is None else load(each.name)
        except Exception as error:  # of the compiler, the loader, or FlashInfer's own
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            _log.warning(
                "products by %s are not tried: %s; to compile: faser env --build-kernels --only %s",
                each.name,
                reason,
                each.name,
            )
    return found


def load_blockscale(load: Callable[[str], Any] | None = None) -> Any:
    """Return FlashInfer's product of blocks, ready to run; None: it cannot be loaded, and a warning says why."""
    module = load_products([Module(name="blockscale")], load).get("blockscale")
    if module is None:
        return None
    module.set_deepgemm_jit_include_dirs([str(package_sources() / "nv_internal" / "tensorrt_llm")])
    return module.init()


def _load(name: str) -> Any:
    return spec_of(name).build_and_load()
