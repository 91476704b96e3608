"""Low-bit weights of the native backend: packed from the blocks of a file, multiplied and looked up.

The kernels are native/low_bit; their results are those that interface/low_bit/product.py defines, bit for bit.
"""

import ctypes
from collections import Counter
from collections.abc import Callable
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.cpu.library import BFLOAT16, FLOAT32, LowBitPartStruct, LowBitStruct, address_of
from faser.kernels.interface.low_bit.formats import BlockFormat, MemoryForm
from faser.kernels.interface.low_bit.rows import BlockRows, FloatRows, GroupRows, LowBitPart, LowBitRows
from faser.optional import maybe

_COLUMNS = 16  # of a panel; vectors read a bias in whole panels
GROUPED_COLUMNS = 64  # of panels that lie together
_SMALLEST_DEPTH = 32


class Factors(IntEnum):
    """Types of stored scales and minimums. Numbered as in layout.h."""

    HALVES = 0
    INTEGERS = 1
    FLOATS = 2
    EXPONENTS = 3


class LowBitLinear:
    """A packed low-bit weight. address: of its FaserLowBit. num_bytes: of its panels and its bias.

    forms: how many columns have codes of each MemoryForm. order: see LowBitRows; as indices.
    """

    __slots__ = ("_kept", "address", "columns", "depth", "forms", "num_bytes", "order")

    def __init__(
        self,
        shape: tuple[int, int],
        parts: list[tuple[LowBitPartStruct, Tensor]],
        bias: Tensor | None,
        order: Tensor | None,
    ) -> None:
        self.columns, self.depth = shape
        self.order = order
        structs = (LowBitPartStruct * len(parts))(*(struct for struct, _ in parts))
        wide = None
        if bias is not None:
            wide = torch.zeros(-(-self.columns // _COLUMNS) * _COLUMNS)
            wide[: self.columns] = bias
        struct = LowBitStruct(ctypes.addressof(structs), len(parts), maybe(Tensor.data_ptr, wide), self.depth)
        self.address = ctypes.addressof(struct)
        self.num_bytes = sum(panels.nbytes for _, panels in parts) + (0 if wide is None else wide.nbytes)
        self.forms: Counter[int] = Counter()
        for part, _ in parts:
            self.forms[part.form] += part.columns
        self._kept = (struct, structs, [panels for _, panels in parts], wide)

    def without_middle(self, count: int) -> "LowBitLinear":
        """The first `count` columns of the first part, then all other parts, as a weight over the same memory.

        count: a multiple of GROUPED_COLUMNS. The weight has no bias, and no bytes of its own.
        """
        _, structs, panels, bias = self._kept
        assert bias is None, "columns that are left out would leave their bias"
        assert 0 < count <= structs[0].columns, (count, structs[0].columns)
        assert count % GROUPED_COLUMNS == 0, f"{count} columns are no whole panels"
        parts, left_out = [], structs[0].columns - count
        for each, memory in zip(structs, panels, strict=True):
            part = LowBitPartStruct.from_buffer_copy(each)
            part.first -= left_out
            parts.append((part, memory))
        parts[0][0].first, parts[0][0].columns = 0, count
        found = LowBitLinear((self.columns - left_out, self.depth), parts, None, self.order)
        found.num_bytes = 0
        return found


def pack_low_bit(
    library: ctypes.CDLL, pool: int, weight: LowBitRows, bias: Tensor | None, take: Callable[[int], Tensor]
) -> LowBitLinear:
    """Pack every part. take: zeroed memory of that many bytes, 64-byte aligned.

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
        _pack(library, pool, struct, depth, part)
        parts.append((struct, panels))
        first += part.num_rows
    order = maybe(lambda each: torch.from_numpy(each.astype(np.int64)), weight.order)
    return LowBitLinear(weight.shape, parts, bias, order)


def factors_of(found: BlockFormat) -> Factors:
    if found.form is MemoryForm.FLOATS_OF_4:
        return Factors.EXPONENTS
    return Factors.INTEGERS if found.has_superblocks else Factors.HALVES


def _struct(part: LowBitPart, first: int) -> LowBitPartStruct:
    if isinstance(part, BlockRows):
        found = part.format
        group = 16 if found.form is MemoryForm.SIXES_OF_16 else 32
        return LowBitPartStruct(
            None, first, part.num_rows, found.form, found.zero_point, factors_of(found), found.has_minimums, group
        )
    if isinstance(part, FloatRows):
        scheme = part.scheme
        return LowBitPartStruct(
            None,
            first,
            part.num_rows,
            scheme.form,
            scheme.zero_point,
            Factors.HALVES,
            scheme.has_minimums,
            scheme.group_size,
        )
    factors = Factors.HALVES if part.has_half_factors else Factors.FLOATS
    has_minimums = part.minimums is not None
    return LowBitPartStruct(
        None, first, part.num_rows, part.form, part.zero_point, factors, has_minimums, part.group_size
    )


def _pack(library: ctypes.CDLL, pool: int, struct: LowBitPartStruct, depth: int, part: LowBitPart) -> None:
    address = ctypes.addressof(struct)
    if isinstance(part, BlockRows):
        library.faser_low_bit_pack(pool, address, depth, part.format.number, part.blocks.ctypes.data)
    elif isinstance(part, FloatRows):
        weight = part.weight if part.weight.dtype in (torch.float32, torch.bfloat16) else part.weight.float()
        weight = weight.contiguous()
        dtype = FLOAT32 if weight.dtype is torch.float32 else BFLOAT16
        library.faser_low_bit_quantise(pool, address, depth, weight.data_ptr(), dtype)
    else:
        _pack_codes(library, pool, address, depth, part)


def _pack_codes(library: ctypes.CDLL, pool: int, address: int, depth: int, part: GroupRows) -> None:
    dtype = np.float16 if part.has_half_factors else np.float32
    scales = part.scales.astype(dtype)
    minimums = maybe(lambda each: each.astype(dtype), part.minimums)
    library.faser_low_bit_pack_codes(
        pool,
        address,
        depth,
        part.codes.ctypes.data,
        scales.ctypes.data,
        address_of(minimums),
    )
