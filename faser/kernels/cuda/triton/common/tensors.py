"""What a kernel may be given: checks of tensors, by name, before a launch can read past one of them."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from faser.errors import EngineError

jit: Callable[..., Any] = triton.jit
next_power_of_2: Callable[[int], int] = triton.next_power_of_2


def jit_for_any(*counts: str) -> Callable[[Any], Any]:
    """A kernel that is compiled once for all values of these arguments, not for 1 and for 16 again."""
    decorator: Callable[[Any], Any] = jit(do_not_specialize=counts)
    return decorator


# No product and sum become one: they are rounded one by one, as on the CPU.
EXACT = {"enable_fp_fusion": False}


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype, like: Tensor) -> None:
    """A contiguous tensor of this shape, of one of these types, on the device of `like`.

    Raises EngineError, which names what is wrong.
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
    """As `expect`, of a matrix whose rows may lie apart, each of them in line. Raises EngineError."""
    if tensor.dim() == 2 and tensor.numel() and tensor.stride(1) != 1:
        raise EngineError(f"{name} has strides {tensor.stride()}; the kernel needs each of its rows in line")
    if tuple(tensor.shape) != shape:
        raise EngineError(f"{name} has shape {tuple(tensor.shape)}; the kernel needs {shape}")
    if tensor.dtype not in dtypes:
        raise EngineError(f"{name} is {tensor.dtype}; the kernel needs {' or '.join(map(str, dtypes))}")
    if tensor.device != like.device:
        raise EngineError(f"{name} is on {tensor.device}; the other tensors are on {like.device}")
