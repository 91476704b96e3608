"""Where the weights of a checkpoint lie: in safetensors files of a directory, or in a GGUF file."""

from pathlib import Path

GGUF_WEIGHTS = "model.gguf"  # in a directory whose other files are those of the hub
TORCH_WEIGHTS = "pytorch_model.bin"  # of some heads; no model is read from it


def gguf_file(checkpoint: Path) -> Path | None:
    """The GGUF file with the weights of a checkpoint, which may be that file. None: safetensors have them."""
    if checkpoint.suffix == ".gguf":
        return checkpoint
    inside = checkpoint / GGUF_WEIGHTS
    return inside if inside.is_file() and not any(checkpoint.glob("*.safetensors")) else None
