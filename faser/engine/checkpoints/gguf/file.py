"""A GGUF model: its metadata and its tensors, under the file's own names. Loads no torch.

A model may be split into several files (parts.py): the first one has the metadata, and each has tensors.

A vocabulary is hundreds of thousands of strings, and several parts of an engine open the file: so values stay
bytes until they are asked for, and tensors stay in the mapped file. The library gguf makes arrays of every string,
which takes seconds.
"""

import math
import mmap
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from faser.engine.checkpoints.gguf.header import TensorPlace
from faser.engine.checkpoints.gguf.parts import open_parts, shown
from faser.errors import ModelError
from faser.types.arrays import Bytes, Floats32

Value = TypeVar("Value", str, bool, int, float)
READABLE = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
_INTEGERS = {"I32": np.int32, "I64": np.int64}
_KINDS: dict[type, str] = {str: "text", bool: "true or false", int: "an integer", float: "a finite number"}


class GgufFile:
    """An open GGUF model: its metadata and its tensors, under the file's own names.

    path: of the file, or of the first part of a model that is split.
    """

    def __init__(self, path: Path, content: mmap.mmap | None = None) -> None:
        """Reads the header; values and tensors stay on disk until they are read. path: may be any part.

        content: of the file, read already: tensors are taken from there; None: the file is mapped.
        Raises ModelError: not a GGUF file, truncated, of the other byte order, or a part that is missing, that is
        of another number than its name states, or of another model.
        """
        parts = open_parts(path, content)
        self._is_mapped = content is None
        self.path, self._header = next(iter(parts.items()))
        self._parts = tuple(parts.values())
        self._owners = {name: header for header in parts.values() for name in header.tensors}
        self.num_bytes = sum(header.num_bytes for header in parts.values())

    def has(self, key: str) -> bool:
        """Return whether there is a metadata value of that name."""
        return self._header.has(key)

    @overload
    def get(self, key: str, kind: type[Value]) -> Value | None: ...

    @overload
    def get(self, key: str, kind: type[Value], default: Value) -> Value: ...

    def get(self, key: str, kind: type[Value], default: Value | None = None) -> Value | None:
        """A metadata value, or the default. kind: str, bool, int, or float, which may be stored as an integer.

        Raises ModelError that names the key for a value of another type, a number that is not finite, and text
        that is not UTF-8.
        """
        return self.require(key, kind) if self.has(key) else default

    def require(self, key: str, kind: type[Value]) -> Value:
        """A metadata value. Raises ModelError as `get` does, and if it is missing."""
        value = self.value(key)
        if not _is(value, kind):
            raise ModelError(f"{self.path}: {key} is {shown(value)}; it must be {_KINDS[kind]}")
        return cast(Value, value)

    def require_list(self, key: str, kind: type[Value]) -> list[Value]:
        """A metadata value that is a list of values of one kind. Raises ModelError as `require` does."""
        values = self.value(key)
        if not isinstance(values, list):
            raise ModelError(f"{self.path}: {key} is {shown(values)}; it must be a list")
        if values and not _is(values[0], kind):  # the items of an array are of one type
            raise ModelError(f"{self.path}: {key} is a list with {shown(values[0])}; each must be {_KINDS[kind]}")
        return values

    def size(self, key: str, default: int | None = None) -> int:
        """A metadata value that counts something. Raises ModelError as `require` does, and if it is below 1."""
        value = self.require(key, int) if default is None else self.get(key, int, default)
        if value < 1:
            raise ModelError(f"{self.path}: {key} is {value}; it must be at least 1")
        return value

    def by_layer(self, key: str, num_layers: int) -> list[int]:
        """Return a count in each layer: a list of that length, or one number for all.

        Raises ModelError as `require` does, for a list of another length, and for a number below 1.
        """
        if not isinstance(values := self.value(key), list):
            return [self.size(key)] * num_layers
        if len(values) != num_layers or min(values, default=1) < 1:
            raise ModelError(f"{self.path}: {key} is {values}; it must have {num_layers} numbers of at least 1")
        return self.require_list(key, int)

    def number(self, key: str, default: float) -> float:
        """A metadata value that was a decimal number before it was stored in 32 bits; see shortest."""
        return shortest(self.require(key, float)) if self.has(key) else default

    def value(self, key: str) -> Any:
        """A metadata value, whatever its type. Raises ModelError if it is missing, or text that is not UTF-8."""
        if not self._header.has(key):
            raise ModelError(f"{self.path} has no {key}")
        try:
            return self._header.get(key)
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {key} is not UTF-8: {error.reason}") from None

    def tensor_names(self) -> list[str]:
        return list(self._owners)

    def has_tensor(self, name: str) -> bool:
        return name in self._owners

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape with the slowest dimension first, as in torch; GGUF stores the fastest first."""
        return self._place(name).shape

    def format(self, name: str) -> str:
        """The name of a tensor's type, such as Q4_K or F32."""
        return self._place(name).type_name

    def blocks(self, name: str, part: int | None = None) -> Bytes:
        """A quantised tensor [N, K] as it is stored, [N, bytes of a row]: a part of the mapped file.

        part: one of the matrices of a tensor [parts, N, K]; None: the tensor is a matrix. Raises ModelError for a
        tensor that is none.
        """
        shape, stored = self._part(name, part)
        if len(shape) != 2:
            raise ModelError(f"{self.path}: {name} is of shape {list(shape)}; it must be a matrix")
        return stored.reshape(shape[0], -1)

    def array(self, name: str, part: int | None = None) -> Floats32:
        """A tensor, or one part of it, dequantised. Raises ModelError for a quantisation that is not supported.

        One of float32 is a part of the mapped file.
        """
        kind = self.format(name)
        if kind not in READABLE:
            raise ModelError(f"{self.path}: {name} is stored as {kind}; supported are {', '.join(READABLE)}")
        shape, stored = self._part(name, part)
        if kind == "F32":
            return stored.view(np.float32).reshape(shape)
        from gguf import GGMLQuantizationType, quants  # weights that are multiplied as stored need neither

        number = GGMLQuantizationType(self._place(name).number)
        return np.asarray(quants.dequantize(stored.reshape(*shape[:-1], -1), number), np.float32).reshape(shape)

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        """A tensor of integers. Raises ModelError for one of another type."""
        if (kind := self.format(name)) not in _INTEGERS:
            raise ModelError(f"{self.path}: {name} is stored as {kind}; it must be {' or '.join(_INTEGERS)}")
        return self._bytes(name).view(_INTEGERS[kind]).reshape(self.shape(name)).astype(np.int64)

    def _part(self, name: str, part: int | None) -> tuple[tuple[int, ...], Bytes]:
        """The shape and the bytes of a tensor, or of one part along its first dimension."""
        shape, stored = self.shape(name), self._bytes(name)
        return (shape, stored) if part is None else (shape[1:], stored.reshape(shape[0], -1)[part])

    def _bytes(self, name: str) -> Bytes:
        """Return the bytes of a tensor, a part of the mapped file.

        Pages read so far stop counting as this process's memory, so that loading takes that of one product more
        than the weights. Earlier parts stay usable: they are read again from the system's cache.
        """
        if self._is_mapped:
            for header in self._parts:
                header.content.madvise(mmap.MADV_DONTNEED)
        place = self._place(name)
        return np.frombuffer(self._owners[name].content, np.uint8, place.num_bytes, place.start)

    def _place(self, name: str) -> TensorPlace:
        return self._owners[name].tensors[name]


def shortest(value: float) -> float:
    """The decimal number of the fewest digits that has this value in 32 bits: 0.22, not 0.2199999988079071."""
    return float(str(np.float32(value)))


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
