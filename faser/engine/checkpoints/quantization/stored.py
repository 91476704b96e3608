"""StoredFp8 and StoredLowBit: how a checkpoint stores quantised weights."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFp8:
    """Weights of linear layers in float8_e4m3fn, one scale per tensor or channel; some may be unquantised.

    method: its name in the config. static_inputs: the checkpoint has a fixed scale for the inputs of each layer.
    """

    method: str
    static_inputs: bool


class Layout(StrEnum):
    """How integers and scales lie in the tensors of a checkpoint."""

    AWQ = "awq"
    GPTQ = "gptq"
    PACKED = "pack-quantized"
    INTEGERS = "int-quantized"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLowBit:
    """Weights of linear layers as integers with scales; some may be unquantised.

    method: its name in the config. bits: of an integer; a checkpoint may have products of several sizes.
    zero_offset: what is added to a stored zero point.
    """

    method: str
    layout: Layout
    bits: tuple[int, ...]
    zero_offset: int = 0
