"""The integers of AWQ, GPTQ and compressed-tensors checkpoints, taken out of the 32-bit words that hold them.

A word holds 8 integers of 4 bits or 4 of 8 bits, from the lowest bits on. K inputs, N outputs, G groups of a row;
w words an axis:

    layout           integers                zero points                    scales
    awq              qweight [K, N w]        qzeros [G, N w]                scales [G, N]
    gptq             qweight [K w, N]        qzeros [G, N w]                scales [G, N]
    pack-quantized   weight_packed [N, K w]  weight_zero_point [N w, G]     weight_scale [N, G]
    int-quantized    weight [N, K] int8      weight_zero_point [N, G] int8  weight_scale [N, G]

In a word of AWQ, integer i is that of column _AWQ_ORDER[i] of eight. A weight is (integer - zero point) * scale,
all of them unsigned; compressed-tensors adds half of the range to both before packing. GPTQ (checkpoint_format
gptq) stores a zero point less one, modulo the range.

Sources: the packing of AutoAWQ (WQLinear_GEMM), AutoGPTQ (QuantLinear) and compressed-tensors (pack_to_int32).
"""

import torch
from torch import Tensor

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_codes(words: Tensor) -> Tensor:
    """[N, K] uint8 of words [K, N / 8] int32."""
    across = words.t().contiguous()
    width, depth = across.shape
    codes = torch.empty((width, 8, depth), dtype=torch.uint8)
    for place, column in enumerate(_AWQ_ORDER):
        codes[:, column] = (across >> 4 * place & 15).to(torch.uint8)
    return codes.view(8 * width, depth)


def codes_of_words(words: Tensor, bits: int) -> Tensor:
    """[R, C * 32 / bits] uint8 of words [R, C] int32: their integers in order."""
    rows, width = words.shape
    octets = words.contiguous().flatten().view(torch.uint8).view(rows, 4 * width)
    if bits == 8:
        return octets
    codes = torch.empty((rows, 4 * width, 2), dtype=torch.uint8)
    torch.bitwise_and(octets, 15, out=codes[..., 0])
    torch.bitwise_right_shift(octets, 4, out=codes[..., 1])
    return codes.view(rows, 8 * width)


def codes_of_bytes(values: Tensor) -> Tensor:
    """[N, K] uint8 of signed bytes: 128 more."""
    return values.contiguous().view(torch.uint8) ^ 128
