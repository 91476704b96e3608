"""The step times of a loaded engine: read from disk if the same engine was measured on this machine before.

What is on disk is compared with a few steps first.
"""

from dataclasses import asdict

import torch

from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.contract.step_times import Role, StepTimes
from faser.engine.execution.overlap.lanes import Lanes
from faser.engine.execution.startup.parts import EngineParts
from faser.engine.execution.startup.step_times.interference_cells import InterferenceSetup
from faser.engine.execution.startup.step_times.profile import cached_profile, fingerprint, profile
from faser.engine.execution.startup.step_times.start_check import start_check
from faser.engine.execution.startup.step_times.step_profiler import StepProfiler
from faser.engine.execution.startup.step_times.table_fit import DummyBatchLimits
from faser.kernels.cpu.isa import chosen_isa
from faser.types import ProgressCallback

# The steps that lanes are measured with, as far as time allows: row counts, the most important ones first, and
# contexts. A GPU's row counts lie on both sides of the point where arithmetic takes longer than reading weights.
_CPU_ROWS, _GPU_ROWS = (8, 32, 2), (64, 256, 16, 128)
_CPU_CONTEXTS, _GPU_CONTEXTS = (64, 1024), (64, 1024, 8192)
_CPU_LANES_S, _GPU_LANES_S = 3.0, 20.0
# For all steps and passes. A CPU's start waits for little else; on a GPU many first steps compile kernels.
_CPU_STEPS_S, _GPU_STEPS_S = 3.5, 30.0


def measured_times(parts: EngineParts, report: ProgressCallback) -> StepTimes:
    """Measured now, unless the same engine was measured on this machine before and is as fast as it was then."""
    config, draft, head = parts.config, parts.draft, parts.head
    models = [parts.target] if draft is None else [parts.target, draft]
    limits = DummyBatchLimits(
        num_blocks=parts.kv.num_blocks,
        block_size=parts.kv.block_size,
        max_len=min(model.max_positions for model in models),
        max_rows=config.max_num_batched_tokens,
        max_logit_rows=config.max_num_seqs,
    )
    setup = _interference_setup(config, parts.lanes)
    described = fingerprint(
        {
            "models": [
                (asdict(each.decoder.spec), str(each.decoder.dtype), each.decoder.weight_bytes) for each in models
            ],
            "kv_dtype": str(parts.kv.dtype),
            "backend": (parts.backend.name, chosen_isa() if parts.backend.name == "native" else None),
            "device": _device_name(parts.backend.device),
            "recorded": (config.records_steps, config.cudagraph_capture_sizes),
            "threads": config.threads,
            "head": None if head is None else (asdict(head.runner.head.spec), head.runner.head.weight_bytes),
            "lanes": None
            if setup is None
            else (setup.partition.name, setup.partition.shares(), setup.rows, setup.contexts),
            "rows": (limits.max_rows, limits.max_logit_rows, limits.max_len),
        }
    )
    timers = {Role.STEP: StepProfiler(parts.runner, limits).seconds_now}
    if parts.pass_runner is not None:
        timers[Role.PASS] = StepProfiler(parts.pass_runner, limits, rows_each=1).seconds_now
    return cached_profile(
        cache_dir() / "cost" / f"{described}.json",
        measure=lambda: profile(
            parts.runner,
            parts.pass_runner,
            limits,
            progress=report,
            lanes=setup,
            budget_s=_GPU_STEPS_S if config.on_gpu else _CPU_STEPS_S,
        ),
        check=lambda times: start_check(times, timers),
    )


def _device_name(device: torch.device) -> str:
    """The device and the kind of GPU: machines with different GPUs may share a cache folder."""
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _interference_setup(config: EngineConfig, lanes: Lanes | None) -> InterferenceSetup | None:
    if lanes is None or lanes.draft is None:
        return None
    most = min(config.max_num_seqs * (1 + config.speculation.cap), config.max_num_batched_tokens)
    return InterferenceSetup(
        partition=lanes.partition,
        target=lanes.target,
        draft=lanes.draft,
        rows=tuple(dict.fromkeys(min(rows, most) for rows in (_GPU_ROWS if config.on_gpu else _CPU_ROWS))),
        contexts=_GPU_CONTEXTS if config.on_gpu else _CPU_CONTEXTS,
        num_sequences=config.max_num_seqs,
        budget_s=_GPU_LANES_S if config.on_gpu else _CPU_LANES_S,
    )
