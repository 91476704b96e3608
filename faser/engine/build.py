"""Puts an engine together: the loaded parts, their step times, the executor, the scheduler.

The only module that knows both planes. The data plane is loaded and put together in execution/startup/executor.py.
"""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from faser.config.engine import KV_CACHE_DIR_ON_GPU, EngineConfig
from faser.engine.audit import Auditor
from faser.engine.checkpoints.blocks import BlockSpec
from faser.engine.checkpoints.encoders import read_encoder
from faser.engine.contract.native_acceptance import MakeNativeAcceptance, Texts
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.adapters import AdapterSlots
from faser.engine.control.clock import Clock, WallClock
from faser.engine.control.encoding import EncoderScheduler
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.kv_disk import KvDisk
from faser.engine.control.kv_file import KvFile
from faser.engine.control.pace import PaceFit
from faser.engine.control.scheduler import Scheduler
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.speculation.learned_file import LearnedFile
from faser.engine.control.speculation.overlap import OverlapOptions
from faser.engine.control.state_snapshots import StateSnapshots
from faser.engine.control.step_cost import CostModel
from faser.engine.encoder_engine import EncoderEngine, StepLoop
from faser.engine.engine import Engine
from faser.engine.execution.drafting.registry import load_index
from faser.engine.execution.model_executor import ModelExecutor
from faser.engine.execution.overlap.lanes import Lanes
from faser.engine.execution.overlap.partition import Partition
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.device import resolve_device
from faser.engine.execution.startup.encoder import load_encoder_parts
from faser.engine.execution.startup.executor import EngineParts, WrapDrafter, load_parts, make_executor
from faser.engine.execution.startup.memory import refused_allocations
from faser.engine.execution.startup.model_key import model_key
from faser.engine.execution.startup.models import Sources
from faser.engine.execution.startup.step_times import learned_path, measured_times
from faser.engine.kv_events import KvEventPublisher
from faser.engine.step_trace import StepTraceFile
from faser.errors import ConfigError
from faser.kernels.cpu.acceptance import CompiledAcceptance
from faser.kernels.interface.mixers import CHUNK
from faser.optional import maybe, present
from faser.types.engine import ModelInfo, ProgressCallback

_log = logging.getLogger("faser")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An engine, and its parts for measurements: to look at, or to run while the engine is idle.

    costs: the control plane's cost model, only to be read; None in an engine that neither drafts nor has targets.
    pace: is fitted to its steps, with these costs. draft_runner: None without a draft model. lanes: None without
    overlapped drafting.
    """

    engine: Engine
    info: ModelInfo
    costs: CostModel | None
    pace: PaceFit | None
    runner: Runner
    draft_runner: Runner | None
    lanes: Lanes | None


def build_served(config: EngineConfig, directory: Path, report: ProgressCallback) -> tuple[StepLoop, ModelInfo]:
    """The engine that serves the model in directory: of an encoder, or of a model that generates."""
    if (encoder := read_encoder(directory)) is None:
        return build_engine(config, directory, report)
    with refused_allocations(config):
        parts = load_encoder_parts(config, directory, encoder, report)
    scheduler = EncoderScheduler(
        WallClock(),
        max_texts=parts.config.max_num_seqs,
        max_tokens=parts.config.max_num_batched_tokens,
        max_model_len=parts.info.max_model_len,
        by_priority=parts.config.scheduling_policy == "priority",
    )
    return EncoderEngine(scheduler, parts.executor), parts.info


def build_engine(
    config: EngineConfig,
    directory: Path,
    report: ProgressCallback,
    *,
    step_times: StepTimes | None = None,
    partition: Partition | None = None,
    sources: Sources | None = None,
    wrap_drafter: WrapDrafter = lambda drafter: drafter,
) -> tuple[Engine, ModelInfo]:
    """The engine alone, which is all that serving needs. Arguments as in build."""
    built = build(
        config,
        directory,
        report,
        step_times=step_times,
        partition=partition,
        sources=sources,
        wrap_drafter=wrap_drafter,
    )
    return built.engine, built.info


def build(
    config: EngineConfig,
    directory: Path,
    report: ProgressCallback,
    *,
    step_times: StepTimes | None = None,
    partition: Partition | None = None,
    sources: Sources | None = None,
    wrap_drafter: WrapDrafter = lambda drafter: drafter,
) -> Built:
    """An engine over the model in directory and the draft model that config names, with its parts.

    report: called with (stage, done, total) during every long stage. step_times: None measures them here, or reads
    an earlier measurement. partition: divides the processors; None: the one that config names. sources: gives a
    model's tensors by its directory; None reads the directory. wrap_drafter: given the drafter, returns the one to
    use. Raises ConfigError (or ModelError) naming what does not fit.
    """
    with refused_allocations(config):
        parts = load_parts(resolve_device(config), directory, report, partition, sources)
    return assemble(parts, report, step_times=step_times, wrap_drafter=wrap_drafter)


def assemble(
    parts: EngineParts,
    report: ProgressCallback,
    *,
    step_times: StepTimes | None = None,
    wrap_drafter: WrapDrafter = lambda drafter: drafter,
) -> Built:
    """The engine over loaded parts. Arguments as in build."""
    config = parts.config
    costs = pace = learned = None
    keeps = step_times is None
    if parts.speculates or config.speculation.has_targets:
        step_times = step_times or measured_times(parts, report)
        costs = CostModel(
            step_times,
            schedules_async=parts.config.schedules_async,
            block_tokens=_block_tokens(parts),
        )
        pace = PaceFit(costs, num_slots=parts.config.max_num_seqs, most_rows=parts.config.max_num_batched_tokens)
    executor = make_executor(parts, wrap_drafter, report)
    clock, control = WallClock(), None
    if parts.speculates and step_times is not None and costs is not None:
        overlap = _overlap(parts, executor.lanes)
        control = _speculation_control(parts, costs, clock, overlap, executor.texts, report)
        if keeps:
            learned = LearnedFile(learned_path(parts), control, times=step_times.measured_at)
    trace = maybe(StepTraceFile, maybe(Path, config.trace_steps))
    adapters = AdapterSlots(config.max_loras) if config.enable_lora else None
    scheduler, disk = _scheduler(parts, clock, control, pace, adapters)
    auditor = _auditor(parts, executor, adapters) if _num_audit_blocks(parts) else None
    events = None
    if config.kv_events is not None:
        events = KvEventPublisher(config.kv_events, scheduler.take_kv_events)
    engine = Engine(
        scheduler,
        executor,
        trace,
        schedules_async=parts.config.schedules_async,
        grammars=parts.grammars,
        adapters=executor.adapters,
        companions=present((events, disk, learned, auditor, parts.ranks)),
    )
    return Built(
        engine=engine,
        info=replace(parts.info(), num_blocks=parts.target.kv.num_blocks - _num_audit_blocks(parts)),
        costs=costs,
        pace=pace,
        runner=parts.target.runner,
        draft_runner=next((each.runner for each in parts.draft_models), None),
        lanes=parts.lanes,
    )


def _scheduler(
    parts: EngineParts,
    clock: Clock,
    control: SpeculationControl | None,
    pace: PaceFit | None,
    adapters: AdapterSlots | None,
) -> tuple[Scheduler, KvDisk | None]:
    config, target, kv = parts.config, parts.target.files, parts.target.kv
    num_snapshots = parts.num_snapshots
    may_share = num_snapshots > 0 or not target.spec.has_states
    if config.enable_prefix_caching and not may_share:
        _log.info("prefix caching is off: there is no memory for snapshots of this model's recurrent states")
    manager = KvManager(
        kv.num_blocks - _num_audit_blocks(parts),
        kv.block_size,
        enable_prefix_caching=config.enable_prefix_caching and may_share,
        records_events=config.kv_events is not None,
    )
    snapshots = None
    if num_snapshots:
        snapshots = StateSnapshots(manager, num_snapshots, num_slots=config.max_num_seqs, chunk=CHUNK)
    disk = None if config.kv_cache_dir is None or not may_share else _disk(parts, manager, snapshots)
    scheduler = Scheduler(
        kv=manager,
        max_num_seqs=config.max_num_seqs - bool(_num_audit_blocks(parts)),  # the audit has the last slot
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_logit_rows=config.max_logit_rows,
        max_model_len=target.max_positions,
        eos_token_ids=target.config.eos_token_ids,
        policy=config.scheduling_policy,
        seed=config.seed,
        clock=clock,
        speculation=control,
        shares_prefixes=may_share,
        snapshots=snapshots,
        state_chunk=CHUNK if target.spec.has_states else 0,
        pace=pace,
        disk=disk,
        adapters=adapters,
    )
    return scheduler, disk


def _disk(parts: EngineParts, kv: KvManager, snapshots: StateSnapshots | None) -> KvDisk:
    config = parts.config
    assert config.kv_cache_dir is not None
    if config.on_gpu:
        raise ConfigError(f"kv_cache_dir is {config.kv_cache_dir}; {KV_CACHE_DIR_ON_GPU}. Leave it out.")
    memory = parts.target.runner.memory()
    file = KvFile(
        Path(config.kv_cache_dir),
        config.kv_cache_dir_size,
        key=model_key(parts),
        record_bytes=memory.block_bytes,
    )
    _log.info(
        "KV is kept in %s: %d blocks of %d tokens are there, and there is room for %d",
        config.kv_cache_dir,
        len(file),
        kv.block_size,
        file.capacity,
    )
    return KvDisk(file, memory, kv, snapshots)


def _num_audit_blocks(parts: EngineParts) -> int:
    """KV blocks that the replays of the audit have for themselves: for one context, at most 1/16 of all.

    Raises ConfigError if the others could not hold a whole context then.
    """
    config, kv, context = parts.config, parts.target.kv, parts.target.files.max_positions
    if not config.audit_speculation or not parts.speculates:
        return 0
    if config.max_num_seqs < 2:
        raise ConfigError(
            f"audit_speculation is {config.audit_speculation} and max_num_seqs is {config.max_num_seqs}; replays "
            "have a slot of their own: max_num_seqs must be at least 2"
        )
    for_one_context = -(-context // kv.block_size)
    given = min(for_one_context, kv.num_blocks // 16)
    if not given or kv.num_blocks - given < for_one_context:
        raise ConfigError(
            f"audit_speculation is {config.audit_speculation}; the KV cache has {kv.num_blocks} blocks, of which "
            f"one context of {context} tokens takes {for_one_context}: no room is left for "
            "replays. Give it more with kv_cache_memory, or lower max_model_len."
        )
    return given


def _auditor(parts: EngineParts, executor: ModelExecutor, adapters: AdapterSlots | None) -> Auditor:
    config, kv = parts.config, parts.target.kv
    num_blocks = _num_audit_blocks(parts)
    return Auditor(
        executor.without_drafter(),
        rate=config.audit_speculation,
        slot=config.max_num_seqs - 1,
        blocks=tuple(range(kv.num_blocks - num_blocks, kv.num_blocks)),
        block_size=kv.block_size,
        compares_sampled=config.speculation.draft_sample_method != "probabilistic",
        backend=parts.info().backend,
        adapters=adapters,
        seed=config.seed,
    )


def _block_tokens(parts: EngineParts) -> int | None:
    """Tokens of the longest draft of a block drafter; None: there is none."""
    specs = [each.files.head for each in parts.heads]
    return next((each.most_tokens for each in specs if isinstance(each, BlockSpec)), None)


def _speculation_control(
    parts: EngineParts,
    costs: CostModel,
    clock: Clock,
    overlap: OverlapOptions | None,
    texts: Texts | None,
    report: ProgressCallback,
) -> SpeculationControl:
    config = parts.config
    return SpeculationControl(
        config.speculation,
        costs,
        num_slots=config.max_num_seqs,
        clock=clock,
        details=config.per_request_spec_decode_metrics == "detailed",
        overlap=overlap,
        make_native=native_acceptance(partial(load_index, report)),
        texts=texts,
    )


def native_acceptance(load: Callable[[], ctypes.CDLL]) -> MakeNativeAcceptance:
    """Return what makes native estimates. Raises ConfigError where load finds no native library."""
    try:
        return partial(CompiledAcceptance, load())
    except ConfigError as error:
        raise ConfigError(
            f"speculation estimates acceptance in native code: {error}; or set --speculative-policy off"
        ) from error


def _overlap(parts: EngineParts, lanes: Lanes | None) -> OverlapOptions | None:
    """None without lanes. Of the shares that drafting may have it gets the one in the middle."""
    shares = () if lanes is None else lanes.partition.shares()
    if lanes is None or not shares:
        return None
    return OverlapOptions(
        name=lanes.partition.name,
        share=shares[len(shares) // 2],
        most_rows=parts.target.runner.most_graph_rows,
        mode=parts.config.spec_overlap,
        fallback=lanes.fallback,
    )
