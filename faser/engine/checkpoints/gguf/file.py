"""A GGUF file: its metadata and its tensors, under the file's own names. Loads no torch."""

import math
import mmap
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from faser.config.declaration import show_bytes
from faser.engine.checkpoints.gguf.header import DamagedHeader, Header, OtherByteOrder
from faser.errors import ModelError

FloatArray = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Value = TypeVar("Value", str, bool, int, float)

_MAGIC = b"GGUF"

_KINDS: dict[type, str] = {str: "text", bool: "true or false", int: "an integer", float: "a finite number"}
_MOST_SHOWN = 60  # characters of a wrong value

_READABLE = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)


class GgufFile:
    """An open GGUF file: its metadata and its tensors, under the file's own names."""

    def __init__(self, path: Path) -> None:
        """Reads the header; values and tensors stay on disk until they are read.

        Raises ModelError: not a GGUF file, truncated, of the other byte order, or one of several parts.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._header = Header(self._content)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
        except OtherByteOrder:
            raise ModelError(f"{path} is of the other byte order; convert it for this machine") from None
        except (DamagedHeader, ValueError) as error:  # an empty file cannot be mapped
            raise ModelError(_damage(path)) from error
        if (num_parts := self.get("split.count", int, 1)) > 1:
            raise ModelError(f"{path} is one of {num_parts} parts; join them with gguf-split --merge")

    def has(self, key: str) -> bool:
        """Whether there is a metadata value of that name."""
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
            raise ModelError(f"{self.path}: {key} is {_shown(value)}; it must be {_KINDS[kind]}")
        return cast(Value, value)

    def require_list(self, key: str, kind: type[Value]) -> list[Value]:
        """A metadata value that is a list of values of one kind. Raises ModelError as `require` does."""
        values = self.value(key)
        if not isinstance(values, list):
            raise ModelError(f"{self.path}: {key} is {_shown(values)}; it must be a list")
        if values and not _is(values[0], kind):  # the items of an array are of one type
            raise ModelError(f"{self.path}: {key} is a list with {_shown(values[0])}; each must be {_KINDS[kind]}")
        return values

    def size(self, key: str, default: int | None = None) -> int:
        """A metadata value that counts something. Raises ModelError as `require` does, and if it is below 1."""
        value = self.require(key, int) if default is None else self.get(key, int, default)
        if value < 1:
            raise ModelError(f"{self.path}: {key} is {value}; it must be at least 1")
        return value

    def value(self, key: str) -> Any:
        """A metadata value, whatever its type. Raises ModelError if it is missing, or text that is not UTF-8."""
        if not self._header.has(key):
            raise ModelError(f"{self.path} has no {key}")
        try:
            return self._header.get(key)
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {key} is not UTF-8: {error.reason}") from None

    def tensor_names(self) -> list[str]:
        return list(self._header.tensors)

    def has_tensor(self, name: str) -> bool:
        return name in self._header.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape with the slowest dimension first, as in torch; GGUF stores the fastest first."""
        return self._header.tensors[name].shape

    def format(self, name: str) -> str:
        """The name of a tensor's type, such as Q4_K or F32."""
        return self._header.tensors[name].type_name

    def blocks(self, name: str) -> Bytes:
        """A quantised tensor [N, K] as it is stored, [N, bytes of a row]: a part of the mapped file.

        Raises ModelError for a tensor that is no matrix.
        """
        if len(shape := self.shape(name)) != 2:
            raise ModelError(f"{self.path}: {name} is of shape {list(shape)}; it must be a matrix")
        return self._bytes(name).reshape(self.shape(name)[0], -1)

    def array(self, name: str) -> FloatArray:
        """A tensor, dequantised. Raises ModelError for a quantisation that is not supported.

        One of float32 is a part of the mapped file.
        """
        kind = self.format(name)
        if kind not in _READABLE:
            raise ModelError(f"{self.path}: {name} is stored as {kind}; supported are {', '.join(_READABLE)}")
        shape, stored = self.shape(name), self._bytes(name)
        if kind == "F32":
            return stored.view(np.float32).reshape(shape)
        from gguf import GGMLQuantizationType, quants  # weights that are multiplied as stored need neither

        number = GGMLQuantizationType(self._header.tensors[name].number)
        return np.asarray(quants.dequantize(stored.reshape(*shape[:-1], -1), number), np.float32).reshape(shape)

    def _bytes(self, name: str) -> Bytes:
        """[bytes] of a tensor, a part of the mapped file.

        Pages read so far stop counting as this process's memory, so that loading takes that of one product more
        than the weights. Earlier parts stay usable: they are read again from the system's cache.
        """
        self._content.madvise(mmap.MADV_DONTNEED)
        place = self._header.tensors[name]
        return np.frombuffer(self._content, np.uint8, place.num_bytes, place.start)


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _damage(path: Path) -> str:
    """What is wrong with a file whose header cannot be read."""
    with path.open("rb") as file:
        begins_well = file.read(len(_MAGIC)) == _MAGIC
    if not begins_well:
        return f"{path} is not a GGUF file"
    size = show_bytes(path.stat().st_size)
    return f"{path} is damaged or cut short: its {size} are not what its header describes"
