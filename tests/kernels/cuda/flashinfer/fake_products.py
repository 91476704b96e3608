"""Stands for FlashInfer's compiled modules of products: their functions, on a CPU."""

from typing import Any

import torch
from torch import Tensor

HANDLE = 0x5EED
LARGEST_WORKSPACE = 64 << 20
_BYTES = 64  # of an algorithm


class FakeCublasLt:
    """count: of algorithms that a product has. refused: number of rows that no algorithm takes."""

    def __init__(self, count: int = 3, refused: int | None = None) -> None:
        self.count, self.refused = count, refused
        self.runs: list[tuple[int, int]] = []  # algorithm and rows

    def mm_bf16_cublaslt_get_algos(
        self,
        mat1: Tensor,
        mat2: Tensor,
        bias: Tensor | None,
        out: Tensor,
        workspace_buffer: Tensor,
        cublas_handle: int,
        algo_buffer: Tensor,
    ) -> int:
        self._check(bias, out, workspace_buffer, cublas_handle)
        assert out.shape == (len(mat1), len(mat2)), (out.shape, mat1.shape, mat2.shape)
        found = min(self.count, len(algo_buffer) // _BYTES)
        for number in range(found):
            algo_buffer[_BYTES * number] = 100 + number
        return found

    def mm_bf16_cublaslt_run_with_algo(
        self,
        mat1: Tensor,
        mat2: Tensor,
        bias: Tensor | None,
        out: Tensor,
        workspace_buffer: Tensor,
        cublas_handle: int,
        algo_buffer: Tensor,
        algo_idx: int,
    ) -> None:
        self._check(bias, out, workspace_buffer, cublas_handle)
        assert int(algo_buffer[_BYTES * algo_idx]) == 100 + algo_idx, "an algorithm that cublasLt did not give"
        if len(mat1) == self.refused:
            raise RuntimeError(
                "mm_bf16_cublaslt_run_with_algo failed: the requested functionality is not supported"
            )
        self.runs.append((algo_idx, len(mat1)))
        _multiply(mat1, mat2, bias, out)

    def _check(self, bias: Tensor | None, out: Tensor, workspace: Tensor, handle: int) -> None:
        assert handle == HANDLE
        assert 0 < workspace.nbytes <= LARGEST_WORKSPACE
        assert bias is None or out.dtype is torch.bfloat16, "a bias needs results in bfloat16"


class FakeTinyGemm:
    def __init__(self) -> None:
        self.runs: list[int] = []  # rows

    def tinygemm2_op(self, input: Tensor, weight: Tensor, bias: Tensor, output: Tensor, use_pdl: bool) -> None:
        assert use_pdl
        assert len(weight) % 16 == input.shape[1] % 64 == 0
        assert output.dtype is torch.bfloat16
        self.runs.append(len(input))
        _multiply(input, weight, bias, output)

    def tinygemm2_nobias_op(self, input: Tensor, weight: Tensor, output: Tensor, use_pdl: bool) -> None:
        self.tinygemm2_op(input, weight, torch.zeros(len(weight)).bfloat16(), output, use_pdl)


def fake_modules(**modules: Any) -> dict[str, Any]:
    """By default both, each with all that it computes."""
    return modules or {"cublaslt": FakeCublasLt(), "tinygemm": FakeTinyGemm()}


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Rows are dense, whatever their strides: so the compiled functions take them."""
    assert x.dtype is weight.dtype is torch.bfloat16
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert out.is_contiguous()
    found = x.float() @ weight.float().T
    out.copy_(found if bias is None else found + bias.float())
