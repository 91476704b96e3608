"""Loads the models of an engine, the target and an optional draft model, and checks that they fit together.

Knows neither caches nor schedules.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faser.config.engine import EngineConfig
from faser.engine.checkpoints.config_json import ModelConfig, read_model_config
from faser.engine.checkpoints.heads import HeadSpec
from faser.engine.checkpoints.weight_files import gguf_file
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.models.weights import WeightSource
from faser.engine.execution.startup.sizing import (
    cached_model,
    compute_dtype,
    context_len,
    kv_shapes,
    most_logit_rows,
)
from faser.errors import ConfigError
from faser.kernels.interface.backend import Backend
from faser.types import ProgressCallback

Sources = Callable[[Path], WeightSource]  # the tensors of the model in a directory


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """config: its config.json. max_positions: the largest number of positions that the engine uses."""

    config: ModelConfig
    decoder: Decoder
    max_positions: int


def check_models(
    config: EngineConfig, directory: Path, draft_directory: Path | None, head: HeadSpec | None = None
) -> None:
    """Refuse what the files of configuration already show, before kernels are compiled and weights are read.

    Raises ConfigError or ModelError naming what does not fit; loading would raise the same.
    """
    target = read_model_config(directory)
    models, max_positions = [target], context_len(config, target)
    if draft_directory is not None:
        models.append(read_model_config(draft_directory))
        _check_vocabulary(models[1], draft_directory, target)
    if config.kv_cache_memory is not None:
        cached = [cached_model(config, each.spec, compute_dtype(config, each)) for each in models]
        if head is not None:
            cached.append(cached_model(config, head.decoder, compute_dtype(config, target)))
        kv_shapes(config, cached, max_positions)


def load_target(
    config: EngineConfig,
    directory: Path,
    backend: Backend,
    progress: ProgressCallback,
    sources: Sources | None = None,
    state_layers: tuple[int, ...] = (),
) -> LoadedModel:
    """The model that is served. sources: where its tensors come from; None: its directory.

    state_layers: whose states a head reads.

    Raises ConfigError or ModelError naming what does not fit.
    """
    model = read_model_config(directory)
    max_positions = context_len(config, model)
    decoder = load_decoder(
        directory,
        backend,
        compute_dtype(config, model),
        max_model_len=max_positions,
        max_rows=config.max_num_batched_tokens,
        max_logit_rows=most_logit_rows(config),
        quantization=config.quantization,
        source=None if sources is None else sources(directory),
        state_layers=state_layers,
        progress=lambda done, total: progress("loading weights", done, total),
    )
    return LoadedModel(config=model, decoder=decoder, max_positions=max_positions)


def load_draft_model(
    config: EngineConfig,
    directory: Path,
    target: LoadedModel,
    backend: Backend,
    progress: ProgressCallback,
    sources: Sources | None = None,
) -> LoadedModel:
    """The model that drafts for the target. Its context may be shorter: it drafts up to its end.

    sources: as in load_target.
    Raises ConfigError where its vocabulary differs in size from the target's, ModelError naming what cannot be
    loaded.
    """
    model = read_model_config(directory)
    _check_vocabulary(model, directory, target.config)
    limits = (model.spec.max_position_embeddings, target.max_positions, config.speculation.draft_max_model_len)
    max_positions = min(limit for limit in limits if limit is not None)
    decoder = load_decoder(
        directory,
        backend,
        compute_dtype(config, model),
        max_model_len=max_positions,
        max_rows=config.max_num_batched_tokens,
        max_logit_rows=config.max_num_seqs,
        quantization=_of_draft_model(config.quantization, directory, model),
        source=None if sources is None else sources(directory),
        progress=lambda done, total: progress("loading draft model", done, total),
    )
    return LoadedModel(config=model, decoder=decoder, max_positions=max_positions)


def _of_draft_model(quantization: str | None, directory: Path, model: ModelConfig) -> str | None:
    """The target's, where it applies to the draft model: its drafts need speed more than its last bits."""
    applies = {
        "none": True,
        "gguf": gguf_file(directory) is not None,
        "int8": model.quantization is None,
        "int4": model.quantization is None,
    }
    return quantization if quantization is not None and applies.get(quantization) else None


def _check_vocabulary(draft: ModelConfig, directory: Path, target: ModelConfig) -> None:
    """Raises ConfigError where the sizes differ."""
    ours, theirs = draft.spec.vocab_size, target.spec.vocab_size
    if ours != theirs:
        raise ConfigError(
            f"the draft model {directory} has {ours} tokens and the target {theirs}; a draft model needs the "
            "target's vocabulary"
        )
