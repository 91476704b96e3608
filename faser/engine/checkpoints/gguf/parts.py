"""The files of a GGUF model: one, or the parts that gguf-split of llama.cpp makes of it.

Each part has tensors and states its number, the number of parts and the number of all tensors; the first one has
the metadata of the model.
"""

import mmap
from pathlib import Path
from typing import Any

from faser.config.declaration import show_bytes
from faser.engine.checkpoints.gguf.header import MAGIC, DamagedHeader, Header, OtherByteOrder
from faser.engine.checkpoints.gguf.names import part_number, part_paths
from faser.errors import ModelError

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_MOST_SHOWN = 60  # characters of a wrong value


def open_parts(path: Path, content: mmap.mmap | None = None) -> dict[Path, Header]:
    """The files of a model in order; of one that is not split, its only file.

    content: of the file at path, which has been read already; None: it is mapped.
    """
    opened = _open(path, content)
    count = _stated(opened, _COUNT) if opened.has(_COUNT) else 1
    if not isinstance(count, int) or isinstance(count, bool):
        raise ModelError(f"{path}: {_COUNT} is {shown(count)}; it must be an integer")
    if count <= 1:
        return {path: opened}
    named = part_number(path)
    if named is None or named[1] != count:
        raise ModelError(
            f"{path} is one of {count} parts; their names must end in -00001-of-{count:05}.gguf and so on"
        )
    paths = part_paths(path)
    if missing := [each for each in paths if not each.is_file()]:
        raise ModelError(
            f"{missing[0]} is missing; {count - len(missing)} of {count} parts are there; put all into one folder"
        )
    parts = {each: opened if each == path else _open(each) for each in paths}
    _check_parts(parts)
    return parts


def _check_parts(parts: dict[Path, Header]) -> None:
    """Raise ModelError unless each file is the part that its name states, and all are of one model."""
    (path, first), *_ = parts.items()
    owners: dict[str, str] = {}
    for index, (each, header) in enumerate(parts.items()):
        number = _stated(header, _NUMBER)
        if number != index:
            holds = (
                f"holds part {number + 1} of {len(parts)}" if isinstance(number, int) else "states no part number"
            )
            raise ModelError(f"{each} {holds}; by its name it must hold part {index + 1}")
        for key in sorted((header.keys() & first.keys()) - {_NUMBER}):
            if (found := _stated(header, key)) != (expected := _stated(first, key)):
                raise ModelError(
                    f"{each} is not of the model of {path.name}: {key} is {shown(found)}, not {shown(expected)}"
                )
        if both := sorted(header.tensors.keys() & owners.keys()):
            raise ModelError(
                f"{each} is not of the model of {path.name}: it has the tensor {both[0]}, as {owners[both[0]]} has"
            )
        owners |= dict.fromkeys(header.tensors, each.name)
    if (total := _stated(first, _TENSORS)) != len(owners):
        raise ModelError(f"{path}: {_TENSORS} is {total}, and its {len(parts)} parts have {len(owners)} tensors")


def _stated(header: Header, key: str) -> Any:
    """A metadata value; None: it is missing, or text that is not UTF-8."""
    try:
        return header.get(key) if header.has(key) else None
    except UnicodeDecodeError:
        return None


def _open(path: Path, content: mmap.mmap | None = None) -> Header:
    """The header of one file."""
    try:
        if content is not None:
            return Header(content)
        with path.open("rb") as file:
            return Header(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    except OtherByteOrder:
        raise ModelError(f"{path} is of the other byte order; convert it for this machine") from None
    except (DamagedHeader, ValueError) as error:  # an empty file cannot be mapped
        raise ModelError(_damage(path)) from error


def _damage(path: Path) -> str:
    """Describe what is wrong with a file whose header cannot be read."""
    with path.open("rb") as file:
        begins_well = file.read(len(MAGIC)) == MAGIC
    if not begins_well:
        return f"{path} is not a GGUF file"
    size = show_bytes(path.stat().st_size)
    return f"{path} is damaged or cut short: its {size} are not what its header describes"


def shown(value: Any) -> str:
    """A wrong value, cut to a length that fits a message."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
