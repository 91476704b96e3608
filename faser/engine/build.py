"""Puts an engine together: models, backend, KV caches, drafter, scheduler. The only place that knows all of them.

What is loaded is in loading.py, how large it may be in sizing.py.
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir, flashinfer_workspace, may_compile_kernels
from faser.engine.checkpoints.source import resolve
from faser.engine.control.scheduler import Scheduler
from faser.engine.control.sequences.kv_cache import KvManager
from faser.engine.control.speculation.control import OverlapOptions, SpeculationControl
from faser.engine.control.timing.clock import Clock, WallClock
from faser.engine.control.timing.cost_model import CostModel
from faser.engine.engine import Engine
from faser.engine.execution.drafter_registry import DrafterParts, DraftModelParts, make_drafter, names_model
from faser.engine.execution.drafters.drafter import Drafter
from faser.engine.execution.drafters.layer_skip import draft_layers
from faser.engine.execution.model_executor import Lanes, ModelExecutor, SpeculativeExecution
from faser.engine.execution.overlap.factory import LanePlaces, divide_gpu, make_lanes, places_of, wants
from faser.engine.execution.overlap.partition import Partition
from faser.engine.execution.pruning.early_pruning import NUM_TOP, EarlyPruning, RankJudge
from faser.engine.execution.pruning.gate import PruneGate, prunes
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.startup.device import place
from faser.engine.execution.startup.gpu_budget import ResidentModel, gpu_budget, prepare_kernels
from faser.engine.execution.startup.kernel_check import check_kernels
from faser.engine.execution.startup.lane_cells import Pair
from faser.engine.execution.startup.model_loading import (
    LoadedModel,
    Report,
    Sources,
    load_draft_model,
    load_target,
)
from faser.engine.execution.startup.profile import cached_profile, fingerprint, profile
from faser.engine.execution.startup.runner_factory import Use, make_runner
from faser.engine.execution.startup.sizing import CachedModel, kv_cache_dtype, kv_shapes
from faser.engine.execution.startup.step_profiler import DummyBatchLimits
from faser.engine.execution.verifiers.factory import make_verifier
from faser.engine.execution.verifiers.sample_and_match import SampleAndMatch
from faser.engine.step_trace import StepTrace
from faser.kernels.cuda.flashinfer.build import arch_of
from faser.kernels.cuda.memory import CudaMemory
from faser.kernels.factory import make_backend
from faser.kernels.interface.backend import Backend, KvShape
from faser.types import ModelInfo

# Steps that lanes are measured with, as far as there is time: rows, those first that matter most, and contexts.
# A GPU's rows lie on both sides of where arithmetic takes longer than reading weights, up to those recorded.
_CPU_ROWS, _GPU_ROWS = (8, 32, 2), (64, 256, 16, 128)
_CPU_CONTEXTS, _GPU_CONTEXTS = (64, 1024), (64, 1024, 8192)
_CPU_LANES_S, _GPU_LANES_S = 3.0, 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What is loaded, each model with the runner that has its KV cache. draft: None where no second model drafts.

    kv: the shape of the target's cache; the draft model's has as many blocks of the same size.
    """

    config: EngineConfig
    backend: Backend
    target: LoadedModel
    runner: Runner
    kv: KvShape
    draft: LoadedModel | None = None
    draft_runner: Runner | None = None
    lanes: Lanes | None = None
    kv_cache_bytes: int

    @property
    def speculates(self) -> bool:
        return self.config.speculation.policy != "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An engine, and what of it may be run by itself while no request is there: measurements do that.

    draft_runner: the draft model's; None where no second model drafts. lanes: None where nobody drafts ahead.
    """

    engine: Engine
    info: ModelInfo
    runner: Runner
    draft_runner: Runner | None
    lanes: Lanes | None


class Watch(Protocol):
    """Somebody who looks over the shoulder of an engine that speculates: a recorder of acceptance traces."""

    def drafter(self, drafter: Drafter) -> Drafter:
        """The engine's drafter, or one that stands before it."""
        ...

    def costs(self, costs: CostModel) -> None:
        """What the engine believes that steps take. Only to be read."""
        ...


def build_engine(
    config: EngineConfig,
    directory: Path,
    report: Report,
    watch: Watch | None = None,
    costs: CostModel | None = None,
    partition: Partition | None = None,
    sources: Sources | None = None,
) -> tuple[Engine, ModelInfo]:
    """See build: the engine alone, which is all that serving takes."""
    built = build(config, directory, report, watch, costs, partition, sources)
    return built.engine, built.info


def build(
    config: EngineConfig,
    directory: Path,
    report: Report,
    watch: Watch | None = None,
    costs: CostModel | None = None,
    partition: Partition | None = None,
    sources: Sources | None = None,
) -> Built:
    """An engine over the model in directory and the draft model that the config names, with its parts.

    report: called with (stage, done, total) during everything that takes long. watch: is shown the engine's parts.
    costs: what steps take; None: measured here, or read where that was done before. partition: divides the
    processors; None: the usual one. sources: who has the tensors of a model; None: its directory.
    Raises ConfigError (or ModelError) naming what does not fit.
    """
    parts = _load(place(config), directory, report, partition, sources)
    engine = _assemble(parts, report, watch, costs)
    decoder = parts.target.decoder
    info = ModelInfo(
        max_model_len=parts.target.max_positions,
        vocab_size=decoder.spec.vocab_size,
        eos_token_ids=parts.target.config.eos_token_ids,
        dtype=str(decoder.dtype).removeprefix("torch."),
        device=str(parts.backend.device),
        backend=parts.backend.name,
        block_size=parts.kv.block_size,
        num_blocks=parts.kv.num_blocks,
        kv_cache_bytes=parts.kv_cache_bytes,
        weight_bytes=decoder.weight_bytes + (parts.draft.decoder.weight_bytes if parts.draft is not None else 0),
        num_parameters=decoder.num_parameters,
    )
    return Built(engine=engine, info=info, runner=parts.runner, draft_runner=parts.draft_runner, lanes=parts.lanes)


def _load(
    config: EngineConfig,
    directory: Path,
    report: Report,
    partition: Partition | None,
    sources: Sources | None,
) -> _Parts:
    torch.set_num_threads(config.threads)
    draft_directory = _draft_directory(config, report)
    report("preparing kernels", 0, 0)
    kernels = cache_dir() / "kernels"
    backend = make_backend(config.backend, config.device, num_threads=config.threads, cache_dir=kernels)
    memory = CudaMemory(backend.device) if backend.device.type == "cuda" else None
    free_bytes = 0 if memory is None else memory.free_bytes()
    target = load_target(config, directory, backend, report, sources)
    draft = None
    draft_backend = backend.beside()  # so that both may run at the same time
    if draft_directory is not None:
        draft = load_draft_model(config, draft_directory, target, draft_backend, report, sources)
    if backend.name == "native":
        # Its own threads are what computes. Torch's would only choose tokens, and wait for each other at barriers
        # while the front-end holds a core: 18 ms instead of 0.4 ms for a greedy step on two busy cores.
        torch.set_num_threads(1)
    models = [target] if draft is None else [target, draft]
    cached = [_cached(config, each) for each in models]
    if backend.name == "flashinfer":
        _check_kernels(cached, backend, report)
    divide = partial(divide_gpu, report=report)
    lanes = make_lanes(config, backend, None if draft is None else draft_backend, partition, divide)
    places = LanePlaces() if lanes is None or memory is None else places_of(lanes.partition)
    budget = None
    if memory is not None:
        tenants = [ResidentModel(model=target, backend=backend, use=Use.TARGET, num_places=len(places.verify))]
        if draft is not None:
            num_places = len(places.draft)
            tenants.append(
                ResidentModel(model=draft, backend=draft_backend, use=Use.DRAFTER, num_places=num_places)
            )
        prepare_kernels(config, tenants, report)
        report("measuring memory", 0, 0)
        budget = gpu_budget(config, tenants, memory, free_bytes)
    shapes = kv_shapes(config, cached, target.max_positions, budget)
    return _Parts(
        config=config,
        backend=backend,
        target=target,
        runner=make_runner(config, backend, target, shapes[0], Use.TARGET, report, places.verify),
        kv=shapes[0],
        draft=draft,
        draft_runner=None
        if draft is None
        else make_runner(config, draft_backend, draft, shapes[1], Use.DRAFTER, report, places.draft),
        lanes=lanes,
        kv_cache_bytes=sum(shape.total_bytes for shape in shapes),
    )


def _cached(config: EngineConfig, model: LoadedModel) -> CachedModel:
    dtype = model.decoder.dtype
    return CachedModel(spec=model.decoder.spec, dtype=dtype, kv_dtype=kv_cache_dtype(config, dtype))


def _check_kernels(models: list[CachedModel], backend: Backend, report: Report) -> None:
    """Nothing is compiled in silence."""
    arch = arch_of(torch.cuda.get_device_capability(backend.device))
    ahead, workspace = cache_dir() / "kernels", flashinfer_workspace()
    check_kernels(models, arch, report, kernels=ahead, workspace=workspace, may_compile=may_compile_kernels())


def _draft_directory(config: EngineConfig, report: Report) -> Path | None:
    """Where the draft model lies, fetched first if need be; None where none drafts."""
    speculation = config.speculation
    if not names_model(speculation):
        return None
    return resolve(speculation.model, cache_dir(), revision=speculation.revision, progress=report)


def _assemble(parts: _Parts, report: Report, watch: Watch | None, costs: CostModel | None) -> Engine:
    config, target, kv = parts.config, parts.target, parts.kv
    sampler = Sampler(
        config.max_num_seqs,
        target.decoder.spec.vocab_size,
        target.config.eos_token_ids,
        parts.backend.device,
        parts.backend.sampling_kernels,
        parts.backend.logits_processor_kernels,
    )
    table = BlockTable(config.max_num_seqs, -(-target.max_positions // kv.block_size))
    speculation = gate = None
    if parts.speculates:
        costs = costs or _costs(parts, report)
        gate = _prune_gate(parts, costs)
        speculation = _speculation(parts, sampler, table, gate, watch)
    executor = ModelExecutor(
        parts.runner,
        sampler,
        table,
        max_logit_rows=config.max_num_seqs,
        speculation=speculation,
        samples_in_runner=config.schedules_async,
    )
    clock = WallClock()
    control = None
    if speculation is not None and costs is not None:
        overlap = None if speculation.lanes is None else _overlap(config, speculation.lanes, costs)
        control = _control(parts, costs, clock, watch, overlap)
    scheduler = Scheduler(
        kv=KvManager(kv.num_blocks, kv.block_size, enable_prefix_caching=config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=target.max_positions,
        eos_token_ids=target.config.eos_token_ids,
        policy=config.scheduling_policy,
        seed=config.seed,
        clock=clock,
        speculation=control,
    )
    trace = None if config.trace_steps is None else StepTrace(Path(config.trace_steps))
    return Engine(scheduler, executor, trace, gate, schedules_async=config.schedules_async)


def _speculation(
    parts: _Parts, sampler: Sampler, table: BlockTable, gate: PruneGate | None, watch: Watch | None
) -> SpeculativeExecution:
    """Who drafts, and who judges."""
    config, model = parts.config, None
    if parts.draft is not None and parts.draft_runner is not None:
        model = DraftModelParts(
            runner=parts.draft_runner,
            num_blocks=parts.kv.num_blocks,
            block_size=parts.kv.block_size,
            max_positions=parts.draft.max_positions,
        )
    drafter_parts = DrafterParts(
        target=parts.runner,
        table=table,
        sampling=sampler.state,
        max_rows=config.max_num_batched_tokens,
        model=model,
        num_top=0 if gate is None else NUM_TOP,
        samples_in_runner=config.schedules_async,
    )
    drafter = make_drafter(config.speculation, drafter_parts)
    drafter = drafter if watch is None else watch.drafter(drafter)
    verifier = make_verifier(config.speculation, sampler, parts.backend.rejection_kernels)
    pruning = None if gate is None else EarlyPruning(gate, RankJudge(), num_slots=config.max_num_seqs)
    return SpeculativeExecution(
        drafter=drafter,
        verifier=verifier,
        by_tokens=isinstance(verifier, SampleAndMatch),
        pruning=pruning,
        lanes=parts.lanes if drafter.drafts_overlapped else None,
    )


def _prune_gate(parts: _Parts, costs: CostModel) -> PruneGate | None:
    mode = parts.config.early_prune
    if not prunes(mode, parts.config.speculation):
        return None
    return PruneGate(mode, num_layers=parts.runner.num_layers, most=NUM_TOP, costs=costs)


def _control(
    parts: _Parts, costs: CostModel, clock: Clock, watch: Watch | None, overlap: OverlapOptions | None
) -> SpeculationControl:
    """Who decides, by what steps take on this machine."""
    config = parts.config
    if watch is not None:
        watch.costs(costs)
    return SpeculationControl(
        config.speculation,
        costs,
        num_slots=config.max_num_seqs,
        clock=clock,
        details=config.per_request_spec_decode_metrics == "detailed",
        overlap=overlap,
    )


def _overlap(config: EngineConfig, lanes: Lanes, costs: CostModel) -> OverlapOptions | None:
    """Whether drafts may be made ahead, by what the measured lanes cost."""
    measured = tuple(each for each in costs.lanes if wants(config, each.share))
    if not measured:
        return None
    return OverlapOptions(
        name=lanes.partition.name, lanes=measured, mode=config.spec_overlap, fallback=lanes.fallback
    )


def _costs(parts: _Parts, report: Report) -> CostModel:
    """Measured, unless the same engine was measured on this machine before."""
    config, draft = parts.config, parts.draft
    num_layers = None
    if config.speculation.method == "layer_skip":
        num_layers = draft_layers(config.speculation.draft_layers, parts.runner.num_layers)
    models = [parts.target] if draft is None else [parts.target, draft]
    room = DummyBatchLimits(
        num_blocks=parts.kv.num_blocks,
        block_size=parts.kv.block_size,
        max_len=min(model.max_positions for model in models),
        max_rows=config.max_num_batched_tokens,
        max_logit_rows=config.max_num_seqs,
    )
    pair = _pair(config, parts.lanes)
    described = fingerprint(
        {
            "models": [
                (asdict(each.decoder.spec), str(each.decoder.dtype), each.decoder.weight_bytes) for each in models
            ],
            "kv_dtype": str(parts.kv.dtype),
            "backend": parts.backend.name,
            "device": _device_name(parts.backend.device),
            "recorded": (config.records_steps, config.cudagraph_capture_sizes),
            "threads": config.threads,
            "draft_layers": num_layers,
            "lanes": None
            if pair is None
            else (pair.partition.name, pair.partition.shares(), pair.rows, pair.contexts),
            "rows": (room.max_rows, room.max_logit_rows, room.max_len),
        }
    )
    return cached_profile(
        cache_dir() / "cost" / f"{described}.json",
        lambda: profile(
            parts.runner,
            parts.runner if num_layers is not None else parts.draft_runner,
            room,
            progress=report,
            draft_layers=num_layers,
            pair=pair,
        ),
    )


def _device_name(device: torch.device) -> str:
    """With what kind of GPU it is: a cache folder may serve several."""
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _pair(config: EngineConfig, lanes: Lanes | None) -> Pair | None:
    if lanes is None or lanes.draft is None:
        return None
    most = min(config.max_num_seqs * (1 + config.speculation.cap), config.max_num_batched_tokens)
    return Pair(
        partition=lanes.partition,
        target=lanes.target,
        draft=lanes.draft,
        rows=tuple(dict.fromkeys(min(rows, most) for rows in (_GPU_ROWS if config.on_gpu else _CPU_ROWS))),
        contexts=_GPU_CONTEXTS if config.on_gpu else _CPU_CONTEXTS,
        num_sequences=config.max_num_seqs,
        budget_s=_GPU_LANES_S if config.on_gpu else _CPU_LANES_S,
    )
