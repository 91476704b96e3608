"""The start-up profile, on a tiny real model: what it measures, and what it keeps."""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.overlap.cores import Cores
from faser.engine.execution.overlap.partition import Serial
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.startup.step_times.interference_cells import InterferenceSetup
from faser.engine.execution.startup.step_times.profile import LANES_STAGE, cached_profile, fingerprint, profile
from faser.engine.execution.startup.step_times.step_profiler import STAGE, ProfileProgress, StepProfiler
from faser.engine.execution.startup.step_times.table_fit import ROW_COUNTS, DummyBatchLimits
from faser.kernels.interface.shapes import KvShape
from faser.kernels.torch.backend import TorchBackend
from faser.machine import BusyMeter, CoreUse, usable_cores
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
        num_layers=spec.num_layers,
        num_blocks=LIMITS.num_blocks,
        block_size=LIMITS.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=torch.float32,
    )
    return Runner(decoder, backend, shape)


def silent(stage: str, done: int, total: int) -> None:
    """Ignores progress."""


def test_every_row_count_that_a_step_can_have_is_measured(runner: Runner) -> None:
    times = profile(runner, None, LIMITS, progress=silent)
    table = times.tables[Role.STEP]
    assert table.rows == tuple(sorted(each for each in ROW_COUNTS if each <= LIMITS.max_rows))
    assert all(0 < each < 5 for each in table.seconds)
    assert Role.PASS not in times.tables
    assert times.tables[Role.TEXT].seconds_at(1) > 0


def test_a_draft_model_has_its_passes_measured(runner: Runner) -> None:
    times = profile(runner, runner, LIMITS, progress=silent)
    assert times.tables[Role.PASS].rows[0] == 1


def test_progress_reaches_the_end_and_never_goes_back(runner: Runner) -> None:
    seen: list[tuple[str, int, int]] = []
    profile(runner, runner, LIMITS, progress=lambda stage, done, total: seen.append((stage, done, total)))
    assert {stage for stage, _, _ in seen} == {STAGE}
    done = [each for _, each, _ in seen]
    assert done == sorted(done)
    assert seen[-1][1] == seen[-1][2]


def test_without_time_only_the_smallest_step_is_measured_and_the_log_says_so(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="faser.engine"):
        times = profile(runner, None, LIMITS, progress=silent, budget_s=0.0)
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
    table = profile(runner, None, limits, progress=silent).tables[Role.STEP]
    assert table.rows[-1] <= limits.max_rows


@pytest.fixture(scope="module")
def drafter(tiny_checkpoint: Path) -> Runner:
    """A runner with a backend of its own: both run at the same time."""
    return loaded(tiny_checkpoint)


@pytest.fixture
def setup() -> Iterator[InterferenceSetup]:
    if usable_cores() < 2:
        pytest.skip("needs two cores")
    lanes = Cores()
    yield InterferenceSetup(
        partition=lanes,
        target=TorchBackend("cpu"),
        draft=TorchBackend("cpu"),
        rows=(8, 2, 500),
        contexts=(16, 100),
        num_sequences=2,
        budget_s=6.0,
    )
    lanes.close()


@pytest.mark.alone
def test_lanes_are_measured_for_all_rows_and_contexts_that_fit(
    runner: Runner, drafter: Runner, setup: InterferenceSetup
) -> None:
    """With 8 rows at most, steps of 500 rows become steps of 8, which are measured once."""
    times = profile(runner, drafter, LIMITS, progress=silent, lanes=setup, budget_s=0.5)
    assert [each.share for each in times.interference] == list(setup.partition.shares())
    for each in times.interference:
        assert (each.rows, each.contexts) == ((2, 8), (16, 100))
        assert all(0.05 < factor < 100 for line in (*each.verify, *each.draft) for factor in line)
    assert StepTimes.from_json(times.to_json()) == times


@pytest.mark.alone  # beside other work the contexts left out are those that there is no time for
@pytest.mark.parametrize(
    ("num_blocks", "max_len", "wanted"),
    [(80, 200, (16, 100)), (80, 60, (16, 60)), (80, 20, (16,)), (5, 200, (16, 40)), (3, 200, (16,)), (1, 9, (9,))],
)
def test_contexts_are_as_long_as_the_cache_allows_for_all_sequences(
    runner: Runner,
    drafter: Runner,
    setup: InterferenceSetup,
    num_blocks: int,
    max_len: int,
    wanted: tuple[int, ...],
) -> None:
    """Two sequences, blocks of 16. Contexts that come out nearly alike are not measured twice."""
    limits = DummyBatchLimits(num_blocks=num_blocks, block_size=16, max_len=max_len, max_rows=8, max_logit_rows=3)
    times = profile(runner, drafter, limits, progress=silent, lanes=setup, budget_s=0.0)
    assert {each.contexts for each in times.interference} == {wanted}


def test_progress_of_lanes_follows_that_of_steps_to_its_own_end(
    runner: Runner, drafter: Runner, setup: InterferenceSetup
) -> None:
    seen: list[tuple[str, int, int]] = []
    profile(
        runner,
        drafter,
        LIMITS,
        progress=lambda stage, done, total: seen.append((stage, done, total)),
        lanes=setup,
        budget_s=0.0,
    )
    stages = [stage for stage, _, _ in seen]
    assert list(dict.fromkeys(stages)) == [STAGE, LANES_STAGE]
    done = [each for stage, each, _ in seen if stage == LANES_STAGE]
    assert done == sorted(done)
    assert seen[-1][1] == seen[-1][2] > 0


def test_lanes_that_run_in_turns_are_not_measured(
    runner: Runner, drafter: Runner, setup: InterferenceSetup
) -> None:
    serial = replace(setup, partition=Serial())
    assert profile(runner, drafter, LIMITS, progress=silent, lanes=serial, budget_s=0.0).interference == ()


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
        times = profile(runner, runner, LIMITS, progress=silent, budget_s=0.0, meter=meter)
        assert times.busy_share == pytest.approx(0.3)
        assert times.measured_at.endswith("UTC")


def test_a_few_steps_of_a_table_can_be_timed_again_quickly(runner: Runner) -> None:
    profiler = StepProfiler(runner, LIMITS)
    began_s = time.perf_counter()
    now = profiler.seconds_now([1, 8], 0.05)
    assert time.perf_counter() - began_s < 5
    assert [shape.rows for shape in now] == [1, 8]
    assert all(0 < each < 5 for each in now.values())


def test_every_key_and_value_that_a_timed_step_reads_was_written(tiny_checkpoint: Path) -> None:
    """Memory that was never written is one page of zeros, which is read faster than a cache in use."""
    runner = loaded(tiny_checkpoint)
    StepProfiler(runner, LIMITS).table(0.0, ProfileProgress(silent, 1))
    blocks_each = -(-LIMITS.longest // LIMITS.block_size)
    for stored in (runner._cache.keys, runner._cache.values):
        for first in range(0, LIMITS.num_sequences(LIMITS.longest) * blocks_each, blocks_each):
            tokens = stored[:, first : first + blocks_each].flatten(1, 2)[:, : LIMITS.longest]
            assert tokens.flatten(2).any(dim=2).all()


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
