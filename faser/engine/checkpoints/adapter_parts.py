"""Values and checks that both formats of LoRA adapters share: parts, their shapes, and files in memory.

    W' = W + scale * up @ down        down: [rank, in], up: [out, rank]; PEFT's lora_A and lora_B

An adapter is read whole, by calls: the bytes that are digested are those that are used, and a file that someone
cuts short meanwhile is an error, where pages of a mapped one would end the process. Loads no torch.
"""

import math
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from faser.config.declaration import show_bytes
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.errors import ModelError
from faser.machine import available_memory

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
Factors = tuple["torch.Tensor", "torch.Tensor"]

LAYERS = "model.layers."
_CHUNK = 8 << 20  # bytes of one call


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPart:
    """Addition to one module of a model. rank: rows of down. shape: of its weight, [out, in]."""

    rank: int
    scale: float
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """An adapter that has been read.

    digest: of the content of its files, in hexadecimal. parts: by the modules' names on the hub, such as
    model.layers.0.self_attn.q_proj. base: the model that it says it was trained for; None: it does not say.
    architecture: general.architecture of a GGUF file; None: it is none. factors: gives down [rank, in] and up
    [out, rank] of a part, in float32, float16 or bfloat16, not to be written to; called with the module's name and
    the model's spec, by which rows are put into the hub's order. content: of the file with the tensors.
    """

    path: Path
    digest: str
    parts: Mapping[str, AdapterPart]
    base: str | None
    architecture: str | None
    factors: Callable[[str, DecoderSpec], Factors]
    content: mmap.mmap

    def close(self) -> None:
        """Free the content, piece by piece: a thread that frees all of it at once would hold up the others.

        Factors that were given have no values any more.
        """
        for start in range(0, len(self.content), _CHUNK):
            self.content.madvise(mmap.MADV_DONTNEED, start, min(_CHUNK, len(self.content) - start))

    @property
    def rank(self) -> int:
        """Return the largest rank of its parts."""
        return max(part.rank for part in self.parts.values())


def checked_parts(path: Path, parts: Mapping[str, AdapterPart]) -> Mapping[str, AdapterPart]:
    """Return the parts. Raises ModelError if there are none, or if one is outside the layers."""
    if not parts:
        raise ModelError(f"{path} has no tensors of an adapter")
    if outside := next((name for name in parts if not name.startswith(LAYERS)), None):
        raise ModelError(
            f"{path} adapts {outside}; FASER adapts linear modules of the decoder's layers, neither embeddings "
            "nor the LM head"
        )
    return parts


def checked_part(
    path: Path, module: str, down: Shape | None, up: Shape | None, scale: Callable[[int], float], max_rank: int
) -> AdapterPart:
    """Return the part of these shapes; None: that factor is missing. scale: of a rank. Raises ModelError."""
    if down is None or up is None:
        raise ModelError(f"{path} lacks lora_{'A' if down is None else 'B'} of {module}")
    if len(down) != 2 or len(up) != 2 or down[0] != up[1] or not (math.prod(down) and math.prod(up)):
        raise ModelError(
            f"{path}: lora_A of {module} has shape {list(down)} and lora_B {list(up)}; they must be [rank, in] "
            "and [out, rank]"
        )
    if (rank := down[0]) > max_rank:
        raise ModelError(f"{path}: the adapter of {module} has rank {rank}; --max-lora-rank is {max_rank}")
    return AdapterPart(rank=rank, scale=scale(rank), shape=(up[0], down[1]))


def read_whole(path: Path, digest: blake2b) -> mmap.mmap:
    """Read a file into memory of its own, and digest it. Raises ModelError. Holds no lock of the interpreter."""
    if path.exists() and not path.is_file():
        raise ModelError(f"{path} is no regular file")
    try:
        with path.open("rb", buffering=0) as file:
            size, at = os.fstat(file.fileno()).st_size, 0
            if not size:
                raise ModelError(f"{path} is empty")
            if size > (free := available_memory()):
                raise ModelError(f"{path} has {show_bytes(size)}, more than the {show_bytes(free)} of free memory")
            content = mmap.mmap(-1, size)
            with memoryview(content) as view:
                while at < size and (count := file.readinto(view[at : at + _CHUNK])):
                    digest.update(view[at : at + count])
                    at += count
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; an adapter must have it") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    if at < size:
        raise ModelError(f"{path} was cut short while it was read; load it again")
    return content
