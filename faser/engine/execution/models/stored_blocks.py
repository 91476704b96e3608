"""Weights of GGUF files in the blocks that the file stores, for backends that multiply them as they are.

Knows neither how blocks are laid out nor how they are computed with.
"""

from typing import TYPE_CHECKING

from faser.kernels.interface.low_bit.formats import FORMATS
from faser.kernels.interface.low_bit.rows import LowBitRows, block_rows

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.weights import GgufSource


class BlockSource:
    """Low-bit weights of a GGUF file, under Hugging Face names."""

    def __init__(self, source: "GgufSource") -> None:
        self._source = source
        self._formats: set[str] = set()

    def rows(self, name: str) -> LowBitRows | None:
        """A weight as it is stored; None: it is not stored in a format of low-bit products."""
        if self._source.format(name) not in FORMATS:
            return None
        name_of_format, blocks = self._source.blocks(name)
        self._formats.add(name_of_format)
        return block_rows(name_of_format, blocks, self._source.shape(name)[-1])

    def described(self) -> str:
        """The formats of the weights given so far, each with its memory form."""
        return ", ".join(f"{name} ({FORMATS[name].form.description})" for name in sorted(self._formats))
