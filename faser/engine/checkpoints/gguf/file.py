"""A GGUF file: its metadata and its tensors, under the file's own names. Loads no torch.

A vocabulary is hundreds of thousands of strings, and several parts of an engine open the file: so values stay
bytes until they are asked for, and tensors stay in the mapped file. The library gguf makes arrays of every string,
which takes seconds.

Source: docs/gguf.md of ggml-org/ggml, versions 2 and 3; block sizes are those of ggml_type in ggml.h.
"""

import math
import mmap
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from faser.config.declaration import show_bytes
from faser.errors import ModelError

FloatArray = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Value = TypeVar("Value", str, bool, int, float)
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_ORDER = "<" if sys.byteorder == "little" else ">"
# Numbers of value types: fixed sizes by their struct format, then the two that vary.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_U32, _U64 = struct.Struct(f"{_ORDER}I"), struct.Struct(f"{_ORDER}Q")
# ggml's types: number → name, values of a block, bytes of a block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
READABLE = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
_KINDS: dict[type, str] = {str: "text", bool: "true or false", int: "an integer", float: "a finite number"}
_MOST_SHOWN = 60  # characters of a wrong value


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

    def by_layer(self, key: str, num_layers: int) -> list[int]:
        """What counts something in each layer: a list of that length, or one number for all.

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
        return list(self._header.tensors)

    def has_tensor(self, name: str) -> bool:
        return name in self._header.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape with the slowest dimension first, as in torch; GGUF stores the fastest first."""
        return self._header.tensors[name].shape

    def format(self, name: str) -> str:
        """The name of a tensor's type, such as Q4_K or F32."""
        return self._header.tensors[name].type_name

    def blocks(self, name: str, part: int | None = None) -> Bytes:
        """A quantised tensor [N, K] as it is stored, [N, bytes of a row]: a part of the mapped file.

        part: one of the matrices of a tensor [parts, N, K]; None: the tensor is a matrix. Raises ModelError for a
        tensor that is none.
        """
        shape, stored = self._part(name, part)
        if len(shape) != 2:
            raise ModelError(f"{self.path}: {name} is of shape {list(shape)}; it must be a matrix")
        return stored.reshape(shape[0], -1)

    def array(self, name: str, part: int | None = None) -> FloatArray:
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

        number = GGMLQuantizationType(self._header.tensors[name].number)
        return np.asarray(quants.dequantize(stored.reshape(*shape[:-1], -1), number), np.float32).reshape(shape)

    def _part(self, name: str, part: int | None) -> tuple[tuple[int, ...], Bytes]:
        """The shape and the bytes of a tensor, or of one part along its first dimension."""
        shape, stored = self.shape(name), self._bytes(name)
        return (shape, stored) if part is None else (shape[1:], stored.reshape(shape[0], -1)[part])

    def _bytes(self, name: str) -> Bytes:
        """[bytes] of a tensor, a part of the mapped file.

        Pages read so far stop counting as this process's memory, so that loading takes that of one product more
        than the weights. Earlier parts stay usable: they are read again from the system's cache.
        """
        self._content.madvise(mmap.MADV_DONTNEED)
        place = self._header.tensors[name]
        return np.frombuffer(self._content, np.uint8, place.num_bytes, place.start)


def shortest(value: float) -> float:
    """The decimal number of the fewest digits that has this value in 32 bits: 0.22, not 0.2199999988079071."""
    return float(str(np.float32(value)))


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


class DamagedHeader(Exception):
    """The bytes are not a header, or name more than the file has."""


class OtherByteOrder(Exception):
    """The file is of a machine with the other byte order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where a tensor lies. number: of its type in ggml. shape: the slowest dimension first, as in torch.

    start: its first byte in the file.
    """

    number: int
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def type_name(self) -> str:
        return TENSOR_TYPES[self.number][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Value:
    """Where a metadata value lies. item: the type of an array's items; None: it is no array."""

    kind: int
    start: int
    item: int | None = None
    count: int = 0


class Header:
    """Metadata values and tensors of a mapped file. Raises DamagedHeader or OtherByteOrder."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._values: dict[str, _Value] = {}
        self.tensors: dict[str, TensorPlace] = {}
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise DamagedHeader(str(error)) from error

    def has(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        """A metadata value as a Python object: a number, a string, or a list of these."""
        value, content = self._values[key], self._content
        if value.item == _STRING:
            return [str(content[start:end], "utf-8") for start, end in self._places(value.start, value.count)]
        if value.item is not None:
            numbers = f"{_ORDER}{value.count}{_NUMBERS[value.item]}"
            return list(struct.unpack_from(numbers, content, value.start))
        return self._string(value.start)[0] if value.kind == _STRING else self._number(value.kind, value.start)

    def _read(self) -> None:
        if self._content[: len(_MAGIC)] != _MAGIC:
            raise DamagedHeader("it does not begin like one")
        at = len(_MAGIC)
        version = self._u32(at)
        if not version & 0xFFFF:
            raise OtherByteOrder
        if version not in _VERSIONS:
            raise DamagedHeader(f"its version is {version}")
        num_tensors, num_values = self._u64(at + 4), self._u64(at + 12)
        at += 20
        for _ in range(num_values):
            at = self._read_value(at)
        infos = []
        for _ in range(num_tensors):
            info, at = self._tensor(at)
            infos.append(info)
        alignment = self.get("general.alignment") if self.has("general.alignment") else _DEFAULT_ALIGNMENT
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise DamagedHeader(f"its alignment is {alignment}")
        data = -(-at // alignment) * alignment
        for name, number, shape, offset in infos:
            self._place(name, number, shape, data + offset)

    def _read_value(self, at: int) -> int:
        """Note where a key's value lies; returns where the next key begins."""
        key, at = self._string(at)
        kind = self._u32(at)
        at += 4
        if key in self._values:
            raise DamagedHeader(f"it has {key} twice")
        if kind == _ARRAY:
            item, count = self._u32(at), self._u64(at + 4)
            at += 12
            self._values[key] = _Value(kind=kind, start=at, item=item, count=count)
            if item == _STRING:
                return self._end_of_strings(at, count)
            return self._checked(at + count * self._size(item))
        self._values[key] = _Value(kind=kind, start=at)
        return self._string_end(at) if kind == _STRING else self._checked(at + self._size(kind))

    def _tensor(self, at: int) -> tuple[tuple[str, int, tuple[int, ...], int], int]:
        """Name, type, shape and offset of a tensor; and where the next one begins."""
        name, at = self._string(at)
        count = self._u32(at)
        if count > _MOST_DIMENSIONS:
            raise DamagedHeader(f"{name} has {count} dimensions")
        *shape, number, offset = struct.unpack_from(f"{_ORDER}{count}QIQ", self._content, at + 4)
        return (name, number, tuple(reversed(shape)), offset), at + 4 + 8 * count + 12

    def _place(self, name: str, number: int, shape: tuple[int, ...], start: int) -> None:
        if name in self.tensors or number not in TENSOR_TYPES:
            raise DamagedHeader(f"{name} is there twice, or of the unknown type {number}")
        _, values, num_bytes = TENSOR_TYPES[number]
        size, rest = divmod(math.prod(shape), values)
        if rest or not size or not shape or shape[-1] % values:
            raise DamagedHeader(f"{name} is empty, or ends within a block")
        self.tensors[name] = TensorPlace(number=number, shape=shape, start=start, num_bytes=size * num_bytes)
        self._checked(start + size * num_bytes)

    def _end_of_strings(self, at: int, count: int) -> int:
        unpack, content = _U64.unpack_from, self._content
        for _ in range(count):
            at += unpack(content, at)[0] + 8
        return self._checked(at)

    def _places(self, at: int, count: int) -> Iterator[tuple[int, int]]:
        """First and last byte of each string of an array."""
        unpack, content = _U64.unpack_from, self._content
        for _ in range(count):
            start = at + 8
            at = start + unpack(content, at)[0]
            yield start, at

    def _string(self, at: int) -> tuple[str, int]:
        """A string, and where it ends."""
        end = self._string_end(at)
        return str(self._content[at + 8 : end], "utf-8"), end

    def _string_end(self, at: int) -> int:
        return self._checked(at + 8 + self._u64(at))

    def _number(self, kind: int, at: int) -> int | float | bool:
        (found,) = struct.unpack_from(f"{_ORDER}{_NUMBERS[kind]}", self._content, at)
        assert isinstance(found, int | float)
        return found

    def _size(self, kind: int) -> int:
        if kind not in _NUMBERS:
            raise DamagedHeader(f"a value is of the unknown type {kind}")
        return struct.calcsize(f"{_ORDER}{_NUMBERS[kind]}")

    def _checked(self, end: int) -> int:
        """end, if the file has as many bytes."""
        if end > len(self._content):
            raise DamagedHeader(f"it ends before byte {end}")
        return end

    def _u32(self, at: int) -> int:
        found: int = _U32.unpack_from(self._content, at)[0]
        return found

    def _u64(self, at: int) -> int:
        found: int = _U64.unpack_from(self._content, at)[0]
        return found
