"""Engines over models whose weights are made where they run, with room for what is measured and no more.

The one place that knows which settings a device takes. Measures nothing.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.engines import quiet
from benchmarks.gpu.models import BLOCK_SIZE, MORE_TOKENS, MadeUp, kv_bytes, write_shape
from benchmarks.gpu.plan import Plan
from faser.config.engine import EngineConfig
from faser.engine.build import build
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.files import read_model_config
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.step_cost import CostModel
from faser.engine.engine import Engine
from faser.engine.execution.overlap.lanes import Lanes
from faser.engine.execution.overlap.partition import Partition
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.executor import WrapDrafter
from faser.engine.execution.startup.models import Sources
from faser.types.engine import ModelInfo

Found = TypeVar("Found")

_LEAST_KV_BYTES = 1 << 20  # that the setting takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An engine to be built. sequences: at a time; context: tokens of their prompts; sources: of both models.

    speculative: speculative_config; None: it never drafts. draft: directory of the draft model that it names.
    synchronous: no step is launched before the one before it is read.
    costs: what steps take; None: measured when it is built, but for dry runs.
    overlap: the setting. partition: what divides the processors between lanes, to be closed when the engine is
    gone; None: the usual one.
    quantization, kv_cache_dtype: the settings. graph_rows: of the steps that are captured; None: the usual ones.
    """

    target: Path
    sequences: int
    context: int
    rows: int
    sources: Sources
    speculative: Mapping[str, Any] | None = None
    draft: Path | None = None
    synchronous: bool = False
    costs: StepTimes | None = None
    wrap_drafter: WrapDrafter = lambda drafter: drafter
    prefix_caching: bool = True
    overlap: str = "off"
    partition: Partition | None = None
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    graph_rows: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """spec, runner: of the target. costs: None in an engine that never drafts. The rest: as in faser's Built."""

    engine: Engine
    info: ModelInfo
    spec: DecoderSpec
    costs: CostModel | None
    runner: Runner
    draft_runner: Runner | None
    lanes: Lanes | None


def made_up(plan: Plan, seed: int = 0) -> Sources:
    return lambda directory: MadeUp.of(directory, plan.device, seed)


def target_of(plan: Plan) -> Path:
    return write_shape(plan.models / "target", plan.sizes.target)


def draft_of(plan: Plan) -> Path:
    return write_shape(plan.models / "draft", plan.sizes.draft)


def made_up_costs() -> StepTimes:
    """Return made-up times of steps and passes, for where no decision depends on them, or none counts."""
    return StepTimes.proportional(step_s=5e-3, row_s=2e-5, pass_s=1e-3, pass_row_s=1e-6, text_s=1e-5)


def open_engine(plan: Plan, wanted: Wanted) -> Opened:
    """Raises ConfigError for what does not fit."""
    built = build(
        config_of(plan, wanted),
        wanted.target,
        quiet,
        step_times=wanted.costs or (made_up_costs() if plan.dry_run else None),
        partition=wanted.partition,
        sources=wanted.sources,
        wrap_drafter=wanted.wrap_drafter,
    )
    return Opened(
        engine=built.engine,
        info=built.info,
        spec=read_model_config(wanted.target).spec,
        costs=built.costs,
        runner=built.runner,
        draft_runner=built.draft_runner,
        lanes=built.lanes,
    )


def with_engine(plan: Plan, wanted: Wanted, work: Callable[[Opened], Found]) -> Found:
    """Return what work makes of an engine; its memory is free again when this returns.

    Only work may hold the engine: a device has no room for two of 8B. Raises ConfigError for what does not
    fit.
    """
    try:
        return _worked(plan, wanted, work)
    finally:
        free_memory()


def _worked(plan: Plan, wanted: Wanted, work: Callable[[Opened], Found]) -> Found:
    opened = open_engine(plan, wanted)
    try:
        return work(opened)
    finally:
        opened.engine.close()


def close(opened: Opened) -> None:
    """For the last engine of a process. The caller gives it up too."""
    opened.engine.close()
    free_memory()


def free_memory() -> None:
    """Free the memory of engines without a holder, recordings included."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def config_of(plan: Plan, wanted: Wanted) -> EngineConfig:
    """kv_cache_memory is given: what is free on a device is no matter of these measurements."""
    options: dict[str, Any] = {
        "model": str(wanted.target),
        "dtype": "bfloat16",
        "device": plan.device,
        "backend": plan.backend,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": wanted.sequences,
        "max_num_batched_tokens": max(wanted.rows, wanted.sequences),
        "max_model_len": wanted.context + MORE_TOKENS,
        "kv_cache_memory": _kv_bytes(wanted),
        "enable_prefix_caching": wanted.prefix_caching,
        "spec_overlap": wanted.overlap,
        "quantization": wanted.quantization,
        "kv_cache_dtype": wanted.kv_cache_dtype,
        "cudagraph_capture_sizes": wanted.graph_rows,
        "async_scheduling": not wanted.synchronous,
        "compile_kernels": plan.dry_run,  # there is no time for that on a device; what is missing is an error
    }
    if wanted.speculative is None:
        options["speculative_policy"] = "off"
    else:
        options["speculative_config"] = dict(wanted.speculative)
    return EngineConfig(**options)


def _kv_bytes(wanted: Wanted) -> int:
    directories = [wanted.target] if wanted.draft is None else [wanted.target, wanted.draft]
    specs = [read_model_config(directory).spec for directory in directories]
    return max(kv_bytes(specs, sequences=wanted.sequences, context=wanted.context), _LEAST_KV_BYTES)
