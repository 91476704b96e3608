"""Weights in safetensors files: one file, or several with an index, memory-mapped."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from faser.errors import ModelError

_LENGTH_BYTES = 8  # the first bytes of a file: the length of its header
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
_INTEGERS = (torch.int32, torch.int8, torch.int64)  # of quantised weights
_DTYPES = (*_FLOATS, *_INTEGERS, torch.bool)  # booleans: the vocabulary of a head


class SafetensorsSource:
    """A WeightSource over a checkpoint directory. The files stay mapped as long as this object lives.

    Raises ModelError that names a missing, truncated or damaged file.
    """

    def __init__(self, directory: Path) -> None:
        self._file_of = _files_by_tensor(directory)
        self._open = {path: _open(path) for path in sorted(set(self._file_of.values()))}
        held = {path: set(file.keys()) for path, file in self._open.items()}
        for name, path in self._file_of.items():
            if name not in held[path]:
                raise ModelError(f"{path} has no tensor {name}, which {_INDEX} places there")

    def names(self) -> list[str]:
        return list(self._file_of)

    def get(self, name: str) -> Tensor:
        """A view of the mapped file, on the CPU, in the stored dtype. Raises ModelError for unsupported dtypes."""
        path = self._file_of[name]
        try:
            tensor: Tensor = self._open[path].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{path} is damaged: its tensor {name} cannot be read") from error
        if tensor.dtype not in _DTYPES:
            stored = str(tensor.dtype).removeprefix("torch.")
            read = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise ModelError(f"{path}: {name} is stored as {stored}; supported are {read}")
        return tensor


def _files_by_tensor(directory: Path) -> dict[str, Path]:
    """The file of every tensor. A single file takes precedence over an index."""
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists():
        return dict.fromkeys(_open(single).keys(), single)
    if not index.exists():
        raise ModelError(f"{directory} holds neither {_SINGLE} nor {_INDEX}; only safetensors weights are read")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): directory / file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {type(error).__name__}: {error}") from error


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(_damage(path)) from error


def _damage(path: Path) -> str:
    """What is wrong with a file that the library cannot open, in words of its format: a header, then tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size < _LENGTH_BYTES or header_bytes > size - _LENGTH_BYTES:
        return f"{path} is damaged or cut short: its {size} bytes are too few for the header of a safetensors file"
    return f"{path} is damaged or cut short: its {size} bytes are not those that its header describes"
