"""The steps that a cost table is measured with, and the fit. Oracle: a machine whose costs are known.

How a cost table is measured within a time budget. Oracle: a machine whose steps take a known time.
"""

from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from faser.engine.contract.plan import SequenceRows, StepPlan, StepRows
from faser.engine.contract.step_times import CostTable, ExpertCosts
from faser.engine.execution.runner.batch import RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.step_profiler import (
    BatchShape,
    DummyBatchLimits,
    ExpertReads,
    StageProgress,
    StepProfiler,
    fit_table,
    row_counts,
    table_shapes,
)

LIMITS = DummyBatchLimits(num_blocks=2000, block_size=16, max_len=4096, max_rows=256, max_logit_rows=64)
TRUE = CostTable(rows=(1, 8, 256), seconds=(0.01, 0.012, 0.2), kv_token_s=1.9e-6, kv_row_token_s=2.8e-7)


def plan_of(shape: BatchShape) -> StepPlan:
    rows = tuple(
        SequenceRows(slot=slot, start=shape.context - count, token_ids=(1,) * count, new_blocks=(), samples=True)
        for slot, count in enumerate(shape.counts.tolist())
    )
    return StepPlan(step=1, started=(), rows=StepRows.of(*rows), released=())


@pytest.mark.parametrize(
    "rows, rows_each, context", [(1, 4, 64), (7, 4, 64), (32, 8, 1024), (8, 1, 64), (9, 5, 3)]
)
def test_a_shape_counts_tokens_as_the_plan_of_such_a_step_does(rows: int, rows_each: int, context: int) -> None:
    shape = BatchShape(rows=rows, rows_each=rows_each, context=context)
    plan = plan_of(shape)
    assert (plan.num_rows, plan.kv_tokens, plan.kv_row_tokens) == (rows, shape.kv_tokens, shape.kv_row_tokens)


FIVE_THEN_FOURS = (5, *range(8, 256, 4))  # as low-bit products with AVX2
VECTORS_THEN_TILES = (6, 11, *range(16, 256, 16))  # as those of 4 bits with AMX


def edges_of(height: int) -> tuple[int, ...]:
    return tuple(range(height, 256, height))


@pytest.mark.parametrize("edges", [edges_of(4), FIVE_THEN_FOURS, edges_of(6), VECTORS_THEN_TILES, edges_of(16)])
def test_edges_are_measured_on_both_sides_as_far_as_one_request_drafts(edges: tuple[int, ...]) -> None:
    """One token and a draft of 16. Short steps come before long ones."""
    counts = row_counts(256, edges)
    sides = {edge + side for edge in edges if edge <= 16 for side in (0, 1)}
    assert sides <= set(counts)
    assert counts[:4] == (1, 8, 32, 256)
    assert max(map(counts.index, sides)) < counts.index(64)


@pytest.mark.parametrize("edges", [(), (2, 4, 6, 8, 10), edges_of(4), edges_of(6), edges_of(16)])
def test_edges_make_no_start_slower(edges: tuple[int, ...]) -> None:
    """Planted bug: all edges below the largest row count are measured."""
    counts = row_counts(256, edges)
    assert len(counts) == len(set(counts)) <= 18
    assert row_counts(20, edges) == tuple(each for each in counts if each <= 20)


@pytest.mark.parametrize("rows_each", [1, 4])
def test_the_fit_finds_the_slopes_and_the_table_of_a_machine(rows_each: int) -> None:
    """Passes have no further rows, so these stay without a slope."""
    groups = table_shapes(LIMITS, rows_each)
    seconds = {
        shape: TRUE.seconds_at(shape.rows, shape.kv_tokens, shape.kv_row_tokens)
        for group in groups
        for shape in group
    }
    table = fit_table(seconds, groups)
    assert table.rows == tuple(sorted(row_counts(256)))
    assert table.kv_token_s == pytest.approx(TRUE.kv_token_s)
    assert table.kv_row_token_s == pytest.approx(TRUE.kv_row_token_s if rows_each > 1 else 0.0)
    assert table.seconds == pytest.approx([TRUE.seconds_at(rows) for rows in table.rows])


def test_the_fit_finds_what_an_expert_takes_and_how_alike_rows_choose() -> None:
    """Planted bug: the step with equal tokens taken for one of a pair of contexts."""
    experts = ExpertCosts(total=1000, per_row=80, expert_s=2e-5, row_share=0.7)
    true, reads = replace(TRUE, experts=experts), ExpertReads(total=1000, per_row=80)
    groups = table_shapes(LIMITS, 4, mixture=True)
    seconds = {}
    for shape in chain.from_iterable(groups):
        reads.of[shape] = round(experts.read(0.2 if shape.alike else 0.7 * (shape.rows - 1)))
        apart_s = true.seconds_at(shape.rows, shape.kv_tokens, shape.kv_row_tokens) - experts.expert_s * (
            experts.read(0.7 * (shape.rows - 1)) - reads.of[shape]
        )
        seconds[shape] = apart_s
    table = fit_table(seconds, groups, reads)
    assert table.experts is not None
    assert table.experts.expert_s == pytest.approx(2e-5)
    assert table.experts.row_share == pytest.approx(0.7, rel=0.01)
    assert table.kv_token_s == pytest.approx(TRUE.kv_token_s)
    assert table.kv_row_token_s == pytest.approx(TRUE.kv_row_token_s)
    assert table.seconds == pytest.approx([TRUE.seconds_at(rows) for rows in table.rows])


def test_equal_tokens_that_take_as_long_as_different_ones_leave_experts_without_a_price() -> None:
    groups = table_shapes(LIMITS, 4, mixture=True)
    shapes = [*chain.from_iterable(groups)]
    for alike_reads, faster_s in ((80, 0.0), (80, -0.01), (300, 0.01)):
        reads = ExpertReads(total=1000, per_row=80)
        reads.of.update({shape: alike_reads if shape.alike else 300 for shape in shapes})
        seconds = {shape: 0.1 - (faster_s if shape.alike else 0.0) for shape in shapes}
        table = fit_table(seconds, groups, reads)
        assert table.experts is not None
        assert table.experts.expert_s == 0.0


def test_a_slope_whose_steps_were_not_measured_is_zero() -> None:
    groups = table_shapes(LIMITS, 4)
    first = {shape: 0.01 + 1e-5 * shape.rows for group in groups[:3] for shape in group}
    table = fit_table(first, groups)
    assert (table.rows, table.kv_token_s, table.kv_row_token_s) == ((1, 8, 32), 0.0, 0.0)


def test_noise_that_makes_long_contexts_faster_gives_slopes_of_zero() -> None:
    groups = table_shapes(LIMITS, 4)
    seconds = {shape: 0.02 - 1e-6 * shape.context for group in groups for shape in group}
    table = fit_table(seconds, groups)
    assert (table.kv_token_s, table.kv_row_token_s) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("num_blocks", "max_len", "max_rows", "max_logit_rows"),
    [(2000, 4096, 256, 64), (130, 4096, 256, 64), (2000, 4096, 6, 64), (2000, 4096, 256, 3), (10, 4096, 1, 1)],
)
def test_shapes_of_slopes_fit_the_cache_the_rows_and_the_logits(
    num_blocks: int, max_len: int, max_rows: int, max_logit_rows: int
) -> None:
    limits = DummyBatchLimits(
        num_blocks=num_blocks, block_size=16, max_len=max_len, max_rows=max_rows, max_logit_rows=max_logit_rows
    )
    for group in table_shapes(limits, 4):
        for shape in group[1:]:
            assert shape.rows <= max_rows
            assert len(shape.counts) <= max_logit_rows
            assert len(shape.counts) * -(-shape.context // 16) <= num_blocks


@pytest.mark.parametrize("max_len", [1, 3, 70])
def test_a_model_of_short_contexts_has_no_slopes(max_len: int) -> None:
    limits = DummyBatchLimits(num_blocks=200, block_size=16, max_len=max_len, max_rows=8, max_logit_rows=4)
    groups = table_shapes(limits, 4)
    assert [len(group) for group in groups] == [1] * len(row_counts(8))
    assert all(np.all(shape.counts >= 1) for (shape,) in groups)


KNOWN_LIMITS = DummyBatchLimits(num_blocks=600, block_size=16, max_len=32, max_rows=256, max_logit_rows=64)


class KnownMachine(StepProfiler):
    """A step takes fixed_s, row_s for every row and tile_s for every tile. steps: the rows of each, in order."""

    def __init__(
        self,
        fixed_s: float,
        row_s: float,
        *,
        disturbed: frozenset[int] = frozenset(),
        edges: tuple[int, ...] = (),
        tile_s: float = 0.0,
    ) -> None:
        runner = SimpleNamespace(
            vocab_size=100, experts_read=0, fill_cache=lambda _layout: None, row_edges=lambda _most: edges
        )
        super().__init__(cast(Runner, runner), KNOWN_LIMITS, clock=lambda: self.now_s)
        self.now_s = 0.0
        self.steps: list[int] = []
        self._fixed_s, self._row_s, self._tile_s, self._full = fixed_s, row_s, tile_s, edges
        self._disturbed = disturbed

    def seconds(self, rows: int) -> float:
        return self._fixed_s + self._row_s * rows + self._tile_s * sum(edge < rows for edge in self._full)

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
    table = machine.table(budget_s, StageProgress(silent, "", machine.num_row_counts))
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
    assert len(rows) < len(row_counts(256))


def test_a_step_that_was_disturbed_once_is_timed_again() -> None:
    machine = KnownMachine(0.008, 0.0006, disturbed=frozenset({1, 4}))
    _, seconds = measure(machine, 3.5)
    assert seconds == pytest.approx([machine.seconds(each) for each in (1, 8, 32, 256)])


@pytest.mark.parametrize("edges", [edges_of(4), FIVE_THEN_FOURS, edges_of(6), edges_of(16)])
def test_a_staircase_is_found_at_every_row_count(edges: tuple[int, ...]) -> None:
    """Oracle: the machine. With lines between the measured counts the table is up to 15 % off."""
    machine = KnownMachine(0.004, 0.00002, edges=edges, tile_s=0.0007)
    table = machine.table(3.5, StageProgress(silent, "", machine.num_row_counts))
    assert table.edges == edges
    assert table.dense(256)[1:] == pytest.approx([machine.seconds(rows) for rows in range(1, 257)], rel=1e-3)


def test_a_slow_machine_finds_the_first_edge_in_the_same_time() -> None:
    """A model of 1.5 billion parameters with tiles of 16 rows: edges come before the long steps between others."""
    machine = KnownMachine(0.06, 0.0001, edges=edges_of(16), tile_s=0.03)
    table = machine.table(2.6, StageProgress(silent, "", machine.num_row_counts))
    assert machine.now_s <= 2.6
    assert {1, 8, 16, 17, 32, 256} <= set(table.rows)
    assert table.seconds_at(17) == pytest.approx(machine.seconds(17))
