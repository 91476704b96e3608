"""The first half hour runs where only the packages of a lent machine can be imported."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu.archive import read_records
from benchmarks.gpu.phases import PHASES, RUNS
from benchmarks.gpu.travel.bundle import CARRIED
from benchmarks.gpu.travel.rehearsal import (
    Limits,
    Reply,
    StubDevice,
    command_of,
    known_packages,
    problems_of,
    problems_of_flashinfer,
)

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> StubDevice:
    """With what a bundle brings."""
    packages = (*known_packages(), *CARRIED)
    return StubDevice(tmp_path_factory.mktemp("lent") / "device", ROOT, Limits(seconds=120.0), packages)


@pytest.mark.slow
def test_every_phase_of_both_runs_can_be_imported_there(device: StubDevice) -> None:
    """Planted: msgspec imported by a module that engines need."""
    modules = {phase.run[0] for phase in PHASES if any(phase.name in run.seconds for run in RUNS.values())}
    reply = device.run(f"python3 -c 'import {', '.join(sorted(modules))}'")
    assert reply.status == 0, reply.output_tail


@pytest.mark.slow
def test_a_call_measures_and_its_archive_comes_back(device: StubDevice) -> None:
    day = "python3 benchmarks/gpu/travel/day.py a --home $HOME/faser-lent --archive $OUT/a.tar.gz --dry-run"
    reply = device.run(f"{day} --budget-s 25 --commit abc")
    assert reply.status is not None, reply.output_tail
    assert reply.left_out == ()
    _, records = read_records(reply.files / "a.tar.gz")
    assert set(records) == set(RUNS["a"].seconds)
    assert records["environment"].complete, records["environment"].error
    assert records["environment"].result["commit"] == "abc"
    assert [
        name for name, record in records.items() if not (record.complete or record.skipped or record.error)
    ] == []


def test_what_travels_as_wheels_has_the_versions_that_are_tested() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0]: line.partition(" ")[0] for line in constraints if "==" in line}
    for requirement in CARRIED.values():
        name = requirement.partition("==")[0]
        assert pinned.get(name, requirement) == requirement


def test_what_is_missing_after_a_run_is_named(tmp_path: Path) -> None:
    reply = Reply(status=None, seconds=600.0, output_tail="", files=tmp_path, left_out=("x (more than 8 files)",))
    assert problems_of("a", reply) == [
        "run a: x (more than 8 files) did not come back",
        "run a was killed after 600 s",
        "run a left no archive",
    ]


def test_a_command_fits_into_a_call() -> None:
    assert len(command_of("b", Path("load"), 480.0)) < 2000


def test_flashinfer_has_to_come_from_the_load(tmp_path: Path) -> None:
    """Planted: the package of this machine, imported because the load's one is not whole."""

    def said(status: int, tail: str) -> list[str]:
        reply = Reply(status=status, seconds=1.0, output_tail=tail, files=tmp_path, left_out=())
        return problems_of_flashinfer(reply)

    def package(folder: str) -> str:
        return json.dumps({"package": f"{folder}/flashinfer/__init__.py", "prefill_64": 0.1})

    assert said(0, f"noise\n{package('/home/user/faser-lent/packages')}\n") == []
    assert said(0, package("/usr/lib")) == ["FlashInfer was imported from /usr/lib/flashinfer/__init__.py"]
    assert said(1, "a\nNo module named 'flashinfer.data'\n") == [
        "FlashInfer of the load: No module named 'flashinfer.data'"
    ]
