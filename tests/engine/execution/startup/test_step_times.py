"""The start-up profile, on a tiny real model: what it measures, and what it keeps.

Whether kept step times hold. The times now are those of a machine that is some times slower than its table.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.step_profiler import (
    BatchShape,
    DummyBatchLimits,
    StageProgress,
    StepProfiler,
    row_counts,
)
from faser.engine.execution.startup.step_times import (
    STAGE,
    SecondsNow,
    cached_profile,
    fingerprint,
    profile,
    start_check,
)
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.torch_backend import TorchBackend
from faser.machine import BusyMeter, CoreUse
from faser.types.engine import ProgressCallback
from tests.disks import filling_up, read_only

LIMITS = DummyBatchLimits(num_blocks=80, block_size=16, max_len=200, max_rows=8, max_logit_rows=3)


@pytest.fixture(scope="module")
def runner(tiny_checkpoint: Path) -> Iterator[Runner]:
    """On one thread: with a model this small a second one only waits."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield loaded(tiny_checkpoint)
    torch.set_num_threads(num_threads)


def loaded(checkpoint: Path) -> Runner:
    backend = TorchBackend("cpu")
    decoder = load_decoder(
        checkpoint,
        backend,
        torch.float32,
        max_model_len=LIMITS.max_len,
        max_rows=LIMITS.max_rows,
        max_logit_rows=LIMITS.max_logit_rows,
        progress=lambda _done, _total: None,
    )
    spec = decoder.spec
    shape = KvShape(
        heads=spec.kv_heads,
        num_blocks=LIMITS.num_blocks,
        block_size=LIMITS.block_size,
        dtype=torch.float32,
    )
    return Runner(decoder, backend, shape)


def silent(stage: str, done: int, total: int) -> None:
    """Ignores progress."""


def times_of(
    runner: Runner,
    drafter: Runner | None = None,
    limits: DummyBatchLimits = LIMITS,
    *,
    report: ProgressCallback = silent,
    budget_s: float = 0.5,
    meter: BusyMeter | None = None,
) -> StepTimes:
    profilers = {Role.STEP: StepProfiler(runner, limits)}
    if drafter is not None:
        profilers[Role.PASS] = StepProfiler(drafter, limits, rows_each=1)
    return profile(profilers, report, budget_s=budget_s, meter=meter or BusyMeter())


def test_every_row_count_that_a_step_can_have_is_measured(runner: Runner) -> None:
    times = times_of(runner, budget_s=3.5)
    table = times.tables[Role.STEP]
    edges = runner.row_edges(LIMITS.max_rows)
    assert table.rows == tuple(sorted(row_counts(LIMITS.max_rows, edges)))
    assert table.edges == edges
    assert all(0 < each < 5 for each in table.seconds)
    assert Role.PASS not in times.tables
    assert times.tables[Role.TEXT].seconds_at(1) > 0


def test_a_draft_model_has_its_passes_measured(runner: Runner) -> None:
    times = times_of(runner, runner)
    assert times.tables[Role.PASS].rows[0] == 1


def test_progress_reaches_the_end_and_never_goes_back(runner: Runner) -> None:
    seen: list[tuple[str, int, int]] = []
    times_of(runner, runner, report=lambda *stage: seen.append(stage))
    assert {stage for stage, _, _ in seen} == {STAGE}
    done = [each for _, each, _ in seen]
    assert done == sorted(done)
    assert seen[-1][1] == seen[-1][2]


def test_without_time_only_the_smallest_step_is_measured_and_the_log_says_so(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="faser.engine"):
        times = times_of(runner, budget_s=0.0)
    assert times.tables[Role.STEP].rows == (1,)
    assert "up to 1 rows" in caplog.text


@pytest.mark.parametrize(
    "limits",
    [
        DummyBatchLimits(num_blocks=1, block_size=16, max_len=200, max_rows=8, max_logit_rows=3),
        DummyBatchLimits(num_blocks=80, block_size=16, max_len=3, max_rows=6, max_logit_rows=1),
        DummyBatchLimits(num_blocks=80, block_size=16, max_len=200, max_rows=1, max_logit_rows=1),
    ],
)
def test_small_limits_are_enough(runner: Runner, limits: DummyBatchLimits) -> None:
    table = times_of(runner, limits=limits).tables[Role.STEP]
    assert table.rows[-1] <= limits.max_rows


HALF_A_SECOND = StepTimes(tables={Role.STEP: CostTable(rows=(1,), seconds=(0.5,))})
BUSY = replace(HALF_A_SECOND, measured_at="2026-11-22 16:50 UTC", busy_share=0.48)


def holds(_times: StepTimes) -> None:
    """A check that finds nothing wrong."""


def test_what_was_measured_once_is_read_the_next_time(tmp_path: Path) -> None:
    calls: list[int] = []

    def measure() -> StepTimes:
        calls.append(1)
        return HALF_A_SECOND

    path = tmp_path / "cost" / "some.json"
    for _ in range(3):
        assert cached_profile(path, measure, holds) == HALF_A_SECOND
    assert len(calls) == 1


def test_a_corrupt_file_is_measured_again_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "some.json"
    path.write_text("{")
    times = cached_profile(path, lambda: HALF_A_SECOND, holds)
    assert times == HALF_A_SECOND
    assert "some.json" in caplog.text
    assert StepTimes.load(path) == HALF_A_SECOND


def test_times_of_a_busy_machine_serve_one_start_and_are_measured_again_at_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "some.json"
    assert cached_profile(path, lambda: BUSY, holds) == BUSY
    assert "other processes took 48 % of the cores while step times were measured" in caplog.text
    caplog.clear()
    assert cached_profile(path, lambda: HALF_A_SECOND, holds) == HALF_A_SECOND
    (line,) = caplog.messages
    assert "some.json: other processes took 48 % of the cores" in line
    assert "2026-11-22 16:50 UTC" in line
    assert cached_profile(path, lambda: BUSY, holds) == HALF_A_SECOND


def test_times_that_no_longer_hold_are_measured_again_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "some.json"
    seen: list[StepTimes] = []

    def check(times: StepTimes) -> str:
        seen.append(times)
        return "a step takes 2 ms"

    HALF_A_SECOND.save(path)
    other = StepTimes(tables={Role.STEP: CostTable(rows=(1,), seconds=(0.002,))})
    assert cached_profile(path, lambda: other, check) == other
    assert seen == [HALF_A_SECOND]
    assert caplog.messages == [f"step times are measured again: {path}: a step takes 2 ms"]
    assert StepTimes.load(path) == other


def test_a_profile_says_when_it_was_made_and_how_busy_others_were_in_its_busiest_part(runner: Runner) -> None:
    """Steps are measured first, then passes."""
    start = CoreUse(ran_s=0.0, waited_s=0.0, used_s=0.0, total_s=0.0)
    quiet = CoreUse(ran_s=9.0, waited_s=1.0, used_s=19.0, total_s=20.0)
    busy = CoreUse(ran_s=7.0, waited_s=3.0, used_s=20.0, total_s=20.0)
    for reads in ([start, quiet, start, busy], [start, busy, start, quiet]):
        meter = BusyMeter(iter(reads).__next__)
        times = times_of(runner, runner, budget_s=0.0, meter=meter)
        assert times.busy_share == pytest.approx(0.3)
        assert times.measured_at.endswith("UTC")


def test_a_few_steps_of_a_table_can_be_timed_again_quickly(runner: Runner) -> None:
    profiler = StepProfiler(runner, LIMITS)
    began_s = time.process_time()
    now = profiler.seconds_now([1, 8], 0.05)
    assert time.process_time() - began_s < 5
    assert [shape.rows for shape in now] == [1, 8]
    assert all(0 < each < 5 for each in now.values())


def test_every_key_and_value_that_a_timed_step_reads_was_written(tiny_checkpoint: Path) -> None:
    """Memory that was never written is one page of zeros, which is read faster than a cache in use."""
    runner = loaded(tiny_checkpoint)
    StepProfiler(runner, LIMITS).table(0.0, StageProgress(silent, "", 1))
    blocks_each = -(-LIMITS.longest // LIMITS.block_size)
    for stored in (*runner._cache.keys, *runner._cache.values):
        for first in range(0, LIMITS.num_sequences(LIMITS.longest) * blocks_each, blocks_each):
            tokens = stored[first : first + blocks_each].flatten(0, 1)[: LIMITS.longest]
            assert tokens.flatten(1).any(dim=1).all()


def test_a_cache_that_cannot_be_written_is_only_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "some.json"
    times = cached_profile(path, lambda: HALF_A_SECOND, holds)
    assert times == HALF_A_SECOND
    assert caplog.messages == [
        f"step times will be measured at every start: the cost model cannot be written to {path}: File exists"
    ]


def test_a_full_disk_and_a_read_only_one_are_warned_about_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with filling_up(tmp_path / "full", kib=4) as full, read_only(tmp_path / "closed") as closed:
        (full / "all of it").write_bytes(bytes(4096))
        for disk in (full, closed):
            assert cached_profile(disk / "some.json", lambda: HALF_A_SECOND, holds) == HALF_A_SECOND
    assert [message.rpartition(": ")[2] for message in caplog.messages] == [
        "No space left on device",
        "Read-only file system",
    ]


def test_a_fingerprint_tells_whatever_matters_apart_and_nothing_else() -> None:
    described = {"model": {"layers": 2}, "dtype": "bfloat16", "threads": 2}
    assert fingerprint(described) == fingerprint(dict(reversed(described.items())))
    assert fingerprint(described) != fingerprint({**described, "threads": 1})


STEP = CostTable(rows=(1, 4, 8, 32), seconds=(0.010, 0.012, 0.015, 0.040), kv_token_s=1e-6, kv_row_token_s=1e-7)
PASS = CostTable(rows=(1, 8, 32), seconds=(0.002, 0.003, 0.006))
TIMES = StepTimes(tables={Role.STEP: STEP, Role.PASS: PASS})


def slower(table: CostTable, times: dict[int, float]) -> SecondsNow:
    """times: how many times slower than the table, by row count; 1 for those left out."""

    def seconds_now(row_counts: Sequence[int], _budget_s: float) -> dict[BatchShape, float]:
        shapes = [BatchShape(rows=rows, rows_each=4, context=64) for rows in row_counts]
        return {
            shape: times.get(shape.rows, 1.0) * table.seconds_at(shape.rows, shape.kv_tokens, shape.kv_row_tokens)
            for shape in shapes
        }

    return seconds_now


def meter_of(share: float) -> BusyMeter:
    start = CoreUse(ran_s=0.0, waited_s=0.0, used_s=0.0, total_s=0.0)
    end = CoreUse(ran_s=1 - share, waited_s=share, used_s=2.0, total_s=2.0)
    return BusyMeter(iter([start, end] * 2).__next__)


@pytest.mark.parametrize("factor", [1 / 1.25, 1.0, 1.25])
def test_times_within_the_tolerance_hold(factor: float) -> None:
    everywhere = dict.fromkeys((1, 8, 32), factor)
    timers = {Role.STEP: slower(STEP, everywhere), Role.PASS: slower(PASS, everywhere)}
    assert start_check(TIMES, timers, meter=meter_of(0.0)) is None


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_a_step_that_is_faster_now_refutes_the_times_even_on_a_busy_machine(rows: int, share: float) -> None:
    timers = {Role.STEP: slower(STEP, {1: 2.0, 8: 2.0, rows: 0.5})}
    complaint = start_check(TIMES, timers, meter=meter_of(share))
    assert complaint is not None
    assert f"a step of {rows} row" in complaint


def test_the_complaint_has_both_times_of_the_step_that_differs_most() -> None:
    timers = {Role.STEP: slower(STEP, {1: 1.4, 8: 2.0})}
    then_ms = 1e3 * STEP.seconds_at(8, 2 * 60, 2 * (61 + 62 + 63))
    complaint = start_check(TIMES, timers, meter=meter_of(0.0))
    assert complaint == f"a step of 8 rows takes {2 * then_ms:.2f} ms now, {then_ms:.2f} ms in the file"


def test_a_slower_step_beside_other_processes_says_nothing_and_the_log_has_the_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timers = {Role.STEP: slower(STEP, {8: 2.0})}
    with caplog.at_level(logging.INFO, logger="faser.engine"):
        assert start_check(TIMES, timers, meter=meter_of(0.4)) is None
    (line,) = caplog.messages
    assert "keeping the cached step times: a step of 8 rows" in line
    assert "40 % of the cores" in line


def test_passes_are_checked_too() -> None:
    timers = {Role.STEP: slower(STEP, {}), Role.PASS: slower(PASS, {1: 0.4})}
    complaint = start_check(TIMES, timers, meter=meter_of(0.0))
    assert complaint is not None
    assert complaint.startswith("a pass of 1 row takes 0.8")


@pytest.mark.parametrize(
    ("rows", "seconds", "checked"),
    [
        ((1, 8, 32, 64), (0.01, 0.012, 0.04, 0.07), [1, 8, 32]),
        ((1, 8, 32), (0.02, 0.04, 0.2), [1, 8]),
        ((1, 8, 32), (0.9, 1.0, 2.0), [1]),
        ((1,), (0.01,), [1]),
        ((2, 3), (0.01, 0.01), [2]),
    ],
)
def test_only_what_takes_a_fraction_of_a_second_is_timed(
    rows: tuple[int, ...], seconds: tuple[float, ...], checked: list[int]
) -> None:
    asked: list[list[int]] = []
    table = CostTable(rows=rows, seconds=seconds)

    def seconds_now(row_counts: Sequence[int], budget_s: float) -> Mapping[BatchShape, float]:
        asked.append([*row_counts])
        assert budget_s < 0.5
        return slower(table, {})(row_counts, budget_s)

    assert start_check(StepTimes(tables={Role.STEP: table}), {Role.STEP: seconds_now}) is None
    assert asked == [checked]


def test_a_file_without_the_times_of_a_role_is_refuted() -> None:
    kept = StepTimes(tables={Role.STEP: STEP})
    timers = {Role.STEP: slower(STEP, {}), Role.PASS: slower(PASS, {})}
    assert start_check(kept, timers, meter=meter_of(0.0)) == "it has no times of role pass"


def test_times_of_zero_are_refuted() -> None:
    kept = StepTimes(tables={Role.STEP: CostTable(rows=(1, 8), seconds=(0.0, 0.0))})
    complaint = start_check(kept, {Role.STEP: slower(STEP, {})}, meter=meter_of(0.0))
    assert complaint is not None
    assert "0.00 ms in the file" in complaint
