"""Loads the models of an engine, the target and an optional draft model, and checks that they fit together.

Knows neither caches nor schedules.

Loads the head of an engine, for a loaded target, and what belongs to it: its runner, the states, its cache.

A head is one of the ways to draft that `model` of the speculative config may name: with `auto` its files say so.

Makes the runner of a model: eager or with CUDA graphs, and with the token sampler of its device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.config.speculation import AUTO
from faser.engine.checkpoints.config_json import ModelConfig, read_model_config
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.heads.head_spec import HeadSpec
from faser.engine.checkpoints.heads.reader import kind_of_directory, read_head_spec
from faser.engine.checkpoints.heads.trainable import untrainable
from faser.engine.checkpoints.source import resolve
from faser.engine.checkpoints.weight_files import gguf_file
from faser.engine.execution.drafter_registry import HeadParts
from faser.engine.execution.drafters.draft_samplers import WINDOW
from faser.engine.execution.drafters.head_cache import HeadCache
from faser.engine.execution.drafters.head_runner import HeadRunner
from faser.engine.execution.drafters.layer_skip import draft_layers
from faser.engine.execution.drafters.states import HiddenStates, ring_rows
from faser.engine.execution.heads.head import Head
from faser.engine.execution.heads.loader import load_head
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.models.rounded_source import QUANTIZATIONS
from faser.engine.execution.models.weights import WeightSource
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.graph_runner import GraphRunner
from faser.engine.execution.runner.graphs import DraftGraphs, GraphSizes
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.token_samplers import DeviceTokenSampler, HostTokenSampler, TokenSampler
from faser.engine.execution.sampling.torch_kernels import TorchSamplingKernels
from faser.engine.execution.startup.memory import (
    cached_model,
    compute_dtype,
    context_len,
    kv_shapes,
    most_logit_rows,
)
from faser.errors import ConfigError, ModelError
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.processors import LANE_BYTES, DeviceLane
from faser.kernels.interface.shapes import KvShape
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
    if config.speculation.skips_layers:
        draft_layers(config.speculation.draft_layers, target.spec.num_layers)
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

    head: Head
    states: HiddenStates
    max_places: int


def with_kind_of_model(config: EngineConfig, directory: Path | None) -> EngineConfig:
    """The config, which says of the model in directory whether it is a draft model or a head, and of which kind.

    directory: of what `model` names; None: it names nothing. Raises ModelError for a head that is not supported.
    """
    speculation = config.speculation
    if directory is None or speculation.method != AUTO or speculation.model_method is not None:
        return config
    kind = kind_of_directory(directory)
    if kind is None:
        return config
    return replace(config, speculative_config={**(config.speculative_config or {}), "model_method": kind.value})


def find_head(config: EngineConfig, directory: Path | None, target: DecoderSpec) -> HeadSpec | None:
    """The head in directory; None where the config drafts without one.

    Raises ModelError: see read_head_spec; ConfigError for longer drafts than a head that drafts alone can make.
    """
    if not config.speculation.needs_head:
        return None
    assert directory is not None, "a head has a directory"
    speculation = config.speculation
    spec = read_head_spec(directory, target, method=speculation.pass_method)
    asked, most = speculation.num_speculative_tokens, spec.max_draft_tokens
    if speculation.method != AUTO and asked is not None and most is not None and asked > most:
        raise ConfigError(
            f"num_speculative_tokens is {asked}; the heads in {directory} draft at most {most} tokens"
        )
    return spec


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
) -> Head:
    return load_head(
        directory,
        target.decoder,
        backend,
        method=config.speculation.pass_method,
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


class ModelRole(Enum):
    TARGET = "target"
    DRAFTER = "draft model"


def make_runner(
    config: EngineConfig,
    backend: Backend,
    model: LoadedModel,
    kv: KvShape,
    role: ModelRole,
    progress: ProgressCallback,
    device_lanes: Sequence[DeviceLane] = (),
) -> Runner:
    """With CUDA graphs where the device can replay them and the config does not forbid it.

    device_lanes: those that it computes on while another model's runner computes on the rest of the device.
    """
    decoder, capture = model.decoder, backend.graph_capture
    most = max_logit_rows(config, role)
    kernels = backend.device_sampling_kernels(most, decoder.spec.vocab_size)
    if capture is None or kernels is None:
        sampler: TokenSampler = HostTokenSampler(backend.sampling_kernels or TorchSamplingKernels())
        return Runner(decoder, backend, kv, sampler)
    device_sampler = DeviceTokenSampler(kernels, capture, backend.device, most)
    if not config.records_steps:
        return Runner(decoder, backend, kv, device_sampler)
    return GraphRunner(
        decoder,
        backend,
        kv,
        device_sampler,
        capture,
        sizes=_sizes(config, model, role),
        max_logit_rows=most,
        drafts=_draft_graphs(config, decoder.spec.num_layers, role),
        lane_captures={
            each: lane for each in device_lanes if (lane := backend.graph_capture_on(each)) is not None
        },
        report=lambda stage, done, total: progress(f"{stage} of the {role.value}", done, total),
    )


def max_logit_rows(config: EngineConfig, role: ModelRole) -> int:
    """Most rows of one step that need logits."""
    return most_logit_rows(config) if role is ModelRole.TARGET else config.max_num_seqs


def expected_graph_bytes(
    config: EngineConfig, model: LoadedModel, role: ModelRole, num_device_lanes: int = 0
) -> int:
    """About the device memory of the model's CUDA graphs, those for device lanes included."""
    if not config.records_steps:
        return num_device_lanes * LANE_BYTES
    spec, sizes = model.decoder.spec, _sizes(config, model, role)
    depths = dict.fromkeys((None, *_draft_graphs(config, spec.num_layers, role).depths))
    num_kinds = len(set(spec.windows))
    graph_bytes = sizes.expected_bytes(num_kinds, len(depths))
    return graph_bytes + num_device_lanes * (graph_bytes + LANE_BYTES)


def _sizes(config: EngineConfig, model: LoadedModel, role: ModelRole) -> GraphSizes:
    drafts = 0 if config.speculation.policy == "off" else config.speculation.cap
    return GraphSizes.default(
        max_rows=config.max_num_batched_tokens,
        max_sequences=config.max_num_seqs,
        # A draft's first pass also stores the tokens that followed the last draft: a row or two per sequence.
        max_drafts=drafts if role is ModelRole.TARGET else 1,
        max_blocks_each=-(-model.max_positions // config.block_size),
        requested=config.cudagraph_capture_sizes,
        block_size=config.block_size,
    )


def _draft_graphs(config: EngineConfig, num_layers: int, role: ModelRole) -> DraftGraphs:
    """The target's own layers draft only with layer skipping."""
    speculation = config.speculation
    if role is ModelRole.DRAFTER:
        return DraftGraphs(windows=(WINDOW,))
    if speculation.skips_layers:
        return DraftGraphs(windows=(WINDOW,), depths=(draft_layers(speculation.draft_layers, num_layers),))
    return DraftGraphs()
