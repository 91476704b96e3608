"""A run ends in time whatever its phases do, and one that is killed leaves what it had done."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.archive import read_records
from benchmarks.gpu.phases import GRACE, GRACE_S, PHASES, RUNS, Phase, phases_of_run, run_all, time_of
from benchmarks.gpu.record import Folder, Record
from benchmarks.gpu.travel.day import BUDGETS_S
from tests.benchmarks.gpu.rehearsed_phases import NAMES
from tests.waiting import has_ended

ROOT = Path(__file__).parents[3]
START_S = 90.0  # of a machine, and transfers


@given(
    shares=st.lists(st.floats(0.0, 1.0, allow_subnormal=False), min_size=1, max_size=6),
    least_s=st.floats(0.0, 60.0),
    budget_s=st.floats(0.0, 600.0),
    slow=st.floats(0.0, 1.0, allow_subnormal=False),
)
def test_no_phase_passes_the_end_of_its_run_even_where_each_has_to_be_stopped(
    tmp_path_factory: pytest.TempPathFactory, shares: list[float], least_s: float, budget_s: float, slow: float
) -> None:
    """slow: of the time after which a phase is stopped from outside. Bug seen caught: the grace left out."""
    now = [0.0]

    def launch(phase: Phase, given_s: float) -> Record:
        assert given_s >= phase.least_s
        now[0] += slow * (GRACE * given_s + GRACE_S)
        return Record(phase=phase.name, dry_run=True, complete=True)

    phases = [
        Phase(name=f"p{place}", run=("", ""), share=share, least_s=least_s if share else 0.0, about="")
        for place, share in enumerate(shares)
    ]
    folder = Folder(tmp_path_factory.mktemp("run"), dry_run=True)
    records = run_all(phases, folder, budget_s, launch, lambda _: None, now=lambda: now[0])
    assert [each.phase for each in records] == [each.name for each in phases]
    assert all(each.complete or each.skipped for each in records)
    assert now[0] <= max(budget_s, 0.0) + 1e-6


def test_a_phase_for_which_too_little_is_left_is_skipped_and_the_record_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    phase = Phase(name="plain", run=("", ""), share=1.0, least_s=40.0, about="")

    def launch(phase: Phase, _given_s: float) -> Record:
        raise AssertionError(f"{phase.name} was to be skipped")

    folder = Folder(tmp_path, dry_run=True)
    (record,) = run_all([phase], folder, 60.0, launch, said.append, now=lambda: 0.0)
    assert record.skipped == "60 s of the run were left"
    assert record.state == "SKIPPED: 60 s of the run were left"
    assert said == ["plain: SKIPPED, 60 s of the run were left"]
    assert folder.load("plain") == record
    assert time_of(phase, [phase], GRACE * 40.0 + GRACE_S + 1e-6) == pytest.approx(40.0)


@pytest.mark.parametrize("name", RUNS)
def test_the_first_half_hour_gives_every_phase_the_time_that_it_needs(name: str, tmp_path: Path) -> None:
    """Within its budget, where each takes all that it is given: no less than is expected of it."""
    now, given_s, wanted = [0.0], {}, RUNS[name]

    def launch(phase: Phase, seconds: float) -> Record:
        given_s[phase.name] = seconds
        now[0] += seconds
        return Record(phase=phase.name, dry_run=False, complete=True)

    phases = phases_of_run(wanted)
    run_all(phases, Folder(tmp_path, dry_run=False), wanted.budget_s, launch, lambda _: None, now=lambda: now[0])
    assert set(given_s) == set(wanted.seconds)
    for phase in phases[:-1]:
        assert given_s[phase.name] >= wanted.seconds[phase.name], phase.name
    assert given_s[phases[-1].name] * GRACE + GRACE_S >= wanted.seconds[phases[-1].name]


def test_three_runs_with_their_starts_fit_into_half_an_hour_and_each_into_a_call() -> None:
    """The others are of another day. Planted: nine minutes for the third one."""
    assert sum(RUNS[name].budget_s + START_S for name in ("a", "b", "c")) <= 30 * 60
    assert all(run.budget_s + START_S <= 600 for run in RUNS.values())
    assert {name: run.budget_s for name, run in RUNS.items()} == BUDGETS_S


def test_behind_a_vital_phase_that_failed_nothing_is_begun(tmp_path: Path) -> None:
    """Planted: every phase started, to fail for the same reason."""
    launched = []

    def launch(phase: Phase, _given_s: float) -> Record:
        launched.append(phase.name)
        return Record(phase=phase.name, dry_run=True, error="No module named flashinfer")

    phases = [Phase(name=name, run=("", ""), share=0.5, about="", vital=name == "a") for name in ("a", "b")]
    records = run_all(phases, Folder(tmp_path, dry_run=True), 300.0, launch, lambda _: None, now=lambda: 0.0)
    assert launched == ["a"]
    assert records[1].skipped == "a failed"
    assert next(each for each in PHASES if each.vital).name == "environment"


def test_phases_have_names_of_their_own() -> None:
    assert len({each.name for each in PHASES}) == len(PHASES)


def started(folder: Path, *, stop_at: str = "") -> "subprocess.Popen[str]":
    """A run of the rehearsed phases. stop_at: the phase that waits there to be killed."""
    command = [sys.executable, "-m", "benchmarks.gpu", "run", str(folder), "--dry-run", "--run", "a"]
    command += ["--archive", str(folder / "a.tar.gz"), "--phases-of", "tests.benchmarks.gpu.rehearsed_phases"]
    environment = os.environ | {"FASER_TEST_STOP_AT": stop_at}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def killed(folder: Path, name: str) -> int:
    """Kill a run in this phase; the process of the phase."""
    mark = folder / f"{name}.pid"
    with started(folder, stop_at=name) as run:
        while not mark.exists():
            assert run.poll() is None
            time.sleep(0.05)
        run.kill()
    return int(mark.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.full(but=("environment",))
def test_a_run_that_is_killed_in_any_phase_leaves_an_archive_of_those_before_it(name: str, tmp_path: Path) -> None:
    """Bugs seen caught: packed at the end alone; a phase's process that outlives its run."""
    process = killed(tmp_path, name)
    filed = read_records(tmp_path / "a.tar.gz")
    assert all(each.about["run"]["run"] == "a" for each in filed.values())
    records = {phase: each.record for phase, each in filed.items()}
    before = NAMES[: NAMES.index(name)]
    assert [each for each in NAMES if each in records and records[each].complete] == list(before)
    for each in before:
        assert records[each].result == {"kept before": each, "kept at the end": each}
    assert has_ended(process)


@pytest.mark.slow
@pytest.mark.full
def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    killed(tmp_path, "plain")
    with started(tmp_path) as run:
        said, _ = run.communicate(timeout=60)
    assert run.returncode == 0, said
    assert "checks: there already" in said
    filed = read_records(tmp_path / "a.tar.gz")
    assert [filed[each].record.state for each in NAMES] == ["complete"] * len(NAMES)
