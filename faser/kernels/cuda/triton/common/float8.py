"""Bits of 8-bit floats, by integer arithmetic.

The device's own conversion is not used, because Triton's interpreter rounds it differently: so tests without a GPU
check the bits that a GPU writes.
"""

import triton.language as tl

from faser.kernels.cuda.triton.common.tensors import jit
from faser.kernels.interface.fp8 import FP8_MAX

_LIMIT = tl.constexpr(FP8_MAX)
_SIZE_BITS = tl.constexpr(0x7FFFFFFF)
_NORMAL_FROM = tl.constexpr(0x3C800000)  # 2**-6, the least normal float8
_INFINITY = tl.constexpr(0x7F800000)
_BIAS_STEP = tl.constexpr((127 - 7) << 3)  # between the exponents of float32 and float8, above 3 bits of mantissa
_SUBNORMAL_UNIT = tl.constexpr(2.0**14)  # float32 numbers from here on are 2**-9 apart, as float8's subnormals
_SUBNORMAL_BITS = tl.constexpr(0x46800000)  # the same number's bits
_NOT_A_NUMBER = tl.constexpr(0x7F)


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
    """As `code`, for any values: magnitudes above 448, infinities included, become 448; a NaN stays a NaN."""
    value = tl.where(value > _LIMIT, _LIMIT, value)
    return code(tl.where(value < -_LIMIT, -_LIMIT, value))
