"""Checks of a kernel's tensor arguments, by name, before a launch could read out of bounds."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from faser.errors import EngineError

jit: Callable[..., Any] = triton.jit
next_power_of_2: Callable[[int], int] = triton.next_power_of_2


def jit_for_any(*counts: str) -> Callable[[Any], Any]:
    """Like jit, but compiles once for all values of these arguments, not again for 1 and multiples of 16."""
    decorator: Callable[[Any], Any] = jit(do_not_specialize=counts)
    return decorator


# Products and sums are not fused: each is rounded by itself, as on the CPU.
EXACT = {"enable_fp_fusion": False}

WIDEST_ROW = 1 << 16  # of kernels that keep a row in the registers of one program
_ELEMENTS_A_WARP = 512
_MOST_WARPS = 32


def row_warps(width: int) -> int:
    """Warps of a program that keeps a row of this width in registers. Raises EngineError beyond WIDEST_ROW."""
    if width > WIDEST_ROW:
        raise EngineError(f"rows have {width} values; the kernel takes at most {WIDEST_ROW}")
    return max(1, min(_MOST_WARPS, next_power_of_2(width) // _ELEMENTS_A_WARP))


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype, like: Tensor) -> None:
    """Check for a contiguous tensor of this shape, of one of these dtypes, on the device of `like`.

    Raises EngineError that names the tensor and the difference.
    """
    if tuple(tensor.shape) != shape:
        raise EngineError(f"{name} has shape {tuple(tensor.shape)}; the kernel needs {shape}")
    if tensor.dtype not in dtypes:
        raise EngineError(f"{name} is {tensor.dtype}; the kernel needs {' or '.join(map(str, dtypes))}")
    if tensor.device != like.device:
        raise EngineError(f"{name} is on {tensor.device}; the other tensors are on {like.device}")
    if not tensor.is_contiguous():
        raise EngineError(f"{name} has strides {tensor.stride()}; the kernel needs it contiguous")


def expect_lines(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype, like: Tensor) -> None:
    """As `expect`, for a matrix whose rows are contiguous but may have gaps between them. Raises EngineError."""
    if tensor.dim() == 2 and tensor.numel() and tensor.stride(1) != 1:
        raise EngineError(f"{name} has strides {tensor.stride()}; the kernel needs contiguous rows")
    if tuple(tensor.shape) != shape:
        raise EngineError(f"{name} has shape {tuple(tensor.shape)}; the kernel needs {shape}")
    if tensor.dtype not in dtypes:
        raise EngineError(f"{name} is {tensor.dtype}; the kernel needs {' or '.join(map(str, dtypes))}")
    if tensor.device != like.device:
        raise EngineError(f"{name} is on {tensor.device}; the other tensors are on {like.device}")
