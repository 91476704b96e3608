"""Low-bit weights of the native backend: packed from the blocks of a file, multiplied and looked up.

The kernels are native/low_bit; their results are those that interface/low_bit/product.py defines, bit for bit.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.cpu.library import LowBitPartStruct, LowBitStruct
from faser.kernels.interface.low_bit.formats import BlockRows, LowBitRows

_COLUMNS = 16  # of a panel; vectors read a bias in whole panels
_SMALLEST_DEPTH = 32


class LowBitLinear:
    """A packed low-bit weight. address: of its FaserLowBit. num_bytes: of its panels and its bias."""

    __slots__ = ("_kept", "address", "columns", "depth", "num_bytes")

    def __init__(
        self, weight: LowBitRows, parts: list[tuple[LowBitPartStruct, Tensor]], bias: Tensor | None
    ) -> None:
        self.columns, self.depth = weight.shape
        structs = (LowBitPartStruct * len(parts))(*(struct for struct, _ in parts))
        wide = None
        if bias is not None:
            wide = torch.zeros(-(-self.columns // _COLUMNS) * _COLUMNS)
            wide[: self.columns] = bias
        struct = LowBitStruct(
            ctypes.addressof(structs), len(parts), None if wide is None else wide.data_ptr(), self.depth
        )
        self.address = ctypes.addressof(struct)
        self.num_bytes = sum(panels.nbytes for _, panels in parts) + (0 if wide is None else wide.nbytes)
        self._kept = (struct, structs, [panels for _, panels in parts], wide)


def pack_low_bit(
    library: ctypes.CDLL, pool: int, weight: LowBitRows, bias: Tensor | None, take: Callable[[int], Tensor]
) -> LowBitLinear:
    """Pack the blocks of every part. take: zeroed memory of that many bytes, 64-byte aligned.

    Raises ConfigError for a depth that is no multiple of 32.
    """
    depth = weight.shape[1]
    if depth % _SMALLEST_DEPTH or any(part.depth != depth for part in weight.parts):
        depths = " and ".join(str(part.depth) for part in weight.parts)
        raise ConfigError(
            f"low-bit weights have inputs in multiples of {_SMALLEST_DEPTH}, all alike, not {depths}"
        )
    parts: list[tuple[LowBitPartStruct, Tensor]] = []
    first = 0
    for part in weight.parts:
        struct = _struct(part, first)
        panels = take(library.faser_low_bit_bytes(ctypes.addressof(struct), depth))
        struct.panels = panels.data_ptr()
        library.faser_low_bit_pack(
            pool, ctypes.addressof(struct), depth, part.format.number, part.blocks.ctypes.data
        )
        parts.append((struct, panels))
        first += len(part.blocks)
    return LowBitLinear(weight, parts, bias)


def _struct(part: BlockRows, first: int) -> LowBitPartStruct:
    found = part.format
    return LowBitPartStruct(
        None, first, len(part.blocks), found.form, found.zero_point, found.has_superblocks, found.has_minimums
    )
