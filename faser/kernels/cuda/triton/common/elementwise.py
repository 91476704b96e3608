"""What a layer does to single numbers: the end of an RMS norm, and the gate. Both in float32."""

import triton.language as tl

from faser.kernels.cuda.triton.common.tensors import jit


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
