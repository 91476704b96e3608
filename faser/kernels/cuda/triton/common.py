"""Code shared by Triton kernels: argument checks, uploads, bits of 8-bit floats, the ends of norm and gate.

Bits of 8-bit floats are made by integer arithmetic. The device's own conversion is not used, because Triton's
interpreter rounds it differently: so tests without a GPU check the bits that a GPU writes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.device import Accelerator
from faser.kernels.interface.fp8 import FP8_MAX

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
_LINE = 2  # words: each array begins at a multiple of 16 bytes, so that Triton compiles for such addresses only
_LIMIT = tl.constexpr(FP8_MAX)
_SIZE_BITS = tl.constexpr(0x7FFFFFFF)
_NORMAL_FROM = tl.constexpr(0x3C800000)  # 2**-6, the least normal float8
_INFINITY = tl.constexpr(0x7F800000)
_BIAS_STEP = tl.constexpr((127 - 7) << 3)  # between the exponents of float32 and float8, above 3 bits of mantissa
_SUBNORMAL_UNIT = tl.constexpr(2.0**14)  # float32 numbers from here on are 2**-9 apart, as float8's subnormals
_SUBNORMAL_BITS = tl.constexpr(0x46800000)  # the same number's bits
_NOT_A_NUMBER = tl.constexpr(0x7F)
_CLAMP, _GAIN = tl.constexpr(7.0), tl.constexpr(1.702)  # of swigluoai
ACTIVATIONS = ("silu", "gelu_tanh", "swigluoai")


def row_warps(width: int) -> int:
    """Warps of a program that keeps a row of this width in registers. Raises EngineError beyond WIDEST_ROW."""
    if width > WIDEST_ROW:
        raise EngineError(f"rows have {width} values; the kernel takes at most {WIDEST_ROW}")
    return max(1, min(_MOST_WARPS, next_power_of_2(width) // _ELEMENTS_A_WARP))


def expect(name: str, tensor: Tensor | None, shape: tuple[int, ...], *dtypes: torch.dtype, like: Tensor) -> None:
    """Check for a contiguous tensor of this shape, of one of these dtypes, on the device of `like`.

    An optional one that is missing fits. Raises EngineError that names the tensor and the difference.
    """
    if tensor is not None:
        _expect_kind(name, tensor, shape, dtypes, like)
        if not tensor.is_contiguous():
            raise EngineError(f"{name} has strides {tensor.stride()}; the kernel needs it contiguous")


def expect_lines(
    name: str, tensor: Tensor | None, shape: tuple[int, ...], *dtypes: torch.dtype, like: Tensor
) -> None:
    """Check a matrix as `expect` does; rows are contiguous, but gaps may lie between them. Raises EngineError."""
    if tensor is not None:
        if tensor.dim() == 2 and tensor.numel() and tensor.stride(1) != 1:
            raise EngineError(f"{name} has strides {tensor.stride()}; the kernel needs contiguous rows")
        _expect_kind(name, tensor, shape, dtypes, like)


def _expect_kind(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], like: Tensor
) -> None:
    if tuple(tensor.shape) != shape:
        raise EngineError(f"{name} has shape {tuple(tensor.shape)}; the kernel needs {shape}")
    if tensor.dtype not in dtypes:
        raise EngineError(f"{name} is {tensor.dtype}; the kernel needs {' or '.join(map(str, dtypes))}")
    if tensor.device != like.device:
        raise EngineError(f"{name} is on {tensor.device}; the other tensors are on {like.device}")


@jit
def normalised(value, squares, width, eps, weight):
    """value, of the rows' type, divided by the root of its mean square, times weight; the same type.

    squares: float32, the sum of the squares of the whole row.
    """
    factor = 1.0 / tl.sqrt(squares / width + eps)
    scaled = (value.to(tl.float32) * factor).to(value.dtype)
    return (scaled.to(tl.float32) * weight.to(tl.float32)).to(value.dtype)


@jit
def gated(gate, up):
    """silu(gate) * up, float32. gate, up: any float type."""
    wide = gate.to(tl.float32)
    return wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)


@jit
def gelu_gated(gate, up):
    """gelu(gate) * up, float32, with the tanh in place of the error function. gate, up: any float type."""
    wide = gate.to(tl.float32)
    inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
    return wide / (1.0 + tl.exp(-2.0 * inner)) * up.to(tl.float32)


@jit
def clamped_gated(gate, up):
    """Compute swigluoai of families/architecture.py: clamped gate and up, float32. gate, up: any float type."""
    wide, other = gate.to(tl.float32), up.to(tl.float32)
    wide = tl.where(wide > _CLAMP, _CLAMP, wide)  # what is no number stays none
    other = tl.where(other > _CLAMP, _CLAMP, tl.where(other < -_CLAMP, -_CLAMP, other))
    return wide / (1.0 + tl.exp(wide * -_GAIN)) * (other + 1.0)


@jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """Compute the gate that Backend.gate calls ACTIVATION, float32. gate, up: any float type."""
    if ACTIVATION == "gelu_tanh":
        found = gelu_gated(gate, up)
    elif ACTIVATION == "swigluoai":
        found = clamped_gated(gate, up)
    else:
        found = gated(gate, up)
    return found


@jit
def code(value):
    """The bits of float8_e4m3fn nearest to float32 values of at most 448, ties to even, as int32.

    A normal number loses 20 bits of its mantissa by rounding; a carry may run into the exponent. A subnormal
    number is added to a number so large that the sum is rounded to the right multiple.
    """
    bits = value.to(tl.int32, bitcast=True)
    size = bits & _SIZE_BITS
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - _BIAS_STEP
    subnormal = (tl.abs(value) + _SUBNORMAL_UNIT).to(tl.int32, bitcast=True) - _SUBNORMAL_BITS
    found = tl.where(size < _NORMAL_FROM, subnormal, normal)
    found = tl.where(size > _INFINITY, _NOT_A_NUMBER, found)
    return found | ((bits >> 24) & 0x80)


@jit
def saturated_code(value):
    """Return `code` of any values: magnitudes above 448, infinities included, become 448; a NaN stays a NaN."""
    value = tl.where(value > _LIMIT, _LIMIT, value)
    return code(tl.where(value < -_LIMIT, -_LIMIT, value))


def upload_words(accelerator: Accelerator, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
    """The arrays' bits on the device, [N] int64 each. arrays: [N] each, of 64-bit numbers."""
    starts = [0]
    for each in arrays:
        starts.append(starts[-1] + -(-len(each) // _LINE) * _LINE)
    host = accelerator.host_numbers(max(starts[-1], 1), torch.int64)
    words = host.numpy()
    for start, each in zip(starts, arrays, strict=False):
        words[start : start + len(each)] = each.view(np.int64)
    sent = accelerator.upload(host)
    return [sent[start : start + len(each)] for start, each in zip(starts, arrays, strict=False)]
