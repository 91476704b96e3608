"""Loads the head of an engine, for a loaded target, and what belongs to it: its runner, the states, its cache.

A head is one of the ways to draft that `model` of the speculative config may name: with `auto` its files say so.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.config.speculation import AUTO
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.heads import EAGLE3, HeadSpec, is_head, read_head_spec, untrainable
from faser.engine.checkpoints.source import resolve
from faser.engine.execution.drafting.eagle3 import Eagle3Head
from faser.engine.execution.drafting.head import HeadRunner
from faser.engine.execution.drafting.head_memory import HeadCache, HiddenStates, ring_rows
from faser.engine.execution.drafting.head_weights import load_head
from faser.engine.execution.drafting.registry import HeadParts
from faser.engine.execution.models.rounded_source import QUANTIZATIONS
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.startup.model_loading import LoadedModel
from faser.errors import ConfigError, ModelError
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.shapes import KvShape
from faser.types import ProgressCallback


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFiles:
    """What drafts, by its files. config: says of these what they are. model, head: at most one is there.

    head_spec: of the head in head.
    """

    config: EngineConfig
    model: Path | None = None
    head: Path | None = None
    head_spec: HeadSpec | None = None


def find_draft_files(config: EngineConfig, target: DecoderSpec, report: ProgressCallback) -> DraftFiles:
    """The draft model or head of a target, fetched first if need be.

    Raises ModelError and ConfigError: see with_kind_of_model and find_head.
    """
    speculation = config.speculation
    found = None
    if speculation.needs_draft_model or speculation.needs_head:
        found = resolve(speculation.model, cache_dir(), revision=speculation.revision, progress=report)
    config = with_kind_of_model(config, found)
    spec = find_head(config, found, target)
    if spec is None:
        return DraftFiles(config=config, model=found)
    return DraftFiles(config=config, head=found, head_spec=spec)


def check_refreshable(files: DraftFiles) -> None:
    """Raises ConfigError unless the engine has a head that can be refreshed while it serves."""
    named = "distill_online is true"
    if files.config.on_gpu:
        raise ConfigError(
            f"{named}; the model runs on {files.config.device}, and heads are refreshed on a CPU only"
        )
    if files.head is None or files.head_spec is None:
        raise ConfigError(
            f"{named}; no head drafts for this model: name one in the speculative config, or make one with "
            "faser distill"
        )
    if reason := untrainable(files.head_spec, files.head):
        raise ConfigError(f"{named}; the head in {files.head} cannot be trained: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedHead:
    """states: where the target's steps leave theirs. max_places: of one sequence in the head's cache."""

    head: Eagle3Head
    states: HiddenStates
    max_places: int


def with_kind_of_model(config: EngineConfig, directory: Path | None) -> EngineConfig:
    """The config, which says of the model in directory whether it is a draft model or a head.

    directory: of what `model` names; None: it names nothing. Raises ModelError for a head that is not supported.
    """
    speculation = config.speculation
    if directory is None or speculation.method != AUTO or speculation.model_method is not None:
        return config
    if not is_head(directory):
        return config
    return replace(config, speculative_config={**(config.speculative_config or {}), "model_method": EAGLE3})


def find_head(config: EngineConfig, directory: Path | None, target: DecoderSpec) -> HeadSpec | None:
    """The head in directory; None where the config drafts without one.

    Raises ModelError: see read_head_spec.
    """
    if not config.speculation.needs_head:
        return None
    assert directory is not None, "a head has a directory"
    return read_head_spec(directory, target)


def load_drafting_head(
    config: EngineConfig, directory: Path, target: LoadedModel, backend: Backend, progress: ProgressCallback
) -> LoadedHead:
    """The head in directory, which drafts for the target, on the target's backend: they compute in turn."""
    head = _load(config, directory, target, backend, progress)
    states, dtype = target.decoder.states, target.decoder.dtype
    ring = HiddenStates(
        num_slots=config.max_num_seqs,
        num_rows=ring_rows(states.shape[1], dtype, max_rows=len(states), on_gpu=config.on_gpu),
        width=states.shape[1],
        dtype=dtype,
        device=backend.device,
    )
    return LoadedHead(head=head, states=ring, max_places=_max_places(config, target))


def _max_places(config: EngineConfig, target: LoadedModel) -> int:
    return target.max_positions + config.speculation.cap


def _load(
    config: EngineConfig, directory: Path, target: LoadedModel, backend: Backend, progress: ProgressCallback
) -> Eagle3Head:
    return load_head(
        directory,
        target.decoder,
        backend,
        max_positions=_max_places(config, target),
        max_rows=config.max_num_batched_tokens,
        max_logit_rows=config.max_num_seqs,
        quantization=config.quantization if config.quantization in QUANTIZATIONS else None,
        progress=lambda done, total: progress("loading head", done, total),
    )


def make_head_parts(
    config: EngineConfig,
    loaded: LoadedHead,
    target: LoadedModel,
    backend: Backend,
    kv: KvShape,
    *,
    refreshes: bool = False,
) -> HeadParts:
    """kv: of the head's cache. refreshes: other versions of the head may follow."""
    slots = config.max_num_seqs
    table = BlockTable(slots, -(-loaded.max_places // kv.block_size))
    make_runner = partial(
        HeadRunner,
        backend=backend,
        kv=kv,
        states=target.decoder.states,
        vocab_size=target.decoder.spec.vocab_size,
    )
    runner = make_runner(loaded.head)

    def load_version(directory: Path) -> HeadRunner:
        head = _load(config, directory, target, backend, lambda *_: None)
        if head.spec.state_layers != loaded.head.spec.state_layers:
            raise ModelError(
                f"the head in {directory} reads the states of the layers {head.spec.state_layers}; this engine "
                f"keeps those of {loaded.head.spec.state_layers}"
            )
        return make_runner(head, shares_cache_of=runner)

    return HeadParts(
        states=loaded.states,
        runner=runner,
        cache=HeadCache(table, num_slots=slots, num_blocks=kv.num_blocks, block_size=kv.block_size),
        load_version=load_version if refreshes else None,
    )
