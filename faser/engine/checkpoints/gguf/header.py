"""The header of a mapped GGUF file: where its metadata and its tensors lie.

Source: docs/gguf.md of ggml-org/ggml, versions 2 and 3; block sizes are those of ggml_type in ggml.h.
"""

import math
import mmap
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAGIC = b"GGUF"
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


class DamagedHeader(Exception):
    """The bytes are not a header, or name more than the file has."""


class OtherByteOrder(Exception):
    """The file is of a machine with the other byte order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Location of a tensor. number: of its type in ggml. shape: the slowest dimension first, as in torch.

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
    """Location of a metadata value. item: the type of an array's items; None: it is no array."""

    kind: int
    start: int
    item: int | None = None
    count: int = 0


class Header:
    """Metadata values and tensors of a mapped file. Raises DamagedHeader or OtherByteOrder."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.num_bytes = len(content)
        self._values: dict[str, _Value] = {}
        self.tensors: dict[str, TensorPlace] = {}
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise DamagedHeader(str(error)) from error

    def keys(self) -> set[str]:
        return set(self._values)

    def has(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        """A metadata value as a Python object: a number, a string, or a list of these."""
        value, content = self._values[key], self.content
        if value.item == _STRING:
            return [str(content[start:end], "utf-8") for start, end in self._places(value.start, value.count)]
        if value.item is not None:
            numbers = f"{_ORDER}{value.count}{_NUMBERS[value.item]}"
            return list(struct.unpack_from(numbers, content, value.start))
        return self._string(value.start)[0] if value.kind == _STRING else self._number(value.kind, value.start)

    def _read(self) -> None:
        if self.content[: len(MAGIC)] != MAGIC:
            raise DamagedHeader("it does not begin like one")
        at = len(MAGIC)
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
        *shape, number, offset = struct.unpack_from(f"{_ORDER}{count}QIQ", self.content, at + 4)
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
        unpack, content = _U64.unpack_from, self.content
        for _ in range(count):
            at += unpack(content, at)[0] + 8
        return self._checked(at)

    def _places(self, at: int, count: int) -> Iterator[tuple[int, int]]:
        """First and last byte of each string of an array."""
        unpack, content = _U64.unpack_from, self.content
        for _ in range(count):
            start = at + 8
            at = start + unpack(content, at)[0]
            yield start, at

    def _string(self, at: int) -> tuple[str, int]:
        """A string, and where it ends."""
        end = self._string_end(at)
        return str(self.content[at + 8 : end], "utf-8"), end

    def _string_end(self, at: int) -> int:
        return self._checked(at + 8 + self._u64(at))

    def _number(self, kind: int, at: int) -> int | float | bool:
        (found,) = struct.unpack_from(f"{_ORDER}{_NUMBERS[kind]}", self.content, at)
        assert isinstance(found, int | float)
        return found

    def _size(self, kind: int) -> int:
        if kind not in _NUMBERS:
            raise DamagedHeader(f"a value is of the unknown type {kind}")
        return struct.calcsize(f"{_ORDER}{_NUMBERS[kind]}")

    def _checked(self, end: int) -> int:
        """end, if the file has as many bytes."""
        if end > len(self.content):
            raise DamagedHeader(f"it ends before byte {end}")
        return end

    def _u32(self, at: int) -> int:
        found: int = _U32.unpack_from(self.content, at)[0]
        return found

    def _u64(self, at: int) -> int:
        found: int = _U64.unpack_from(self.content, at)[0]
        return found
