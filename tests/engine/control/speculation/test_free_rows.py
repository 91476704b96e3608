"""Drafts where rows are free up to an edge of the kernels' tiles. Oracle: every number of rows, by the true times.

The machines are made up: products of bfloat16 by tiles of 16 rows (AMX; predicted, with what attention adds), of 6
rows (AVX-512) and of 4 (AVX2). A policy knows what a start measures of them, so the tests hold the table, its row
counts and the choice together. With lines between the measured counts the choice was up to 15 % off.

Planted bugs that these tests have caught: edges are left out of the table; a tile begins one row too late; a tile
takes no longer than a row.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.speculation.draft_lengths import Objective, best_lengths
from faser.engine.control.speculation.policies import make_policy
from faser.engine.control.step_cost import CostModel
from faser.engine.execution.startup.step_profiler import row_counts
from faser.types.arrays import Floats
from tests.engine.control.speculation.building import candidates, constant
from tests.native_acceptance import native_acceptance

CAP = SpeculationConfig().cap
TEXT = CostTable(rows=(1, 2), seconds=(3e-5, 6e-5))
PASS = CostTable(rows=(1, 256), seconds=(0.0008, 0.002))
MOST_ROWS = 512


@dataclass(frozen=True)
class Tiled:
    """A machine. height: rows of a tile. first_s, tile_s, row_s: of the first tile, each further one, each row."""

    height: int
    first_s: float
    tile_s: float
    row_s: float

    def seconds(self, rows: int) -> float:
        return self.first_s + self.tile_s * ((rows - 1) // self.height) + self.row_s * (rows - 1)

    def table(self) -> CostTable:
        """What a start measures."""
        edges = tuple(range(self.height, MOST_ROWS, self.height))
        measured = {rows: self.seconds(rows) for rows in row_counts(256, edges)}
        return CostTable.measured(measured, edges=edges)

    def best_rate(self, survival: Floats) -> float:
        """Tokens a second of the best number of draft rows, all of them tried."""
        gained: list[float] = np.add.accumulate([0.0, *sorted(survival[:, 1:].ravel(), reverse=True)]).tolist()
        count = len(survival)
        return max((count + each) / self.seconds(count + rows) for rows, each in enumerate(gained))


AMX = Tiled(height=16, first_s=0.0106, tile_s=0.0030, row_s=0.00012)
AVX512 = Tiled(height=6, first_s=0.0070, tile_s=0.0022, row_s=0.00035)
AVX2 = Tiled(height=4, first_s=0.0110, tile_s=0.0060, row_s=0.00060)
MACHINES = pytest.mark.parametrize("machine", [AMX, AVX512, AVX2], ids=["16 rows", "6 rows", "4 rows"])


def kept(machine: Tiled, survival: Floats) -> list[int]:
    """Tokens that the default policy verifies of these drafts from text."""
    costs = CostModel(StepTimes(tables={Role.STEP: machine.table(), Role.TEXT: TEXT}))
    policy = make_policy(SpeculationConfig(), costs, native_acceptance(len(survival), CAP))
    drafted = candidates(survival)
    lengths: list[int] = policy.keep(drafted, policy.lengths(drafted)).tolist()
    return lengths


def drafts(count: int, seed: int) -> Floats:
    """[count, CAP + 1] survival, of sequences whose text repeats more or less."""
    rng = np.random.default_rng(seed)
    chances = rng.uniform(0.3, 0.98, (count, 1)) * rng.uniform(0.8, 1.0, (count, CAP))
    return np.concatenate((np.ones((count, 1)), chances.cumprod(axis=1)), axis=1)


@MACHINES
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_no_other_length_is_one_percent_better(machine: Tiled, count: int) -> None:
    for seed in range(40):
        survival = drafts(count, seed)
        lengths = kept(machine, survival)
        worth = count + sum(survival[at, 1 : 1 + length].sum() for at, length in enumerate(lengths))
        assert worth / machine.seconds(count + sum(lengths)) >= 0.99 * machine.best_rate(survival)


@pytest.mark.parametrize(("acceptance", "in_16", "in_6"), [(0.5, 5, 3), (0.7, 9, 5), (0.9, 15, 11)])
def test_one_request_drafts_into_rows_that_are_free(acceptance: float, in_16: int, in_6: int) -> None:
    """Where a row costs 1 % of a step. A tile of 6 rows ends the same draft earlier."""
    assert kept(AMX, constant(acceptance, 1, CAP)) == [in_16]
    assert kept(AVX512, constant(acceptance, 1, CAP)) == [in_6]


@pytest.mark.parametrize("acceptance", [0.5, 0.7])
def test_four_requests_fill_a_tile_of_sixteen_rows_and_begin_no_other(acceptance: float) -> None:
    assert kept(AMX, constant(acceptance, 4, CAP)) == [3, 3, 3, 3]


def test_four_requests_go_on_into_the_next_tile_where_nearly_all_is_accepted() -> None:
    assert kept(AMX, constant(0.98, 4, CAP)) == [15, 15, 15, 15]


@MACHINES
@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("acceptance", [0.5, 0.75, 0.9])
def test_a_model_drafts_to_the_best_common_depth(machine: Tiled, count: int, acceptance: float) -> None:
    """Oracle: every number of sequences to every depth, by the true times."""
    costs = CostModel(StepTimes(tables={Role.STEP: machine.table(), Role.PASS: PASS}))
    drafting = candidates(constant(acceptance, count, CAP))
    objective = Objective(costs, drafting)
    lengths = best_lengths(drafting, objective, costs).lengths

    def rate(lengths: list[int]) -> float:
        worth = count + sum(acceptance**at for length in lengths for at in range(1, length + 1))
        gap_s = objective.drafting_gap_s if any(lengths) else 0.0
        passes_s = costs.draft_s(np.array(lengths), np.zeros(count, dtype=np.int64)) + gap_s
        return worth / (machine.seconds(count + sum(lengths)) + passes_s)

    every = [[depth] * chosen + [0] * (count - chosen) for chosen in range(count + 1) for depth in range(CAP + 1)]
    assert rate(lengths.tolist()) >= 0.99 * max(map(rate, every))
