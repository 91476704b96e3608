"""Measures what a step takes on this machine, before the first request comes: the tables of the cost model.

What is measured is kept on disk, by a fingerprint of all that it depends on. How it is timed is the stopwatch's,
what lanes are measured with is in lane_cells. Decides nothing.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from faser import __version__
from faser.engine.contract.interference import InterferenceTable
from faser.engine.contract.step_times import CostTable, Role
from faser.engine.control.timing.cost_model import CostModel
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
_TEXT_S = 30e-6  # a look-up in text, per sequence; a first guess, the engine follows the real one
_DRAFT_SHARE = 0.35  # of the time there is, for the passes of the draft model


def fingerprint(described: Mapping[str, object]) -> str:
    """Of all that step times depend on: model, type, backend, threads, machine, draft model; and this version."""
    text = json.dumps({"faser": __version__, "cpu": _cpu_name(), **described}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def cached_profile(path: Path, measure: Callable[[], CostModel]) -> CostModel:
    """The cost model kept at path, or a new one that is then kept there. What cannot be read is measured again."""
    if path.exists():
        try:
            return CostModel.load(path)
        except ConfigError as error:
            _log.warning("step times are measured again: %s", error)
    costs = measure()
    try:
        costs.save(path)
    except ConfigError as error:
        _log.warning("step times will be measured at every start: %s", error)
    return costs


def profile(
    runner: Runner,
    draft_runner: Runner | None,
    room: DummyBatchLimits,
    *,
    progress: Progress,
    draft_layers: int | None = None,
    pair: Pair | None = None,
    budget_s: float = 30.0,
) -> CostModel:
    """Time steps of the target and passes of the drafter, within about budget_s seconds.

    pair: measure as well how the two of them disturb each other at the same time, in its own time.
    draft_runner: of a draft model, or the target's own when its first draft_layers layers draft; None: no passes.
    The keys and values of the dummy sequences stay in the cache, in blocks that nobody holds.
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
    lanes: tuple[InterferenceTable, ...] = ()
    if pair is not None and draft_runner is not None:
        progress(LANES_STAGE, 0, 0)
        lanes = measure_slowdown(
            pair.partition,
            make_cells(pair, runner, draft_runner, room, CostModel(tables)),
            budget_s=pair.budget_s,
            progress=lambda done, total: progress(LANES_STAGE, done, total),
        )
    return CostModel(tables, lanes)


def largest_step(runner: Runner, room: DummyBatchLimits) -> None:
    """Run a step of max_rows rows and take all the logits that a step may take, for what they need in memory."""
    StepProfiler(runner, room).largest()


def _cpu_name() -> str:
    """As the machine calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
