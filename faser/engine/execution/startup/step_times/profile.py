"""Measures step times and the interference of lanes on this machine, and keeps them on disk.

The file's name is a fingerprint of everything that the times depend on. step_profiler.py times steps,
interference_profile.py measures lanes, start_check.py compares the times in a file with steps timed now. Times
measured while other processes kept the cores busy serve one start only.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from faser import __version__
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.step_times.interference_cells import InterferenceSetup, make_cells
from faser.engine.execution.startup.step_times.interference_profile import measure_interference
from faser.engine.execution.startup.step_times.step_profiler import ProfileProgress, StepProfiler, TimedRunner
from faser.engine.execution.startup.step_times.table_fit import ROW_COUNTS, DummyBatchLimits
from faser.errors import ConfigError
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
    lanes: InterferenceSetup | None = None,
    budget_s: float = 3.5,
    meter: BusyMeter | None = None,
) -> StepTimes:
    """Time the target's steps and the drafter's passes, within about budget_s seconds.

    draft_runner: the draft model's or the head's; None: no passes. lanes: measure their interference too, within
    its own time budget. meter: None: this machine's. The KV cache keeps keys and values of dummy sequences, in
    blocks that no sequence holds.
    """
    meter = meter or BusyMeter()
    share = 0.0 if draft_runner is None else _DRAFT_SHARE
    num_roles = 1 if draft_runner is None else 2
    counter = ProfileProgress(progress, num_roles * len(ROW_COUNTS))
    with meter.watch():
        step = StepProfiler(runner, limits).table(budget_s * (1 - share), counter)
    tables = {Role.STEP: step, Role.TEXT: CostTable(rows=(1, 2), seconds=(_TEXT_S, 2 * _TEXT_S))}
    if draft_runner is not None:
        passes = StepProfiler(draft_runner, limits, rows_each=1)
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
