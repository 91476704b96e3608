"""The step times of a loaded engine: measured at a first start, kept on disk, compared with a few at later ones.

The file's name is a fingerprint of everything that the times depend on. Times measured while other processes kept
the cores busy serve one start only.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from faser import __version__
from faser.config.environment import cache_dir, step_times_s
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.execution.startup.executor import EngineParts
from faser.engine.execution.startup.step_profiler import (
    BatchShape,
    DummyBatchLimits,
    ExpertReads,
    StageProgress,
    StepProfiler,
)
from faser.errors import ConfigError
from faser.kernels.cpu.build import chosen_isa
from faser.machine import BusyMeter
from faser.types.engine import ProgressCallback

_log = logging.getLogger("faser.engine")

STAGE = "measuring step times"
# For all steps and passes. A CPU's start waits for little else; on a GPU many first steps compile kernels.
_CPU_STEPS_S, _GPU_STEPS_S = 3.5, 30.0
_DRAFT_SHARE = 0.35  # the part of that time for passes of the drafter
_TEXT_S = 30e-6  # a text look-up, per sequence: an initial estimate, which the engine corrects as it runs
BUSY_SHARE = 0.1  # from here on, times measured next to other processes are not kept for later starts

# A start compares a few steps with those in the file.
_CHECKED_ROWS = (1, 8, 32)
_CHECK_S = 0.3  # per role
_LEAST_TIMES = 4  # of each step, if it is to be timed within the budget
_TOLERANCE = 1.3  # times slower or faster; two quiet starts of one machine differed by up to 1.15
_LEAST_S = 1e-9  # a file may say 0
_DISTURBED = 0.05  # busy share from which on a slower step says nothing about the times in the file

SecondsNow = Callable[[Sequence[int], float], Mapping[BatchShape, float]]  # as StepProfiler.seconds_now


def measured_times(parts: EngineParts, report: ProgressCallback) -> StepTimes:
    """Measured now, unless the same engine was measured on this machine before and is as fast as it was then."""
    on_gpu, limits = parts.config.on_gpu, _limits(parts)
    profilers = _profilers(parts, limits)

    def measure() -> StepTimes:
        budget_s = step_times_s(_GPU_STEPS_S if on_gpu else _CPU_STEPS_S)
        return profile(profilers, report, budget_s=budget_s, meter=BusyMeter())

    described = {**_described(parts, limits), "edges": profilers[Role.STEP].edges}
    timers = {role: each.seconds_now for role, each in profilers.items()}
    return cached_profile(
        cache_dir() / "cost" / f"{fingerprint(described)}.json",
        measure,
        check=lambda times: start_check(times, timers),
    )


def learned_path(parts: EngineParts) -> Path:
    """Return where what drafts cost and gain is kept: beside the step times, by how drafts are made as well."""
    config = parts.config.speculation
    drafting = (config.method, config.policy, config.cap, config.draft_sample_method, config.ngram_model)
    described = {**_described(parts, _limits(parts)), "drafting": drafting}
    return cache_dir() / "cost" / f"{fingerprint(described)}.learned.json"


def _limits(parts: EngineParts) -> DummyBatchLimits:
    target = parts.target
    return DummyBatchLimits(
        num_blocks=target.kv.num_blocks,
        block_size=target.kv.block_size,
        max_len=min(each.files.max_positions for each in parts.models),
        max_rows=parts.config.max_num_batched_tokens,
        max_logit_rows=parts.config.max_num_seqs,
    )


def _profilers(parts: EngineParts, limits: DummyBatchLimits) -> dict[Role, StepProfiler]:
    """Steps of the target; passes of what drafts."""
    mixtures = parts.target.files.spec.mixtures
    reads = ExpertReads(
        total=sum(each.num_experts for each in mixtures), per_row=sum(each.top_k for each in mixtures)
    )
    priced = 0 < reads.per_row < reads.total
    found = {Role.STEP: StepProfiler(parts.target.runner, limits, reads=reads if priced else None)}
    for each in parts.drafting:
        found[Role.PASS] = StepProfiler(each.runner, limits, rows_each=1)
    return found


def _described(parts: EngineParts, limits: DummyBatchLimits) -> dict[str, object]:
    """All that the times depend on, but for this CPU and this version of FASER."""
    config, backend = parts.config, parts.target.backend
    return {
        "models": [(asdict(each.files.spec), str(each.files.dtype), each.weight_bytes) for each in parts.models],
        "heads": [asdict(each.files.head) for each in parts.heads],
        "kv_dtype": str(parts.target.kv.dtype),
        "backend": (backend.name, chosen_isa() if backend.name == "native" else None),
        "device": _device_name(backend.device),
        "recorded": (config.records_steps, config.cudagraph_capture_sizes),
        "threads": (config.threads, config.tensor_parallel_size),
        "rows": (limits.max_rows, limits.max_logit_rows, limits.max_len),
    }


def _device_name(device: torch.device) -> str:
    """The device and the kind of GPU: machines with different GPUs may share a cache folder."""
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def fingerprint(described: Mapping[str, object]) -> str:
    """A name for measurements that depend on the described values, on this CPU and on this version of FASER."""
    text = json.dumps({"faser": __version__, "cpu": _cpu_name(), **described}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _cpu_name() -> str:
    """The processor's name in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


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
            "other processes took %.0f %% of the cores while step times were measured; "
            "using these times until the next start, which measures again",
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
    profilers: Mapping[Role, StepProfiler], report: ProgressCallback, *, budget_s: float, meter: BusyMeter
) -> StepTimes:
    """Time the steps of each role within about budget_s seconds in all. meter: watches meanwhile.

    The KV cache keeps keys and values of dummy sequences, in blocks that no sequence holds.
    """
    draft_share = _DRAFT_SHARE if Role.PASS in profilers else 0.0
    shares = {Role.STEP: 1 - draft_share, Role.PASS: draft_share}
    progress = StageProgress(report, STAGE, sum(each.num_row_counts for each in profilers.values()))
    tables = {Role.TEXT: CostTable(rows=(1, 2), seconds=(_TEXT_S, 2 * _TEXT_S))}
    for role, profiler in profilers.items():
        with meter.watch():
            tables[role] = profiler.table(budget_s * shares[role], progress)
    progress.finish()
    return StepTimes(tables=tables, measured_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", busy_share=meter.share)


def start_check(
    times: StepTimes, timers: Mapping[Role, SecondsNow], *, meter: BusyMeter | None = None
) -> str | None:
    """Return what is wrong with `times`; None: they hold. timers: by role to check. meter: None: this machine's.

    A step that is faster now refutes them: other processes only slow steps down. A slower step does so only where
    no other process disturbs it; next to one the times are kept, for the cost model follows a slower machine.
    """
    meter = meter or BusyMeter()
    found: list[tuple[float, str]] = []
    for role, seconds_now in timers.items():
        table = times.tables.get(role)
        if table is None:
            return f"it has no times of role {role.value}"
        with meter.watch():
            now = seconds_now(_checked_rows(table), _CHECK_S)
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
    _log.info(
        "keeping the cached step times: %s, but other processes are using %.0f %% of the cores",
        slower,
        100 * meter.share,
    )
    return None


def _checked_rows(table: CostTable) -> list[int]:
    """The row counts that are measured in the table and can be timed within the budget; its first one always."""
    rows = [table.rows[0], *(each for each in _CHECKED_ROWS if each in table.rows[1:])]
    round_s = np.add.accumulate([table.seconds_at(each) for each in rows])
    return rows[: max(int(np.count_nonzero(round_s <= _CHECK_S / _LEAST_TIMES)), 1)]


# The steps that lanes are measured with, as far as time allows: row counts, the most important ones first, and
# contexts. A GPU's row counts lie on both sides of the point where arithmetic takes longer than reading weights.
