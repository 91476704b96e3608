"""Models that an engine loads, by the files that its configuration names, and whether they fit together.

The target comes first; behind it what drafts for it, a draft model or a head: with method `auto` the files say
which, and without `model` the head may be part of the target's own checkpoint. What they show is refused here,
before kernels are compiled and weights are read.
"""

import logging
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.config.speculation import AUTO, DRAFTERS, MTP
from faser.engine.checkpoints.assistant import assistant_spec
from faser.engine.checkpoints.blocks import BlockSpec, block_method, read_block_spec
from faser.engine.checkpoints.files import ModelConfig, read_model_config
from faser.engine.checkpoints.heads import (
    EAGLE3,
    HeadSpec,
    describes_assistant,
    is_head,
    read_config,
    read_head_spec,
    read_mtp_spec,
)
from faser.engine.checkpoints.source import resolve
from faser.engine.execution.models.shard import Shard, local_spec
from faser.engine.execution.startup.memory import (
    CachedModel,
    compute_dtype,
    context_len,
    kv_cache_dtype,
    kv_shapes,
    with_snapshot_memory,
)
from faser.errors import ConfigError, ModelError
from faser.types.engine import ProgressCallback

_log = logging.getLogger("faser")


class ModelRole(Enum):
    TARGET = "target"
    DRAFT = "draft model"
    HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles(CachedModel):
    """A model to load. config: its config.json; a head has its target's.

    max_positions: the largest number of positions that the engine uses. max_logit_rows: most rows of one step that
    need logits.
    """

    role: ModelRole
    directory: Path
    config: ModelConfig
    max_positions: int
    max_logit_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFiles(ModelFiles):
    head: HeadSpec | BlockSpec


def find_models(
    config: EngineConfig, directory: Path, report: ProgressCallback
) -> tuple[EngineConfig, list[ModelFiles]]:
    """The target in directory and what drafts for it, which is fetched first if need be.

    The config that is returned says of what `model` names whether it is a draft model or a head, whether the
    target's own layer drafts, and how much memory snapshots of recurrent states take.
    Raises ConfigError or ModelError naming what does not fit; loading would raise the same.
    """
    target = target_files(config, directory)
    models = [target]
    speculation = config.speculation
    if speculation.may_use_mtp:
        if (head := _mtp_files(config, target)) is not None:
            config = _with_model_method(config, MTP)
            models.append(head)
    elif speculation.needs_model:
        named = resolve(speculation.model, cache_dir(), revision=speculation.revision, progress=report)
        config = _with_kind_of_model(config, named)
        find = head_files if config.speculation.needs_head else draft_model_files
        models.append(find(config, named, target))
    config = with_snapshot_memory(config, models, target.max_positions)
    if config.kv_cache_memory is not None:
        kv_shapes(config, models, target.max_positions)
    return config, models


def target_files(config: EngineConfig, directory: Path) -> ModelFiles:
    """The model that is served. Raises ConfigError if the ranks that are asked for cannot share it."""
    model = read_model_config(directory)
    if config.tensor_parallel_size > 1:
        local_spec(model.spec, Shard(rank=0, size=config.tensor_parallel_size))
    return _files(
        config,
        ModelRole.TARGET,
        directory,
        model,
        max_positions=context_len(config, model),
        max_logit_rows=config.max_logit_rows,
    )


def draft_model_files(config: EngineConfig, directory: Path, target: ModelFiles) -> ModelFiles:
    """The model that drafts for the target. Its context may be shorter: it drafts up to its end."""
    model = read_model_config(directory)
    ours, theirs = model.spec.vocab_size, target.spec.vocab_size
    if ours != theirs:
        raise ConfigError(
            f"the draft model {directory} has {ours} tokens and the target {theirs}; a draft model needs the "
            "target's vocabulary"
        )
    if model.spec.has_states:
        raise ConfigError(
            f"the draft model {directory} has gated delta nets, whose states a drafter cannot roll back; name "
            "another one"
        )
    asked = config.speculation.draft_max_model_len or target.max_positions
    return _files(
        config,
        ModelRole.DRAFT,
        directory,
        model,
        max_positions=min(model.spec.max_position_embeddings, target.max_positions, asked),
        max_logit_rows=config.max_num_seqs,
    )


def head_files(config: EngineConfig, directory: Path, target: ModelFiles) -> HeadFiles:
    """The head that drafts for the target.

    Raises ConfigError where the method is another one, and ModelError: see read_head_spec, read_block_spec and
    assistant_spec.
    """
    speculation, found = config.speculation, _method_of(directory)
    method = speculation.pass_method
    assert method is not None
    if DRAFTERS[method].in_blocks:
        spec, asked = read_block_spec(directory, target.spec, method), speculation.num_speculative_tokens
        if speculation.method != AUTO and asked is not None and asked > spec.most_tokens:
            raise ConfigError(
                f"num_speculative_tokens is {asked}; {directory} was trained for blocks of {spec.block_size} "
                f"rows, which draft {spec.most_tokens} tokens at most"
            )
        return _head_files(config, directory, target, spec)
    if found is not None and found != method:
        raise ConfigError(f"method is {method}; {directory} has a head of method {found}")
    if found != MTP:
        return _head_files(config, directory, target, read_head_spec(directory, target.spec))
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"{directory} reads the keys of its model, which ranks divide; tensor_parallel_size is "
            f"{config.tensor_parallel_size}, it must be 1"
        )
    config_json = read_config(directory / "config.json")
    return _head_files(config, directory, target, assistant_spec(config_json, target.spec))


def _method_of(directory: Path) -> str | None:
    """Return the method of the head in a directory; None: there is none. Raises ModelError for a refused kind."""
    if block := block_method(directory):
        return block
    if not is_head(directory):
        return None
    return MTP if describes_assistant(read_config(directory / "config.json")) else EAGLE3


def _mtp_files(config: EngineConfig, target: ModelFiles) -> HeadFiles | None:
    """The layer that drafts in the target's own checkpoint; None: it is not asked for, and cannot be had.

    Raises ConfigError or ModelError where it is asked for.
    """
    speculation, directory = config.speculation, target.directory
    asked = MTP in (speculation.method, speculation.model_method)
    try:
        spec = read_mtp_spec(directory, target.spec)
    except ModelError as error:
        if asked:
            raise
        _log.warning("%s; it does not draft", error)
        return None
    if spec is None and asked:
        raise ConfigError(
            f"method is mtp; {directory} has no layer that drafts: no tensors mtp.* of Qwen3.5, or blk.*.nextn.* "
            "in a GGUF file"
        )
    return None if spec is None else _head_files(config, directory, target, spec)


def _head_files(
    config: EngineConfig, directory: Path, target: ModelFiles, spec: HeadSpec | BlockSpec
) -> HeadFiles:
    return HeadFiles(
        role=ModelRole.HEAD,
        directory=directory,
        config=target.config,
        spec=spec.decoder,
        dtype=target.dtype,
        kv_dtype=target.kv_dtype,
        max_positions=target.max_positions + config.speculation.cap,
        max_logit_rows=max(config.max_num_seqs, spec.block_size if isinstance(spec, BlockSpec) else 1),
        head=spec,
    )


def _files(
    config: EngineConfig,
    role: ModelRole,
    directory: Path,
    model: ModelConfig,
    *,
    max_positions: int,
    max_logit_rows: int,
) -> ModelFiles:
    dtype = compute_dtype(config, model)
    return ModelFiles(
        role=role,
        directory=directory,
        config=model,
        spec=model.spec,
        dtype=dtype,
        kv_dtype=kv_cache_dtype(config, dtype),
        max_positions=max_positions,
        max_logit_rows=max_logit_rows,
    )


def _with_kind_of_model(config: EngineConfig, directory: Path) -> EngineConfig:
    """The config, which says whether a head lies in directory. ModelError: it is not supported."""
    if config.speculation.model_method is not None:
        return config
    method = _method_of(directory)
    return config if method is None else _with_model_method(config, method)


def _with_model_method(config: EngineConfig, method: str) -> EngineConfig:
    """The config, which with method auto says what drafts besides text."""
    if config.speculation.method != AUTO:
        return config
    return replace(config, speculative_config={**(config.speculative_config or {}), "model_method": method})
