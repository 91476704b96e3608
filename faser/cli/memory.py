"""`faser models MODEL --memory`: how a model fits on GPUs that are not there, before its weights are fetched."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from faser.config.declaration import parse_bytes, show_bytes
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.config.sources import UsageError
from faser.engine.checkpoints.downloads import Downloads, PublicDownloads
from faser.engine.checkpoints.files import ModelConfig, read_model_config
from faser.engine.checkpoints.source import cached, check_source
from faser.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from faser.engine.execution.startup.estimate import GpuEstimate

# What nvidia-smi says of an RTX 4090, an L40S, an H100 and an H200.
GPUS = {"24GB": 24564 << 20, "48GB": 46068 << 20, "80GB": 81559 << 20, "141GB": 143771 << 20}
USUAL_GPUS = ",".join(GPUS)
_USUAL_CONTEXT = 8192  # tokens of the sequences that are counted
_HEAD = ("GPU", "granted", "weights", "steps, graphs", "states", "left", "longest context", "sequences")


def show_memory(
    model: str, revision: str | None, sizes: str, *, as_json: bool, downloads: Downloads | None = None
) -> int:
    """Print how a model fits on one GPU of each size, such as "24GB,40GiB"; return the exit status.

    0, or 2 for a model that FASER does not know. Raises UsageError for a text that is no size.
    """
    gpus = {size: _gpu_bytes(size) for size in sizes.split(",")}
    try:
        config = _config_of(model, revision, downloads or PublicDownloads())
        found = estimates(config, gpus)
    except (ModelError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps({size: as_fields(each) for size, each in found.items()}, indent=2))
    else:
        print(_table(model, found))
    return 0


def estimates(
    model: ModelConfig, gpus: Mapping[str, int], config: EngineConfig | None = None
) -> dict[str, "GpuEstimate"]:
    """Estimate a model on GPUs of these sizes in bytes. config: other flags than the defaults."""
    from faser.engine.execution.startup.estimate import estimate  # imports torch

    config = config or EngineConfig()
    return {size: estimate(config, model, num_bytes) for size, num_bytes in gpus.items()}


def as_fields(found: "GpuEstimate") -> dict[str, int]:
    """Return all numbers of an estimate, by name."""
    derived = {"left_bytes": found.left_bytes, "longest_context": found.longest_context}
    return asdict(found) | derived | {"sequences": found.sequences(_USUAL_CONTEXT)}


def _table(model: str, found: Mapping[str, "GpuEstimate"]) -> str:
    some = next(iter(found.values()))
    rows = [_HEAD, *((size, *_row(each)) for size, each in found.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    title = f"{model} on one GPU with the default flags, estimated from its config.json"
    context = (
        f"A token takes {show_bytes(some.kv_token)} of keys and values; the model's context is {{:,}} tokens."
    )
    return "\n".join(
        (
            title,
            "",
            *lines,
            "",
            context.format(some.max_model_len),
            f"sequences: of {_USUAL_CONTEXT:,} tokens each that run at once, at most --max-num-seqs.",
        )
    )


def _row(found: "GpuEstimate") -> tuple[str, ...]:
    left = found.left_bytes
    return (
        show_bytes(found.granted_bytes),
        show_bytes(found.weights),
        show_bytes(found.step_bytes),
        show_bytes(found.states),
        show_bytes(left) if left > 0 else f"{show_bytes(-left)} too little",
        f"{found.longest_context:,}" if found.longest_context else "-",
        str(found.sequences(_USUAL_CONTEXT) or "-"),
    )


def _gpu_bytes(size: str) -> int:
    try:
        found = GPUS.get(size) or parse_bytes(size)
    except ValueError:
        found = 0
    if found <= 0:
        raise UsageError([f"--memory is {size!r}; a size is one of {', '.join(GPUS)}, or a number such as 40GiB"])
    return found


def _config_of(model: str, revision: str | None, downloads: Downloads) -> ModelConfig:
    """Read a model's configuration; of a hub repository that is not here only config.json is fetched."""
    directory = Path(model).expanduser()
    if (directory / "config.json").is_file():  # whatever it lacks
        return read_model_config(directory)
    if check_source(model, revision) is not None:
        return read_model_config(directory)
    try:
        return read_model_config(cached(model, cache_dir(), revision=revision))
    except ModelError:
        if ":" in model:
            raise  # one of several GGUF files, each with a header of its own
    return read_model_config(downloads.snapshot(model, revision, ("config.json",), lambda _done, _total: None))
