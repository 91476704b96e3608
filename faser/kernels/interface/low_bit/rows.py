"""LowBitRows: a low-bit weight, made of parts that each hold their rows in their own way."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from faser.errors import ConfigError
from faser.kernels.interface.low_bit.formats import FORMATS, BlockFormat, Bytes, DecodedRows, Floats
from faser.kernels.interface.low_bit.group_rows import GroupRows
from faser.kernels.interface.low_bit.quantise import FloatRows


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """Rows of a weight in one format. blocks: [N, bytes of a row], contiguous; perhaps a part of a mapped file."""

    format: BlockFormat
    blocks: Bytes

    @property
    def num_rows(self) -> int:
        return len(self.blocks)

    @property
    def depth(self) -> int:
        """K: values of a row."""
        return int(self.blocks.shape[1]) // self.format.num_bytes * self.format.values

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes

    def decode(self) -> DecodedRows:
        return self.format.decode(self.blocks)


LowBitPart = BlockRows | GroupRows | FloatRows


@dataclass(frozen=True, slots=True, kw_only=True)
class LowBitRows:
    """A weight [N, K]: the rows of its parts follow one another.

    order: [K], the input that each column of the parts multiplies; None: the k-th column multiplies input k.
    """

    parts: tuple[LowBitPart, ...]
    order: npt.NDArray[np.int32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.num_rows for part in self.parts), self.parts[0].depth

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def dequantised(self) -> Floats:
        """[N, K], columns in the order of the inputs."""
        columns = np.concatenate([part.decode().dequantised() for part in self.parts])
        return columns if self.order is None else columns[:, np.argsort(self.order)]


def block_rows(format_name: str, blocks: Bytes, depth: int) -> LowBitRows:
    """A weight [N, depth] in one format. blocks: [N, bytes of a row].

    Raises ConfigError that names an unknown format, or a depth and a row that do not belong together.
    """
    found = FORMATS.get(format_name)
    if found is None:
        raise ConfigError(f"the format is {format_name}; low-bit weights are {', '.join(FORMATS)}")
    if depth % found.values or blocks.shape[1] != depth // found.values * found.num_bytes:
        raise ConfigError(
            f"a row of {depth} values in {format_name} has {blocks.shape[1]} bytes; "
            f"{found.values} values take {found.num_bytes}"
        )
    return LowBitRows(parts=(BlockRows(format=found, blocks=np.ascontiguousarray(blocks)),))


def can_stack(weights: Sequence[LowBitRows]) -> bool:
    """Whether all weights take their inputs in the same order."""
    first = weights[0].order
    if first is None:
        return all(weight.order is None for weight in weights)
    return all(weight.order is not None and np.array_equal(weight.order, first) for weight in weights)


def stack_low_bit(weights: Sequence[LowBitRows]) -> LowBitRows:
    """The rows of all weights, in order; each part stays as it is. can_stack must hold."""
    assert can_stack(weights), "inputs in several orders"
    return LowBitRows(parts=tuple(part for weight in weights for part in weight.parts), order=weights[0].order)
