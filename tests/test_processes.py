"""Helper programs end with their children when they are cancelled, whatever cancels them."""

import os
import signal
import time
from pathlib import Path

import pytest

from faser.processes import exit_on_sigterm, run_all_watched, run_watched
from tests.waiting import PATIENCE_S, has_ended


class Enough(Exception):
    pass


def test_what_a_program_says_and_its_status_come_back() -> None:
    ended = run_watched(["sh", "-c", "echo out; echo err >&2; exit 3"], lambda _: None)
    assert (ended.status, ended.stdout, ended.stderr) == (3, "out\n", "err\n")


def test_the_watcher_sees_what_was_said_so_far() -> None:
    seen: list[str] = []
    ended = run_watched(["sh", "-c", "echo one; sleep 0.5; echo two"], seen.append)
    assert "one\n" in seen
    assert ended.stdout == "one\ntwo\n"


def test_the_environment_is_the_given_one() -> None:
    ended = run_watched(["/bin/sh", "-c", "echo $WORD"], lambda _: None, environment={"WORD": "given"})
    assert ended.stdout == "given\n"


@pytest.mark.parametrize("ignores", ["", "trap '' TERM; "])
def test_an_exception_of_the_watcher_ends_the_program_and_its_children(tmp_path: Path, ignores: str) -> None:
    script = f"{ignores}sleep 60 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/own; wait; sleep 60"

    def watch(_: str) -> None:
        if (tmp_path / "own").exists():
            raise Enough

    began_s = time.monotonic()
    with pytest.raises(Enough):
        run_watched(["sh", "-c", script], watch)
    assert time.monotonic() - began_s < PATIENCE_S
    for name in ("child", "own"):
        assert has_ended(int((tmp_path / name).read_text()))


def test_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run_watched(["true"], lambda _: None)
    assert len(os.listdir("/proc/self/fd")) == before


def test_several_programs_run_at_once_and_no_more_than_allowed(tmp_path: Path) -> None:
    """Every program notes how many run while it does."""
    script = f"touch {tmp_path}/$0; sleep 0.2; ls {tmp_path} | wc -l; rm {tmp_path}/$0"
    commands = [["sh", "-c", script, str(number)] for number in range(5)]
    ended = run_all_watched(commands, lambda: None, at_once=2)
    assert [each.status for each in ended] == [0] * 5
    running = [int(each.stdout) for each in ended]
    assert max(running) == 2


def test_after_a_program_that_fails_no_further_one_starts() -> None:
    commands = [["sh", "-c", f"echo {number}; exit {number}"] for number in (0, 3, 0, 0)]
    ended = run_all_watched(commands, lambda: None, at_once=1)
    assert [(each.status, each.stdout) for each in ended] == [(0, "0\n"), (3, "3\n")]


def test_an_exception_of_the_watcher_ends_all_programs(tmp_path: Path) -> None:
    def watch() -> None:
        if len(list(tmp_path.iterdir())) == 2:
            raise Enough

    commands = [["sh", "-c", f"echo $$ > {tmp_path}/{number}; sleep 60"] for number in range(2)]
    with pytest.raises(Enough):
        run_all_watched(commands, watch, at_once=2)
    assert all(has_ended(int(path.read_text())) for path in tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_helper_and_the_program_with_the_given_status(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A closed terminal reaches no helper: it has a process group of its own."""
    before, own = signal.getsignal(number), tmp_path / "own"

    def watch(_: str) -> None:
        if own.exists() and own.read_text():
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as raised, exit_on_sigterm(7):
        run_watched(["sh", "-c", f"echo $$ > {own}; sleep 60"], watch)
    assert raised.value.code == 7
    assert has_ended(int(own.read_text()))
    assert signal.getsignal(number) is before


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exit_on_sigterm(7):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
