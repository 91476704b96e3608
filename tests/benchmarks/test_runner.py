"""Arms in turn, programs in two checkouts, busy processes, and what a result says about its origin."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.cells import Cell
from benchmarks.runner import (
    about,
    busy_cores,
    describe_machine,
    in_turn,
    interleaved,
    portable,
    run_program,
    timed_turns,
)
from tests.waiting import PATIENCE_S, until

_PARENT = """
import sys, time
from benchmarks.runner import busy_cores
with busy_cores(1):
    print("busy", flush=True)
    time.sleep(60)
"""


def test_every_other_round_goes_backwards() -> None:
    orders = [in_turn(["a", "b", "c"], number) for number in range(4)]

    assert orders[0] == orders[2] == ["c", "b", "a"]
    assert orders[1] == orders[3] == ["a", "b", "c"]


def test_a_program_runs_in_the_checkout_with_its_arguments_and_its_last_line_counts(tmp_path: Path) -> None:
    program = "import json, os, sys; print('loading'); print(json.dumps([os.getcwd(), *sys.argv[1:]]))"

    assert run_program(program, tmp_path, "1", "two") == [str(tmp_path), "1", "two"]
    with pytest.raises(subprocess.CalledProcessError):
        run_program("raise SystemExit(3)", tmp_path)


def test_every_arm_runs_in_every_setting_of_every_round() -> None:
    rounds: list[int] = []

    def after_round(cells: list[Cell[str]]) -> None:
        rounds.append(len(cells[0].runs["a"]))

    settings = [{"requests": 1}, {"requests": 4}]
    cells = interleaved(
        settings, ["a", "b"], 2, lambda each, arm, at: f"{each['requests']}{arm}{at}", after_round=after_round
    )

    assert [cell.runs for cell in cells] == [
        {"a": ["1a0", "1a1"], "b": ["1b0", "1b1"]},
        {"a": ["4a0", "4a1"], "b": ["4b0", "4b1"]},
    ]
    assert rounds == [1, 2]


def test_no_round_begins_that_would_end_after_the_time_for_all() -> None:
    def run(_: object, _arm: str, number: int) -> int:
        time.sleep(0.05)
        return number

    cells = interleaved([{}], ["a"], 9, run, seconds=0.12)

    assert cells[0].runs["a"] in ([0], [0, 1])
    assert interleaved([{}], ["a"], 9, run, seconds=0)[0].runs["a"] == [0]


def test_timed_turns_leave_the_first_round_out() -> None:
    calls: list[str] = []
    found = timed_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)

    assert calls == ["a", "b"] * 3
    assert [len(each) for each in found.values()] == [2, 2]


def test_a_command_in_a_result_names_files_without_their_folders() -> None:
    found = about("x", ["/data/question.jsonl", "--url", "http://127.0.0.1:1", "--arm", "a=--model /m"])

    assert found["command"] == (
        "python -m benchmarks x question.jsonl --url http://127.0.0.1:1 --arm 'a=--model /m'"
    )
    assert {"commit", "machine"} <= found.keys()


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_busy_processes_of_normal_priority_run_as_long_as_the_block_even_if_it_fails() -> None:
    before = _children()
    with contextlib.suppress(KeyError), busy_cores(2):
        busy = _children() - before
        assert len(busy) == 2
        assert {process.nice() for process in busy} == {psutil.Process().nice()}
        until(lambda: sum(process.cpu_times().user for process in busy) > 0)
        raise KeyError

    assert not [process for process in busy if process.is_running()]


def test_no_process_is_started_where_none_is_wanted() -> None:
    before = _children()
    with busy_cores(0):
        assert _children() == before


def test_a_busy_process_ends_by_itself_when_its_parent_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"busy\n"
        (busy,) = psutil.Process(parent.pid).children()
        parent.send_signal(signal.SIGKILL)
    busy.wait(PATIENCE_S)


def test_results_name_no_directories_of_the_machine_they_were_measured_on() -> None:
    text = f"--model {Path.home() / '.cache' / 'small'} --out {Path.cwd() / 'here'}"

    assert portable(text) == "--model ~/.cache/small --out ./here"


def test_the_machine_is_described_with_the_cores_that_were_used() -> None:
    found = describe_machine((1, 3))

    assert found["cores_used"] == [1, 3]
    assert found["cpu_model"]
    assert found["memory_bytes"] > 1 << 28
