"""Measures what a GPU has left for keys and values: runs the largest step of every model.

The largest step includes all that a step may do with logits, so that copies of them count: log probabilities,
fixed-point probabilities, probabilities of drafts.
"""

from collections.abc import Callable, Sequence

import torch

from faser.config.declaration import show_bytes
from faser.config.engine import EngineConfig
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.memory_budget import MemoryBudget
from faser.engine.execution.startup.runner_factory import expected_graph_bytes, max_logit_rows
from faser.engine.execution.startup.sizing import kv_cache_dtype
from faser.engine.execution.startup.step_times.step_profiler import StepProfiler
from faser.engine.execution.startup.step_times.table_fit import DummyBatchLimits
from faser.engine.execution.startup.warm_up import ResidentModel, make_warm_up
from faser.errors import ConfigError
from faser.kernels.cuda.device import DeviceMemory
from faser.kernels.interface.kv_cache import KvShape

_SAMPLING_BYTES = 160  # of a row and 1,024 tokens of the vocabulary: sums by chunk and digit


def profile_memory(
    config: EngineConfig, models: Sequence[ResidentModel], memory: DeviceMemory, free_at_start_bytes: int
) -> MemoryBudget:
    """See measure_budget."""

    def step() -> None:
        for each in models:
            _largest_step(config, each)
            make_warm_up(config, each).run(config.max_num_seqs)

    return measure_budget(
        config,
        memory,
        free_at_start_bytes,
        step,
        graph_bytes=sum(
            expected_graph_bytes(config, each.model, each.role, each.num_device_lanes) for each in models
        ),
        # The step makes attention's workspaces.
        workspaces_bytes=sum(_sampling_bytes(config, each) for each in models),
    )


def measure_budget(
    config: EngineConfig,
    memory: DeviceMemory,
    free_at_start_bytes: int,
    step: Callable[[], None],
    *,
    graph_bytes: int,
    workspaces_bytes: int,
) -> MemoryBudget:
    """Run the largest step, and divide what the device has besides it.

    Call it after loading all models and before making the KV caches. free_at_start_bytes: memory.free_bytes()
    before loading. step: for each model one forward of max_num_batched_tokens rows with as many logits as a step
    can have, over a minimal KV cache. Workspaces that it leaves count as loaded. graph_bytes, workspaces_bytes:
    what will be taken later.

    Raises ConfigError where the step does not fit.
    """
    memory.release()
    memory.reset_peak()
    try:
        step()
    except torch.OutOfMemoryError as error:
        rows = config.max_num_batched_tokens
        raise ConfigError(
            f"--max-num-batched-tokens is {rows}; {memory.name} has no room for a step of {rows} rows in "
            f"addition to the models, which take {show_bytes(memory.held_bytes())}; "
            f"{show_bytes(free_at_start_bytes)} were free"
        ) from error
    peak = memory.peak_bytes()
    memory.release()
    held = memory.held_bytes()
    return MemoryBudget(
        device=memory.name,
        total_bytes=memory.total_bytes,
        share=config.gpu_memory_utilization,
        free_bytes=free_at_start_bytes,
        # The driver's count includes kernels, which bypass torch's allocator. It is too small where another
        # process has freed memory since.
        loaded_bytes=max(held, free_at_start_bytes - memory.free_bytes()),
        step_bytes=max(0, peak - held),
        step_rows=config.max_num_batched_tokens,
        graph_bytes=graph_bytes,
        workspaces_bytes=workspaces_bytes,
    )


def _sampling_bytes(config: EngineConfig, resident: ResidentModel) -> int:
    """What a runner's sampling kernels keep between steps."""
    rows = max_logit_rows(config, resident.role)
    return rows * resident.model.decoder.spec.vocab_size * _SAMPLING_BYTES // 1024


def _largest_step(config: EngineConfig, resident: ResidentModel) -> None:
    """Over a KV cache of a few blocks, which all sequences of the step share."""
    decoder, num_blocks = resident.model.decoder, 8
    spec = decoder.spec
    kv = KvShape(
        num_layers=spec.num_layers,
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=kv_cache_dtype(config, decoder.dtype),
    )
    limits = DummyBatchLimits(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_len=resident.model.max_positions,
        max_rows=config.max_num_batched_tokens,
        max_logit_rows=max_logit_rows(config, resident.role),
    )
    StepProfiler(Runner(decoder, resident.backend, kv), limits).run_largest()
