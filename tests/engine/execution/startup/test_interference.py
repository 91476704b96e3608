"""The interference of lanes, measured on work whose cost is known: it sleeps, longer where it should be slower.

Bugs these tests have been seen to catch are named where they are caught.
"""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from faser.engine.contract.step_times import StepTimes
from faser.engine.execution.overlap.lanes import Lanes
from faser.engine.execution.overlap.partition import (
    EVERYTHING,
    Cores,
    Draft,
    Lane,
    OverlapResult,
    Serial,
    Verify,
    synchronous,
)
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.interference import (
    STAGE,
    InterferenceCell,
    LanesSetup,
    Work,
    lane_contexts,
    measure_interference,
    measure_lanes,
)
from faser.engine.execution.startup.step_profiler import DummyBatchLimits
from faser.kernels.torch_backend import TorchBackend
from tests.engine.execution.startup.test_step_times import LIMITS, loaded

D = TypeVar("D")
V = TypeVar("V")

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
]


@pytest.fixture
def lanes() -> Iterator[Cores]:
    lanes = Cores()
    yield lanes
    lanes.close()


class Machine:
    """Work takes whole_s on all processors, `narrow` times that on a lane, and `crowded` times that in overlap."""

    def __init__(self) -> None:
        self._busy: set[str] = set()
        self._lock = threading.Lock()

    def work(self, name: str, lane: Lane, whole_s: float, narrow: float, crowded: float) -> None:
        """In small pieces, so that the other lane counts for as long as it runs."""
        with self._lock:
            self._busy.add(name)
        for _ in range(10):
            factor = 1.0 if lane == EVERYTHING else narrow * (crowded if len(self._busy) > 1 else 1.0)
            time.sleep(whole_s / 10 * factor)
        with self._lock:
            self._busy.discard(name)


def cell(verify: Work, draft: Work, *, rows: int = 8, context: int = 64, whole_s: float = 1.0) -> InterferenceCell:
    return InterferenceCell(rows=rows, context=context, verify=synchronous(verify), draft=draft, whole_s=whole_s)


@pytest.mark.parametrize("quick", ["verify", "draft"])
def test_slowdowns_are_those_of_the_machine(lanes: Cores, quick: str) -> None:
    """For either lane being the quicker one. Caught: the quicker one not repeated, factors swapped."""
    machine = Machine()
    verify_s, draft_s = (0.004, 0.016) if quick == "verify" else (0.016, 0.004)
    found = measure_interference(
        lanes,
        [
            cell(
                lambda lane: machine.work("verify", lane, verify_s, 1.5, 2.0),
                lambda lane: machine.work("draft", lane, draft_s, 2.0, 3.0),
            )
        ],
        budget_s=1.0 * len(lanes.shares()),
    )
    assert [each.share for each in found] == list(lanes.shares())
    for each in found:
        assert (each.rows, each.contexts) == ((8,), (64,))
        measured = (each.verify_alone[0][0], each.draft_alone[0][0], each.verify[0][0], each.draft[0][0])
        for got, wanted in zip(measured, (1.5, 2.0, 3.0, 6.0), strict=True):
            assert wanted / 1.4 < got < wanted * 1.4, measured


class ManyShares:
    """Lanes that offer more shares than this machine may have, and keep a list of those tried."""

    name = "many"
    share = 0.25

    def __init__(self, lanes: Cores) -> None:
        self._lanes = lanes
        self.tried: list[float] = []

    def shares(self) -> tuple[float, ...]:
        return (0.125, 0.25, 0.5)

    def resize(self, share: float) -> None:
        self.share = share
        self.tried.append(share)

    def run_both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        return self._lanes.run_both(draft, verify)

    def close(self) -> None:
        pass


def test_a_small_budget_still_gives_every_share_an_answer_and_the_old_share_comes_back(lanes: Cores) -> None:
    """One round that warms up, one that counts. Caught: a share left as the last one tried."""
    many = ManyShares(lanes)
    found = measure_interference(many, [cell(_short, _short)], budget_s=0.0)
    assert [each.share for each in found] == [0.125, 0.25, 0.5]
    assert many.tried == [0.125, 0.25, 0.5, 0.125, 0.25, 0.5, 0.25]


def test_lanes_that_run_in_turns_are_not_measured() -> None:
    assert measure_interference(Serial(), [cell(_fail, _fail)]) == ()


def test_an_error_of_the_work_ends_the_measurement(lanes: Cores) -> None:
    """Caught: a lane that waits for one that has failed."""

    def fails_on_a_lane(lane: Lane) -> None:
        if lane != EVERYTHING:
            raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        measure_interference(lanes, [cell(_short, fails_on_a_lane)])
    with pytest.raises(ValueError, match="no such kernel"):
        measure_interference(lanes, [cell(fails_on_a_lane, _short)])


class Unhurried:
    """Cells whose calls sleep, and the (rows, context) of every verification, in order."""

    def __init__(self, seconds: dict[tuple[int, int], float], *, unit: float = 1.0) -> None:
        """unit: the expected times are the real ones in seconds times this."""
        self.asked: list[tuple[int, int]] = []
        self.cells = [
            cell(self._verify(rows, context, each), _short, rows=rows, context=context, whole_s=unit * each)
            for (rows, context), each in seconds.items()
        ]

    def _verify(self, rows: int, context: int, seconds: float) -> Work:
        def verify(lane: Lane) -> None:
            if lane == EVERYTHING:
                self.asked.append((rows, context))
            time.sleep(seconds)

        return verify


def test_with_time_for_all_every_pair_of_rows_and_contexts_is_measured(lanes: Cores) -> None:
    """In whatever order they come. Caught: rows in the order of importance, not ascending."""
    given = Unhurried({(rows, context): 0.001 for context in (64, 512) for rows in (8, 32, 2)})
    for found in measure_interference(lanes, given.cells, budget_s=5.0):
        assert (found.rows, found.contexts) == ((2, 8, 32), (64, 512))
        assert (len(found.verify), len(found.verify[0])) == (2, 3)


def test_every_cell_has_its_own_numbers(lanes: Cores) -> None:
    """Only long contexts in the widest step are slowed. Caught: rows and contexts transposed, cells mixed up."""

    def slowed(factor: float) -> Work:
        return lambda lane: time.sleep(0.002 * (1.0 if lane == EVERYTHING else factor))

    factors = {(8, 64): 1.0, (2, 64): 3.0, (8, 512): 6.0, (2, 512): 12.0}
    cells = [
        cell(slowed(factor), _short, rows=rows, context=context) for (rows, context), factor in factors.items()
    ]
    for found in measure_interference(lanes, cells, budget_s=2.0):
        wanted = np.array([[3.0, 1.0], [12.0, 6.0]])  # contexts 64 and 512 of rows 2 and 8
        for matrix in (found.verify, found.verify_alone):
            assert (np.abs(np.log(np.array(matrix) / wanted)) < np.log(1.4)).all(), matrix


@pytest.mark.parametrize("unit", [1.0, 1000.0])
def test_a_cell_without_time_is_left_out_and_not_tried(lanes: Cores, unit: float) -> None:
    """Wide steps would take longer than the whole budget. Caught: a cell tried before it is known to fit."""
    seconds = {(8, 64): 0.002, (64, 64): 0.2, (2, 64): 0.002, (8, 512): 0.003, (64, 512): 0.3, (2, 512): 0.003}
    given = Unhurried(seconds, unit=unit)
    began_s = time.perf_counter()
    found = measure_interference(lanes, given.cells, budget_s=1.0)
    assert time.perf_counter() - began_s < 2.0
    assert set(given.asked) == {(8, 64), (2, 64), (8, 512), (2, 512)}
    for each in found:
        assert (each.rows, each.contexts) == ((2, 8), (64, 512))


def test_a_context_is_measured_for_all_rows_or_for_none(lanes: Cores) -> None:
    seconds = {(8, 64): 0.002, (2, 64): 0.002, (8, 512): 0.002, (2, 512): 0.5}
    given = Unhurried(seconds)
    for each in measure_interference(lanes, given.cells, budget_s=1.0):
        assert (each.rows, each.contexts) == ((2, 8), (64,))


def test_every_cell_has_as_many_rounds_as_any_other(lanes: Cores) -> None:
    """Caught: cells measured one after the other until time is over."""
    given = Unhurried({(rows, 64): 0.004 for rows in (8, 32, 2)})
    measure_interference(lanes, given.cells, budget_s=0.8)
    counts = {given.asked.count((rows, 64)) for rows in (8, 32, 2)}
    assert len(counts) == 1
    assert given.asked[-3:] == [(8, 64), (32, 64), (2, 64)]


def test_without_time_the_first_cell_alone_is_measured(lanes: Cores) -> None:
    given = Unhurried({(rows, 64): 0.001 for rows in (8, 32, 2)})
    assert {each.rows for each in measure_interference(lanes, given.cells, budget_s=0.0)} == {(8,)}


def test_progress_rises_to_its_end_even_if_the_budget_ends_before(lanes: Cores) -> None:
    said: list[tuple[int, int]] = []
    given = Unhurried({(rows, 64): 0.004 for rows in (8, 32)})
    measure_interference(
        lanes, given.cells, budget_s=0.5, report=lambda _stage, done, total: said.append((done, total))
    )
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    assert len({total for _, total in said}) == 1
    assert said[-1][0] == said[-1][1]


@pytest.fixture(scope="module")
def runner(tiny_checkpoint: Path) -> Runner:
    return loaded(tiny_checkpoint)


@pytest.fixture(scope="module")
def drafter(tiny_checkpoint: Path) -> Runner:
    """A runner with a backend of its own: both run at the same time."""
    return loaded(tiny_checkpoint)


@pytest.fixture
def setup(runner: Runner, drafter: Runner, lanes: Cores) -> LanesSetup:
    return LanesSetup(
        lanes=Lanes(partition=lanes, target=TorchBackend("cpu"), draft=TorchBackend("cpu")),
        runner=runner,
        draft_runner=drafter,
        rows=(8, 2, 500),
        contexts=(16, 100),
        num_sequences=2,
        budget_s=6.0,
    )


ALONE = StepTimes.proportional(step_s=1e-3, pass_s=1e-3)


def test_lanes_are_measured_for_all_rows_and_contexts_that_fit(setup: LanesSetup) -> None:
    """With 8 rows at most, steps of 500 rows become steps of 8, which are measured once."""
    seen: list[tuple[str, int, int]] = []
    found = measure_lanes(setup, LIMITS, ALONE, lambda *stage: seen.append(stage))
    assert [each.share for each in found] == list(setup.lanes.partition.shares())
    for each in found:
        assert (each.rows, each.contexts) == ((2, 8), (16, 100))
        assert all(0.05 < factor < 100 for line in (*each.verify, *each.draft) for factor in line)
    assert {stage for stage, _, _ in seen} == {STAGE}
    assert seen[0][1] == 0
    assert seen[-1][1] == seen[-1][2] > 0


@pytest.mark.parametrize(
    ("num_blocks", "max_len", "wanted"),
    [(80, 200, [16, 100]), (80, 60, [16, 60]), (80, 20, [16]), (5, 200, [16, 40]), (3, 200, [16]), (1, 9, [9])],
)
def test_contexts_are_as_long_as_the_cache_allows_for_all_sequences(
    setup: LanesSetup, num_blocks: int, max_len: int, wanted: list[int]
) -> None:
    """Two sequences, blocks of 16. Contexts that come out nearly alike are not measured twice."""
    limits = DummyBatchLimits(num_blocks=num_blocks, block_size=16, max_len=max_len, max_rows=8, max_logit_rows=3)
    assert lane_contexts(setup, limits) == wanted


def _short(_lane: Lane) -> None:
    time.sleep(0.001)


def _fail(_lane: Lane) -> None:
    raise AssertionError("called")
