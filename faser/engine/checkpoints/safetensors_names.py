"""The names of the tensors in a directory's safetensors files, read without a library from the files' headers."""

import json
from pathlib import Path

_LENGTH_BYTES = 8  # the first bytes of a file: the length of its header
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


def tensor_names(directory: Path) -> set[str]:
    """Of all files that can be read; a damaged one is found when it is loaded."""
    names: set[str] = set()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = file.read(length) if length <= _LONGEST_HEADER else b""
        try:
            found = json.loads(header)
        except ValueError:
            continue
        names.update(name for name in found if name != "__metadata__")
    return names
