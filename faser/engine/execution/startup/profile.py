"""Measures how long steps take on this machine before the first request: the StepTimes of the engine.

The measurement is kept on disk under a fingerprint of everything that it depends on. StepProfiler does the timing;
lane_cells says which steps the lanes are measured with.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from faser import __version__
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.interference_profile import measure_slowdown
from faser.engine.execution.startup.lane_cells import Pair, make_cells
from faser.engine.execution.startup.step_profiler import (
    BUCKETS,
    DummyBatchLimits,
    ProfileProgress,
    Progress,
    StepProfiler,
)
from faser.errors import ConfigError

_log = logging.getLogger("faser.engine")

LANES_STAGE = "measuring lanes"
_TEXT_S = 30e-6  # a text look-up, per sequence; a starting value that the cost model corrects online
_DRAFT_SHARE = 0.35  # of the time budget, for the passes of the draft model


def fingerprint(described: Mapping[str, object]) -> str:
    """A hash of everything that step times depend on: `described`, the processor and this version of FASER."""
    text = json.dumps({"faser": __version__, "cpu": _cpu_name(), **described}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def cached_profile(path: Path, measure: Callable[[], StepTimes]) -> StepTimes:
    """The step times in the file at path; if it is missing or unreadable, measure and write it."""
    if path.exists():
        try:
            return StepTimes.load(path)
        except ConfigError as error:
            _log.warning("step times are measured again: %s", error)
    times = measure()
    try:
        times.save(path)
    except ConfigError as error:
        _log.warning("step times will be measured at every start: %s", error)
    return times


def profile(
    runner: Runner,
    draft_runner: Runner | None,
    room: DummyBatchLimits,
    *,
    progress: Progress,
    draft_layers: int | None = None,
    pair: Pair | None = None,
    budget_s: float = 30.0,
) -> StepTimes:
    """Time the target's steps and the drafter's passes, within about budget_s seconds.

    draft_runner: of a draft model, or the target's own when its first draft_layers layers draft; None: no passes.
    pair: also measure how both slow each other down at the same time; pair.budget_s bounds this part.
    The keys and values of the dummy sequences stay in the cache, in blocks that no sequence holds.
    """
    share = 0.0 if draft_runner is None else _DRAFT_SHARE
    num_roles = 1 if draft_runner is None else 2
    report = ProfileProgress(progress, num_roles * len(BUCKETS))
    step = StepProfiler(runner, room).table(budget_s * (1 - share), report)
    tables = {Role.STEP: step, Role.TEXT: CostTable(rows=(1, 2), seconds=(_TEXT_S, 2 * _TEXT_S))}
    if draft_runner is not None:
        passes = StepProfiler(draft_runner, room, num_layers=draft_layers, rows_each=1)
        tables[Role.PASS] = passes.table(budget_s * share, report)
    report.finish()
    times = StepTimes(tables=tables)
    if pair is None or draft_runner is None:
        return times
    progress(LANES_STAGE, 0, 0)
    interference = measure_slowdown(
        pair.partition,
        make_cells(pair, runner, draft_runner, room, times),
        budget_s=pair.budget_s,
        progress=lambda done, total: progress(LANES_STAGE, done, total),
    )
    return replace(times, interference=interference)


def largest_step(runner: Runner, room: DummyBatchLimits) -> None:
    """Run a step of max_rows rows with as many logits as a step may have, to claim the memory that it needs."""
    StepProfiler(runner, room).largest()


def _cpu_name() -> str:
    """The processor's name in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
