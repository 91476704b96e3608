"""Loads the models of an engine and, once their caches have a size, starts the runner of each.

A draft model has a backend of its own, so that it may compute while the target does. A head computes on the
target's, in turn with it, and reads the hidden states that the target's steps leave. Knows no schedules.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from faser.config.engine import EngineConfig
from faser.config.speculation import DRAFT_VOCAB_SIZE, DRAFT_VOCAB_SIZES, MTP
from faser.engine.checkpoints.assistant import AssistantSpec
from faser.engine.checkpoints.blocks import BlockSpec
from faser.engine.checkpoints.files import gguf_file
from faser.engine.execution.drafting.blocks.graphs import BlockGraphs, num_walks
from faser.engine.execution.drafting.blocks.loop import BlockRunner
from faser.engine.execution.drafting.blocks.model import BlockModel
from faser.engine.execution.drafting.blocks.weights import load_block
from faser.engine.execution.drafting.head_memory import HiddenStates, ring_rows
from faser.engine.execution.drafting.heads.assistant import AssistantHead, load_assistant
from faser.engine.execution.drafting.heads.decoder import HeadDecoder, StateReader
from faser.engine.execution.drafting.heads.head import Head, HeadRunner
from faser.engine.execution.drafting.heads.mtp import load_mtp
from faser.engine.execution.drafting.heads.weights import load_head
from faser.engine.execution.drafting.registry import HeadParts
from faser.engine.execution.models.adapted import AdapterSizes
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.layers import attention_shape
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.models.shard import Shard
from faser.engine.execution.models.sources import QUANTIZATIONS
from faser.engine.execution.models.weights import ByteProgress, WeightSource
from faser.engine.execution.overlap.lanes import DeviceLanes
from faser.engine.execution.ranks.group import RankGroup
from faser.engine.execution.ranks.relay import LeadingGraphRunner, LeadingRunner, capture_alike
from faser.engine.execution.runner.graph_runner import STAGE, GraphRunner
from faser.engine.execution.runner.graph_sizes import GraphSizes
from faser.engine.execution.runner.model import RunnableModel
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.kernels import TORCH_SAMPLING
from faser.engine.execution.sampling.tokens import DeviceTokenSampler, HostTokenSampler
from faser.engine.execution.startup.files import HeadFiles, ModelFiles, ModelRole
from faser.engine.execution.startup.memory import state_shape
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import LANE_BYTES, DeviceLane, KvCache
from faser.optional import or_else
from faser.types.engine import ProgressCallback

Sources = Callable[[Path], WeightSource]  # the tensors of the model in a directory

_MOST_LOW_BITS = (
    12.0  # a weight, of a target whose block drafter is rounded: more is 16 bits with a few exceptions
)
_HEAD_GRAPH_BYTES = 1 << 20  # of a graph with some twenty kernels, and what it allocates
_PLANS_BYTES = 4 << 20  # of a block drafter's graph: its rows repeat the blocks of their sequences
# Rows of a head's graphs: a layer costs little, so they are further apart than those of a model. Passes over more
# rows are those of prompts, and run eagerly.
_HEAD_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_LOADING = {ModelRole.TARGET: "loading weights", ModelRole.DRAFT: "loading draft model"}

_log = logging.getLogger("faser")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    files: ModelFiles
    decoder: Decoder
    backend: Backend

    @property
    def weight_bytes(self) -> int:
        return self.decoder.weight_bytes

    @property
    def num_layers(self) -> int:
        return self.decoder.spec.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel(LoadedModel):
    """kv: the shape of its cache; those of all models have as many blocks of the same size."""

    kv: KvShape
    runner: Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedHead:
    """states: where the target's steps leave theirs."""

    files: HeadFiles
    head: Head | BlockModel
    target: LoadedModel
    states: HiddenStates

    @property
    def backend(self) -> Backend:
        return self.target.backend

    @property
    def weight_bytes(self) -> int:
        return self.head.weight_bytes

    @property
    def drafts_on_device(self) -> bool:
        """Return whether it runs as a draft model does, with graphs and tokens that the device feeds.

        An assistant does not: all of its passes are at one position, on the target's keys and values. Nor does a
        block drafter, which has one pass a draft.
        """
        has_graphs = self.backend.graph_capture is not None
        return has_graphs and not isinstance(self.head, BlockModel | AssistantHead)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHead(LoadedHead):
    kv: KvShape
    parts: HeadParts

    @property
    def runner(self) -> Runner | HeadRunner | BlockRunner:
        return self.parts.runner


def load_models(
    config: EngineConfig,
    models: Sequence[ModelFiles],
    backend: Backend,
    report: ProgressCallback,
    sources: Sources | None = None,
    group: RankGroup | None = None,
) -> tuple[LoadedModel, list[LoadedModel | LoadedHead]]:
    """The target, on this backend, and what drafts for it. models: of find_models.

    sources: where the tensors of a model come from; None: its directory. group: the ranks that share the target;
    what drafts for it is rank 0's alone.
    Raises ConfigError or ModelError naming what cannot be loaded.
    """
    target_files, *drafting = models
    read = {layer for each in drafting if isinstance(each, HeadFiles) for layer in each.head.state_layers}
    target = load_model(config, target_files, backend, report, sources, tuple(sorted(read)), group)
    loaded: list[LoadedModel | LoadedHead] = []
    for each in drafting:
        if isinstance(each, HeadFiles):
            loaded.append(_load_head(config, each, target, report))
        else:
            loaded.append(load_model(config, each, backend.concurrent_instance(), report, sources))
    return target, loaded


def load_model(
    config: EngineConfig,
    files: ModelFiles,
    backend: Backend,
    report: ProgressCallback,
    sources: Sources | None = None,
    state_layers: tuple[int, ...] = (),
    group: RankGroup | None = None,
) -> LoadedModel:
    """A target or a draft model; see load_models. state_layers: whose states a head reads.

    group: the ranks that share the model, of which this one loads its part; None: all of it.
    """
    stage, is_target = _LOADING[files.role], files.role is ModelRole.TARGET
    adapts = is_target and config.enable_lora
    decoder = load_decoder(
        files.directory,
        backend,
        files.dtype,
        max_model_len=files.max_positions,
        max_rows=config.max_num_batched_tokens,
        max_logit_rows=files.max_logit_rows,
        quantization=config.quantization if is_target else _of_draft_model(config.quantization, files),
        source=None if sources is None else sources(files.directory),
        state_layers=state_layers,
        progress=lambda done, total: report(stage, done, total),
        shard=None if group is None else Shard(rank=group.rank, size=group.size),
        ranks=None if group is None else group.collectives,
        adapters=AdapterSizes(slots=config.max_loras, max_rank=config.max_lora_rank) if adapts else None,
    )
    return LoadedModel(files=files, decoder=decoder, backend=backend)


def start_models(
    config: EngineConfig,
    target: LoadedModel,
    drafting: Sequence[LoadedModel | LoadedHead],
    shapes: Sequence[KvShape],
    report: ProgressCallback,
    *,
    on: DeviceLanes,
    group: RankGroup | None = None,
) -> tuple[EngineModel, list[EngineModel | EngineHead]]:
    """Give each model its cache and its runner: what drafts first, for its lane may have processors that cannot
    run it.

    shapes: of the target's cache and the others', in their order. group: as in load_models. Raises LaneError: see
    GraphRunner.
    """
    loaded = [*zip(drafting, shapes[1:], strict=True)]
    started: list[EngineModel | EngineHead] = [
        _start_model(config, each, kv, report, on.draft) for each, kv in loaded if isinstance(each, LoadedModel)
    ]
    verifying = _start_model(config, target, shapes[0], report, on.verify, group)
    started += [
        _start_head(config, each, kv, verifying, report) for each, kv in loaded if isinstance(each, LoadedHead)
    ]
    return verifying, started


def _start_model(
    config: EngineConfig,
    model: LoadedModel,
    kv: KvShape,
    report: ProgressCallback,
    lanes: Sequence[DeviceLane],
    group: RankGroup | None = None,
) -> EngineModel:
    kv = replace(kv, heads=model.decoder.spec.kv_heads)
    runner = make_runner(config, model, kv, report, lanes, group=group)
    return EngineModel(files=model.files, decoder=model.decoder, backend=model.backend, kv=kv, runner=runner)


def make_runner(
    config: EngineConfig,
    model: LoadedModel | LoadedHead,
    kv: KvShape,
    report: ProgressCallback,
    device_lanes: Sequence[DeviceLane] = (),
    decoder: RunnableModel | None = None,
    group: RankGroup | None = None,
) -> Runner:
    """With CUDA graphs where the device can replay them and the config does not forbid it.

    device_lanes: those that it computes on while another model's runner computes on the rest of the device.
    decoder: a head's; None: the model's. group: ranks that share the model and make their runners too; the first
    one's leads the others. Raises EngineError where they capture different graphs, or one cannot.
    """
    if group is None:
        return _make_runner(config, model, kv, report, device_lanes, decoder)
    kinds = (Runner, GraphRunner) if group.rank else (LeadingRunner, LeadingGraphRunner)
    runner = capture_alike(
        group,
        lambda before: _make_runner(
            config, model, kv, report, (), decoder, kinds=kinds, samples=not group.rank, before_capture=before
        ),
    )
    if isinstance(runner, LeadingRunner):
        runner.lead(group)
    return runner


def _make_runner(
    config: EngineConfig,
    model: LoadedModel | LoadedHead,
    kv: KvShape,
    report: ProgressCallback,
    device_lanes: Sequence[DeviceLane],
    decoder: RunnableModel | None,
    *,
    kinds: tuple[type[Runner], type[GraphRunner]] = (Runner, GraphRunner),
    samples: bool = True,
    before_capture: Callable[[str], None] = lambda _: None,
) -> Runner:
    """kinds: of a runner without and with graphs. samples, before_capture: see GraphRunner."""
    plain, with_graphs = kinds
    if decoder is None:
        assert isinstance(model, LoadedModel)
        decoder = model.decoder
    backend, most = model.backend, model.files.max_logit_rows
    capture, kernels = backend.graph_capture, backend.device_sampling_kernels(most, decoder.logit_rows.shape[1])
    states = state_shape(config, model.files)
    if capture is None or kernels is None:
        sampler = HostTokenSampler(or_else(backend.sampling_kernels, TORCH_SAMPLING))
        return plain(decoder, backend, kv, sampler, states=states)
    device_sampler = DeviceTokenSampler(kernels, capture, backend.device, most)
    if not config.records_steps:
        return plain(decoder, backend, kv, device_sampler, states=states)
    reserve_workspace(config, model)
    return with_graphs(
        decoder,
        backend,
        kv,
        device_sampler,
        capture,
        sizes=_graph_sizes(config, model),
        max_logit_rows=most,
        drafts=model.files.role is not ModelRole.TARGET,
        samples=samples,
        lane_captures={
            each: lane for each in device_lanes if (lane := backend.graph_capture_on(each)) is not None
        },
        states=states,
        report=lambda stage, done, total: report(f"{stage} of the {model.files.role.value}", done, total),
        before_capture=before_capture,
    )


def reserve_workspace(config: EngineConfig, model: LoadedModel | LoadedHead) -> None:
    """Have attention's workspace made as large as the model's CUDA graphs will need it. Idempotent."""
    capture = model.backend.graph_capture
    if capture is not None and config.records_steps:
        for shape in {attention_shape(each) for each in model.files.computed.attentions}:
            capture.reserve(shape, _graph_sizes(config, model).batch_sizes)


def expected_graph_bytes(config: EngineConfig, model: LoadedModel | LoadedHead, num_device_lanes: int = 0) -> int:
    """About the device memory of the model's CUDA graphs, those for device lanes included."""
    if isinstance(model, LoadedHead) and not (model.drafts_on_device or isinstance(model.head, BlockModel)):
        return 0
    if not config.records_steps:
        return num_device_lanes * LANE_BYTES
    num_kinds = len({attention_shape(each) for each in model.files.computed.attentions})
    sizes = _graph_sizes(config, model)
    if isinstance(model, LoadedHead) and isinstance(model.head, BlockModel):
        num_graphs = 2 * len(sizes.rows) + num_walks(model.head, sizes.rows, config.max_num_seqs)
        return num_graphs * _HEAD_GRAPH_BYTES + 2 * len(sizes.rows) * num_kinds * _PLANS_BYTES
    if isinstance(model, LoadedHead):
        # Graphs of features have the states in memory of their own: those of the largest, and which are known.
        states = 2 * sizes.rows[-1] * model.states.ring.shape[1] * model.states.ring.itemsize
        return states + sizes.expected_bytes(num_kinds, _HEAD_GRAPH_BYTES)
    adapts = model.files.role is ModelRole.TARGET and config.enable_lora  # has graphs with and without adapters
    graph_bytes = sizes.expected_bytes(num_kinds) * (1 + adapts)
    return graph_bytes + num_device_lanes * (graph_bytes + LANE_BYTES)


def _graph_sizes(config: EngineConfig, model: LoadedModel | LoadedHead) -> GraphSizes:
    files, capture = model.files, model.backend.graph_capture
    tiles = (
        [] if capture is None else [capture.tile_rows(attention_shape(each)) for each in files.computed.attentions]
    )
    drafts = 0 if config.speculation.policy == "off" else config.speculation.cap
    # A draft's first pass also stores the tokens that followed the last draft: a row or two per sequence of a
    # draft model; of a head, which reads the states of all accepted tokens, as many rows as were verified.
    max_drafts = 1 if files.role is ModelRole.DRAFT else drafts
    requested = config.cudagraph_capture_sizes
    if files.role is ModelRole.HEAD and requested is None:
        most = min(config.max_num_seqs * (drafts + 1), config.max_num_batched_tokens, _HEAD_ROWS[-1])
        requested = (*(each for each in _HEAD_ROWS if each < most), max(most, config.max_num_seqs))
        requested = tuple(sorted({*requested, config.max_num_seqs}))
    return GraphSizes.default(
        max_rows=config.max_num_batched_tokens,
        max_sequences=config.max_num_seqs,
        max_drafts=max_drafts,
        max_blocks_each=-(-files.max_positions // config.block_size),
        requested=requested,
        block_size=config.block_size,
        tile_rows=sorted({*chain.from_iterable(tiles)}),
        pairs=files.role is ModelRole.DRAFT,
    )


def _of_draft_model(quantization: str | None, files: ModelFiles) -> str | None:
    """The target's, where it applies to the draft model: its drafts need speed more than its last bits."""
    applies = {
        "none": True,
        "gguf": gguf_file(files.directory) is not None,
        "int8": files.config.quantization is None,
        "int4": files.config.quantization is None,
    }
    if quantization is None or applies.get(quantization):
        return quantization
    _log.info(
        "--quantization %s does not fit the draft model in %s, which is read as stored",
        quantization,
        files.directory,
    )
    return None


class _HeadRoom(TypedDict):
    """Sizes that every kind of head is loaded for; see load_head."""

    max_positions: int
    max_rows: int
    max_logit_rows: int
    progress: ByteProgress


def _load_head(
    config: EngineConfig, files: HeadFiles, target: LoadedModel, report: ProgressCallback
) -> LoadedHead:
    def progress(done: int, total: int) -> None:
        report("loading head", done, total)

    head: Head | BlockModel
    directory, spec, decoder, backend = files.directory, files.head, target.decoder, target.backend
    quantization = config.quantization if config.quantization in QUANTIZATIONS else None
    room = _HeadRoom(
        max_positions=files.max_positions,
        max_rows=config.max_num_batched_tokens,
        max_logit_rows=files.max_logit_rows,
        progress=progress,
    )
    if isinstance(spec, AssistantSpec):
        head = load_assistant(directory, spec, decoder, backend, quantization=quantization, **room)
    elif isinstance(spec, BlockSpec):
        draft_ids = _draft_ids(config, files)
        quantization = quantization or _of_block_drafter(decoder, spec, directory, backend)
        head = load_block(
            directory, spec, decoder, backend, quantization=quantization, draft_ids=draft_ids, **room
        )
    elif config.speculation.pass_method == MTP:
        chooses = config.speculation.draft_vocab_size is None and files.spec.vocab_size > DRAFT_VOCAB_SIZES[-1]
        sizes = DRAFT_VOCAB_SIZES if chooses and backend.head_drafting is not None else (DRAFT_VOCAB_SIZE,)
        head = load_mtp(
            directory,
            spec,
            decoder,
            backend,
            quantization=config.quantization,
            draft_ids=_draft_ids(config, files, sizes[-1]),
            sizes=sizes if len(sizes) > 1 else (),
            start=DRAFT_VOCAB_SIZE,
            **room,
        )
    else:
        head = load_head(directory, decoder, backend, quantization=quantization, **room)
    states, dtype = target.decoder.states, target.decoder.dtype
    ring = HiddenStates(
        num_slots=config.max_num_seqs,
        num_rows=ring_rows(states.shape[1], dtype, max_rows=len(states), on_gpu=config.on_gpu),
        width=states.shape[1],
        dtype=dtype,
        device=target.backend.device,
    )
    return LoadedHead(files=files, head=head, target=target, states=ring)


def _of_block_drafter(target: Decoder, spec: BlockSpec, directory: Path, backend: Backend) -> str | None:
    """Return int8 for a drafter in 16 bits of a target in fewer; None: it stays as it is.

    A pass would otherwise read twice as many bytes. That 4 bits cost no acceptance has not been shown.
    """
    is_stored_low = spec.quantization is not None or directory.suffix == ".gguf"
    bits = 8 * target.weight_bytes / target.num_parameters
    return None if is_stored_low or not backend.prefers_low_bit or bits > _MOST_LOW_BITS else "int8"


def _draft_ids(config: EngineConfig, files: HeadFiles, most: int = DRAFT_VOCAB_SIZE) -> Tensor | None:
    """Return the first tokens of the vocabulary and those that end generation, ascending; None: all tokens.

    most: so many of a vocabulary that is larger than the largest of DRAFT_VOCAB_SIZES, where no size is given.
    """
    size, vocab_size = config.speculation.draft_vocab_size, files.spec.vocab_size
    if size is None:
        size = most if vocab_size > DRAFT_VOCAB_SIZES[-1] else vocab_size
    if size >= vocab_size:
        return None
    return torch.tensor(sorted({*range(size), *files.config.eos_token_ids}))


def _start_head(
    config: EngineConfig, loaded: LoadedHead, kv: KvShape, target: EngineModel, report: ProgressCallback
) -> EngineHead:
    head, backend, decoder = loaded.head, loaded.backend, loaded.target.decoder
    vocab_size, reader = decoder.spec.vocab_size, None
    if isinstance(head, AssistantHead):
        head.read_from(target.runner.cache)
    runner: Runner | HeadRunner | BlockRunner
    if isinstance(head, BlockModel):
        runner = BlockRunner(head, backend, kv, states=decoder.states, vocab_size=vocab_size)
        runner.graphs = _block_graphs(config, loaded, head, kv, runner.cache, report)
    elif not loaded.drafts_on_device:
        runner = HeadRunner(head, backend, kv, states=decoder.states, vocab_size=vocab_size)
    else:
        # The target's logits have been read by the time that the head drafts.
        model = HeadDecoder(head, max_rows=config.max_num_batched_tokens, logits=decoder.logit_rows)
        runner = make_runner(config, loaded, kv, report, decoder=model)
        sizes = _graph_sizes(config, loaded).rows if config.records_steps else ()
        assert backend.graph_capture is not None, "drafts_on_device says so"
        reader = StateReader(model, loaded.states, backend, backend.graph_capture, sizes)
    parts = HeadParts(head=head, runner=runner, states=loaded.states, kv=kv, reader=reader)
    return EngineHead(
        files=loaded.files, head=head, target=loaded.target, states=loaded.states, kv=kv, parts=parts
    )


def _block_graphs(
    config: EngineConfig,
    loaded: LoadedHead,
    model: BlockModel,
    kv: KvShape,
    cache: KvCache,
    report: ProgressCallback,
) -> BlockGraphs | None:
    """None: the device has no graphs, or the config forbids them."""
    backend, logits, count = loaded.backend, loaded.target.decoder.logit_rows, config.max_num_seqs
    capture, kernels = backend.graph_capture, backend.device_sampling_kernels(count, logits.shape[1])
    if capture is None or kernels is None or not config.records_steps:
        return None
    return BlockGraphs(
        model,
        cache,
        loaded.states.ring,
        backend,
        capture,
        kernels,
        sizes=_graph_sizes(config, loaded).rows,
        max_sequences=count,
        kv=kv,
        max_blocks_each=-(-loaded.files.max_positions // config.block_size),
        logits=logits,
        report=lambda done, total: report(f"{STAGE} of the {loaded.files.role.value}", done, total),
    )
