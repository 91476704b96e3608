"""Stored form and bytes of a checkpoint's weights, from the headers of its files.

Reads no weights, and checks none. Needs no torch, and so `faser models` and the front-end can tell it.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from faser.engine.checkpoints.files import ModelConfig, gguf_file, tensor_headers
from faser.engine.checkpoints.gguf.file import GgufFile
from faser.engine.checkpoints.quantized import StoredFp8, StoredLowBit, StoredMxfp4

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# general.file_type of GGUF files, which names the recipe and not the type of each tensor: LLAMA_FTYPE in llama.h.
_FIRST_RECIPES = (
    "F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K"
)
RECIPES = {number: name for number, name in enumerate(_FIRST_RECIPES.split()) if name != "-"}
RECIPES |= {25: "IQ4_NL", 30: "IQ4_XS", 32: "BF16", 38: "MXFP4_MOE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """form: such as "bfloat16", "GGUF Q4_K_M", "fp8" or "int4 (awq)". num_bytes: of the files that hold them."""

    form: str
    num_bytes: int


def stored_weights(path: Path, config: ModelConfig) -> StoredWeights:
    """Describe the weights of a checkpoint directory or a GGUF file. config: its config.json.

    Raises ModelError for a GGUF file that cannot be read.
    """
    if (file := gguf_file(path)) is not None:
        opened = GgufFile(file)
        return StoredWeights(form=f"GGUF {_recipe(opened)}", num_bytes=opened.num_bytes)
    num_bytes = safetensors_bytes(path)
    match config.quantization:
        case StoredFp8(method=method):
            form = "fp8" if method == "fp8" else f"fp8 ({method})"
        case StoredLowBit(method=method, bits=bits):
            form = f"{' and '.join(f'int{each}' for each in bits)} ({method})"
        case StoredMxfp4(method=method):
            form = f"{method} experts"
        case None:
            return stored_floats(path, config.dtype)
    return StoredWeights(form=form, num_bytes=num_bytes)


def stored_floats(path: Path, dtype: str | None) -> StoredWeights:
    """Describe weights in safetensors files that are not quantised. dtype: as its config.json states it."""
    return StoredWeights(form=_floats(path) or dtype or "floats", num_bytes=safetensors_bytes(path))


def safetensors_bytes(path: Path) -> int:
    """Return the bytes of the safetensors files in a directory."""
    return sum(each.stat().st_size for each in path.glob("*.safetensors"))


def _recipe(file: GgufFile) -> str:
    """The recipe that the file names, or else the type of most of its tensors."""
    named = RECIPES.get(file.get("general.file_type", int, -1))
    types = Counter(file.format(name) for name in file.tensor_names() if len(file.shape(name)) > 1)
    return named or (types.most_common(1)[0][0] if types else "without tensors")


def _floats(directory: Path) -> str:
    """The type of most tensors in safetensors files."""
    found = Counter(str(each.get("dtype")) for each in tensor_headers(directory).values())
    return _FLOATS.get(found.most_common(1)[0][0], "") if found else ""
