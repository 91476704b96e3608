"""Measures step times and the interference of lanes on this machine, and keeps them on disk.

The file's name is a fingerprint of everything that the times depend on. step_profiler.py times steps,
interference_profile.py measures lanes, start_check.py compares the times in a file with steps timed now. Times
measured while other processes kept the cores busy serve one start only.

Whether step times that were measured at an earlier start still hold: a few steps are timed and compared.

Takes a fraction of a second, so it runs at every start. Decides only whether all is measured again.

The step times of a loaded engine: read from disk if the same engine was measured on this machine before.

What is on disk is compared with a few steps first.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from faser import __version__
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.execution.drafters.layer_skip import draft_layers
from faser.engine.execution.overlap.lanes import Lanes
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.executor import EngineParts
from faser.engine.execution.startup.interference import InterferenceSetup, make_cells, measure_interference
from faser.engine.execution.startup.step_profiler import (
    ROW_COUNTS,
    BatchShape,
    DummyBatchLimits,
    ProfileProgress,
    StepProfiler,
    TimedRunner,
)
from faser.errors import ConfigError
from faser.kernels.cpu.isa import chosen_isa
from faser.machine import BusyMeter
from faser.types import ProgressCallback

_log = logging.getLogger("faser.engine")

LANES_STAGE = "measuring lanes"
_TEXT_S = 30e-6  # a text look-up, per sequence: an initial estimate, which the engine corrects as it runs
_DRAFT_SHARE = 0.35  # the part of the time budget for passes of the drafter
BUSY_SHARE = 0.1  # from here on, times measured beside other processes are not kept for later starts


def fingerprint(described: Mapping[str, object]) -> str:
    """A name for measurements that depend on the described values, on this CPU and on this version of FASER."""
    text = json.dumps({"faser": __version__, "cpu": _cpu_name(), **described}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def cached_profile(
    path: Path, measure: Callable[[], StepTimes], check: Callable[[StepTimes], str | None]
) -> StepTimes:
    """The step times in the file at path; if they cannot be trusted, measure and write them.

    check: says what is wrong with the times that the file has; None: they still hold.
    """
    if path.exists():
        try:
            times = StepTimes.load(path)
            complaint = _busy_then(times) or check(times)
            if complaint is None:
                return times
            _log.warning("step times are measured again: %s: %s", path, complaint)
        except ConfigError as error:
            _log.warning("step times are measured again: %s", error)
    times = measure()
    if times.busy_share >= BUSY_SHARE:
        _log.warning(
            "other processes took %.0f %% of the cores while step times were measured: "
            "they serve until the next start, which measures again",
            100 * times.busy_share,
        )
    try:
        times.save(path)
    except ConfigError as error:
        _log.warning("step times will be measured at every start: %s", error)
    return times


def _busy_then(times: StepTimes) -> str | None:
    if times.busy_share < BUSY_SHARE:
        return None
    share = f"{100 * times.busy_share:.0f} %"
    return f"other processes took {share} of the cores when its times were measured ({times.measured_at})"


def profile(
    runner: Runner,
    draft_runner: TimedRunner | None,
    limits: DummyBatchLimits,
    *,
    progress: ProgressCallback,
    draft_layers: int | None = None,
    lanes: InterferenceSetup | None = None,
    budget_s: float = 3.5,
    meter: BusyMeter | None = None,
) -> StepTimes:
    """Time the target's steps and the drafter's passes, within about budget_s seconds.

    draft_runner: the draft model's or the head's, or the target's own where its first draft_layers layers draft;
    None: no passes. lanes: measure their interference too, within its own time budget. meter: None: this
    machine's. The KV cache keeps keys and values of dummy sequences, in blocks that no sequence holds.
    """
    meter = meter or BusyMeter()
    share = 0.0 if draft_runner is None else _DRAFT_SHARE
    num_roles = 1 if draft_runner is None else 2
    counter = ProfileProgress(progress, num_roles * len(ROW_COUNTS))
    with meter.watch():
        step = StepProfiler(runner, limits).table(budget_s * (1 - share), counter)
    tables = {Role.STEP: step, Role.TEXT: CostTable(rows=(1, 2), seconds=(_TEXT_S, 2 * _TEXT_S))}
    if draft_runner is not None:
        passes = StepProfiler(draft_runner, limits, num_layers=draft_layers, rows_each=1)
        with meter.watch():
            tables[Role.PASS] = passes.table(budget_s * share, counter)
    counter.finish()
    times = StepTimes(tables=tables, measured_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", busy_share=meter.share)
    if lanes is None or not isinstance(draft_runner, Runner):
        return times
    progress(LANES_STAGE, 0, 0)
    with meter.watch():
        interference = measure_interference(
            lanes.partition,
            make_cells(lanes, runner, draft_runner, limits, times),
            budget_s=lanes.budget_s,
            progress=lambda done, total: progress(LANES_STAGE, done, total),
        )
    return replace(times, interference=interference, busy_share=meter.share)


def _cpu_name() -> str:
    """The processor's name in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


SecondsNow = Callable[[Sequence[int], float], Mapping[BatchShape, float]]  # as StepProfiler.seconds_now

_ROW_COUNTS = (1, 8, 32)
_BUDGET_S = 0.3  # per role
_LEAST_TIMES = 4  # of each step, if it is to be timed within the budget
_TOLERANCE = 1.3  # times slower or faster; two quiet starts of one machine differed by up to 1.15
_LEAST_S = 1e-9  # a file may say 0
_DISTURBED = 0.05  # busy share from which on a slower step says nothing about the times in the file


def start_check(
    times: StepTimes, timers: Mapping[Role, SecondsNow], *, meter: BusyMeter | None = None
) -> str | None:
    """What is wrong with `times`; None: they hold. timers: of the roles to check. meter: None: this machine's.

    A step that is faster now refutes them: other processes only slow steps down. A slower step does so only where
    no other process disturbs it; beside one the times are kept, for the cost model follows a slower machine.
    """
    meter = meter or BusyMeter()
    found: list[tuple[float, str]] = []
    for role, seconds_now in timers.items():
        table = times.tables.get(role)
        if table is None:
            return f"it has no times of role {role.value}"
        with meter.watch():
            now = seconds_now(_checked_rows(table), _BUDGET_S)
        for shape, now_s in now.items():
            then_s = max(table.seconds_at(shape.rows, shape.kv_tokens, shape.kv_row_tokens), _LEAST_S)
            what = f"a {role.value} of {shape.rows} row{'s' if shape.rows > 1 else ''}"
            found.append(
                (now_s / then_s, f"{what} takes {1e3 * now_s:.2f} ms now, {1e3 * then_s:.2f} ms in the file")
            )
    (fastest, faster), (slowest, slower) = min(found), max(found)
    if fastest < 1 / _TOLERANCE:
        return faster
    if slowest <= _TOLERANCE:
        return None
    if meter.share < _DISTURBED:
        return slower
    _log.info("step times are kept: %s, but other processes take %.0f %% of the cores", slower, 100 * meter.share)
    return None


def _checked_rows(table: CostTable) -> list[int]:
    """The row counts that are measured in the table and can be timed within the budget; its first one always."""
    rows = [table.rows[0], *(each for each in _ROW_COUNTS if each in table.rows[1:])]
    round_s = np.add.accumulate([table.seconds_at(each) for each in rows])
    return rows[: max(int(np.count_nonzero(round_s <= _BUDGET_S / _LEAST_TIMES)), 1)]


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
    num_layers = None
    if config.speculation.skips_layers:
        num_layers = draft_layers(config.speculation.draft_layers, parts.runner.num_layers)
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
            "draft_layers": num_layers,
            "head": None if head is None else (asdict(head.runner.head.spec), head.runner.head.weight_bytes),
            "lanes": None
            if setup is None
            else (setup.partition.name, setup.partition.shares(), setup.rows, setup.contexts),
            "rows": (limits.max_rows, limits.max_logit_rows, limits.max_len),
        }
    )
    draft_runner = parts.runner if num_layers is not None else parts.pass_runner
    timers = {Role.STEP: StepProfiler(parts.runner, limits).seconds_now}
    if draft_runner is not None:
        passes = StepProfiler(draft_runner, limits, num_layers=num_layers, rows_each=1)
        timers[Role.PASS] = passes.seconds_now
    return cached_profile(
        cache_dir() / "cost" / f"{described}.json",
        measure=lambda: profile(
            parts.runner,
            draft_runner,
            limits,
            progress=report,
            draft_layers=num_layers,
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
