"""Writes a GGUF file as a checkpoint directory with weights in bfloat16, for programs that read no GGUF files.

python -m benchmarks models.bfloat16_checkpoint MODEL.gguf DIRECTORY
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.runner import command_line
from faser.engine.checkpoints.embedded import write_settings
from faser.engine.checkpoints.gguf.file import GgufFile
from faser.engine.checkpoints.gguf_weights import GgufSource
from faser.types.arrays import Floats32

_BFLOAT16_BYTES = 2
_ALIGNMENT = 8


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    convert(arguments.model, arguments.directory)


def convert(gguf_path: Path, directory: Path) -> None:
    """Write the directory, which is made if there is none."""
    directory.mkdir(parents=True, exist_ok=True)
    file = GgufFile(gguf_path)
    write_settings(file, directory)
    _write_weights(GgufSource(file), directory / "model.safetensors")


def to_bfloat16(values: Floats32) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16; a value halfway between two rounds to the even one.

    0x3F80_8000 lies halfway between 0x3F80 and 0x3F81 and becomes 0x3F80; 0x3F81_8000 becomes 0x3F82.
    NaN stays NaN.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _write_weights(source: GgufSource, path: Path) -> None:
    """One safetensors file in bfloat16: length of the header, header, then the tensors without gaps.

    Source: the format's description in huggingface/safetensors, section Format.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name in source.names():
        start, total = total, total + _BFLOAT16_BYTES * math.prod(source.shape(name))
        header[name] = {"dtype": "BF16", "shape": source.shape(name), "data_offsets": [start, total]}
    packed = json.dumps(header).encode("utf-8")
    packed += b" " * (-len(packed) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(packed).to_bytes(8, "little") + packed)
        for name in source.names():
            file.write(to_bfloat16(source.array(name)).astype("<u2").tobytes())
