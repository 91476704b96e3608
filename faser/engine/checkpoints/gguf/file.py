"""A GGUF file: its metadata and its tensors, under the file's own names. Loads no torch."""

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import quants

from faser.config.declaration import show_bytes
from faser.errors import ModelError

FloatArray = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_MAGIC = b"GGUF"

_READABLE = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)


class GgufFile:
    """An open GGUF file: its metadata and its tensors, under the file's own names."""

    def __init__(self, path: Path) -> None:
        """Reads the metadata; tensor data stays on disk until it is read.

        Raises ModelError: not a GGUF file, truncated, of the other byte order, or one of several parts.
        """
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
        except Exception as error:  # for damaged files the library raises any exception of numpy
            raise ModelError(_damage(path)) from error
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        if reader.endianess != (gguf.GGUFEndian.LITTLE if sys.byteorder == "little" else gguf.GGUFEndian.BIG):
            raise ModelError(f"{path} is of the other byte order; convert it for this machine")
        if self.get("split.count", 1) > 1:
            raise ModelError(
                f"{path} is one of {self.get('split.count')} parts; join them with gguf-split --merge"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as a Python object, or the default."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """A metadata value. Raises ModelError that names the key if it is missing."""
        if key not in self._fields:
            raise ModelError(f"{self.path} has no {key}")
        return self.get(key)

    def tensor_names(self) -> list[str]:
        return list(self._tensors)

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape with the slowest dimension first, as in torch; GGUF stores the fastest first."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def format(self, name: str) -> str:
        """The name of a tensor's type, such as Q4_K or F32."""
        return str(self._tensors[name].tensor_type.name)

    def blocks(self, name: str) -> Bytes:
        """A quantised tensor [N, K] as it is stored, [N, bytes of a row]: a part of the mapped file."""
        return np.asarray(self._tensors[name].data, np.uint8).reshape(self.shape(name)[0], -1)

    def array(self, name: str) -> FloatArray:
        """A tensor, dequantised. Raises ModelError for a quantisation that is not supported."""
        tensor = self._tensors[name]
        if tensor.tensor_type.name not in _READABLE:
            raise ModelError(
                f"{self.path}: {name} is stored as {tensor.tensor_type.name}; supported are {', '.join(_READABLE)}"
            )
        return np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(self.shape(name))


def _damage(path: Path) -> str:
    """What is wrong with a file that the library cannot read. Its own message is one of numpy's."""
    with path.open("rb") as file:
        begins_well = file.read(len(_MAGIC)) == _MAGIC
    if not begins_well:
        return f"{path} is not a GGUF file"
    size = show_bytes(path.stat().st_size)
    return f"{path} is damaged or cut short: its {size} are not what its header describes"
