"""How a cost table is measured within a time budget. Oracle: a machine whose steps take a known time."""

from types import SimpleNamespace
from typing import cast

import pytest

from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.step_profiler import (
    ROW_COUNTS,
    DummyBatchLimits,
    ProfileProgress,
    StepProfiler,
)

LIMITS = DummyBatchLimits(num_blocks=600, block_size=16, max_len=32, max_rows=256, max_logit_rows=64)


class KnownMachine(StepProfiler):
    """A step takes fixed_s and row_s for every row. steps: the rows of each, in order."""

    def __init__(self, fixed_s: float, row_s: float, *, disturbed: frozenset[int] = frozenset()) -> None:
        runner = SimpleNamespace(vocab_size=100, fill_cache=lambda _layout: None)
        super().__init__(cast(Runner, runner), LIMITS, clock=lambda: self.now_s)
        self.now_s = 0.0
        self.steps: list[int] = []
        self._fixed_s, self._row_s = fixed_s, row_s
        self._disturbed = disturbed

    def seconds(self, rows: int) -> float:
        return self._fixed_s + self._row_s * rows

    def time_s(self, batch: RowBatch) -> float:
        rows = len(batch.token_ids)
        slower = 5 if len(self.steps) in self._disturbed else 1
        self.steps.append(rows)
        self.now_s += slower * self.seconds(rows)
        return slower * self.seconds(rows)


def silent(stage: str, done: int, total: int) -> None:
    """Ignores progress."""


def measure(machine: KnownMachine, budget_s: float) -> tuple[tuple[int, ...], list[float]]:
    """The row counts of the table, and what it says of 1, 8, 32 and 256 rows."""
    table = machine.table(budget_s, ProfileProgress(silent, len(ROW_COUNTS)))
    return table.rows, [table.seconds_at(rows) for rows in (1, 8, 32, 256)]


@pytest.mark.parametrize(("fixed_s", "row_s"), [(0.008, 0.0006), (0.045, 0.004), (0.2, 0.02), (2.0, 0.1)])
def test_a_budget_is_kept_but_for_the_steps_that_are_needed(fixed_s: float, row_s: float) -> None:
    machine = KnownMachine(fixed_s, row_s)
    rows, seconds = measure(machine, 3.5)
    assert machine.now_s <= max(3.5, 2 * machine.seconds(1))
    assert machine.steps.count(1) >= 2  # the first meets cold memory
    assert seconds[0] == pytest.approx(machine.seconds(1))
    if len(rows) > 1:
        assert seconds == pytest.approx([machine.seconds(each) for each in (1, 8, 32, 256)])


def test_with_time_for_a_few_steps_only_a_small_a_middle_and_a_large_one_are_measured() -> None:
    """A model of 1.5 billion parameters on two cores: the line above 32 rows is measured, not extrapolated."""
    rows, _ = measure(KnownMachine(0.045, 0.0037), 2.6)
    assert {1, 8, 32, 256} <= set(rows)
    assert len(rows) < len(ROW_COUNTS)


def test_a_step_that_was_disturbed_once_is_timed_again() -> None:
    machine = KnownMachine(0.008, 0.0006, disturbed=frozenset({1, 4}))
    _, seconds = measure(machine, 3.5)
    assert seconds == pytest.approx([machine.seconds(each) for each in (1, 8, 32, 256)])
