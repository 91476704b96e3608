"""Whether step times that were measured at an earlier start still hold: a few steps are timed and compared.

Takes a fraction of a second, so it runs at every start. Decides only whether all is measured again.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.execution.startup.step_times.table_fit import BatchShape
from faser.machine import BusyMeter

_log = logging.getLogger("faser.engine")

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
