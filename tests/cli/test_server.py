"""Signals, draining and exit statuses, of a real process with a scripted engine."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from faser.cli.server import SAME_S
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


@contextmanager
def server(
    fate: str,
    shutdown_timeout_s: float = 5.0,
    *,
    stderr: int = subprocess.PIPE,
    before: Callable[[], object] | None = None,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running small_server and its URL; killed at the end if it still lives. before: called in its process."""
    command = [sys.executable, "-m", "tests.cli.small_server", fate, str(shutdown_timeout_s)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True, preexec_fn=before
    )
    watchdog = threading.Timer(30, process.kill)
    watchdog.start()
    try:
        yield process, f"http://127.0.0.1:{line(process)}"
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ask(url: str, answers: list[str]) -> threading.Thread:
    def run() -> None:
        try:
            answers.append(httpx.get(url, timeout=PATIENCE_S).text)
        except httpx.HTTPError as error:
            answers.append(type(error).__name__)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.full(but=("15",))
def test_a_signal_lets_running_requests_finish_and_ends_with_status_0(number: signal.Signals) -> None:
    answers: list[str] = []
    with server("ready") as (process, url):
        assert line(process) == "ready"
        asking = ask(url, answers)
        assert line(process) == "asked"
        process.send_signal(number)
        asking.join()
        assert answers == ["ok"]
        assert [line(process), line(process)] == ["drained, 0 left", "stopped"]
        assert process.wait(PATIENCE_S) == 0


def test_a_signal_ends_a_server_whose_log_nothing_reads_any_more() -> None:
    with server("ready") as (process, _):
        assert line(process) == "ready"
        assert process.stderr is not None
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        assert [line(process), line(process)] == ["drained, 0 left", "stopped"]
        process.wait(PATIENCE_S)


def test_requests_that_outlast_the_timeout_do_not_hold_the_server_up() -> None:
    answers: list[str] = []
    with server("ready", 0) as (process, url):
        assert line(process) == "ready"
        asking = ask(url, answers)
        assert line(process) == "asked"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "drained, 1 left"
        assert process.wait(PATIENCE_S) == 0
        asking.join()


@pytest.mark.parametrize(
    "first, second",
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGINT),
        (signal.SIGINT, signal.SIGTERM),
    ],
)
@pytest.mark.full(but=("2-2",))
def test_a_second_signal_quits_at_once(first: signal.Signals, second: signal.Signals) -> None:
    with server("slow", 60) as (process, url):
        assert line(process) == "ready"
        asking = ask(url, [])
        assert line(process) == "asked"
        process.send_signal(first)
        assert process.stderr is not None
        assert "finishing running requests" in process.stderr.readline()
        time.sleep(2 * SAME_S)
        process.send_signal(second)
        assert process.wait(PATIENCE_S) == 128 + second
        asking.join()


def test_a_signal_that_comes_twice_at_once_is_one_and_hangups_end_nothing() -> None:
    """timeout(1) signals its program, then the group; a shell and the kernel both say that a terminal closed."""
    answers: list[str] = []
    with server("ready", 60) as (process, url):
        assert line(process) == "ready"
        asking = ask(url, answers)
        assert line(process) == "asked"
        process.send_signal(signal.SIGHUP)
        time.sleep(2 * SAME_S)
        process.send_signal(signal.SIGHUP)
        time.sleep(2 * SAME_S)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # another number: two pending SIGTERMs may be one
        asking.join()
        assert answers == ["ok"]
        assert [line(process), line(process)] == ["drained, 0 left", "stopped"]
        assert process.wait(PATIENCE_S) == 0


def test_a_closed_terminal_lets_running_requests_finish() -> None:
    answers: list[str] = []
    master, terminal = os.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    with server("ready", stderr=terminal, before=take_terminal) as (process, url):
        os.close(terminal)
        assert line(process) == "ready"
        asking = ask(url, answers)
        assert line(process) == "asked"
        os.close(master)
        asking.join()
        assert answers == ["ok"]
        assert [line(process), line(process)] == ["drained, 0 left", "stopped"]
        process.wait(PATIENCE_S)


@pytest.mark.full
def test_nohup_keeps_a_server_through_the_end_of_its_terminal() -> None:
    with server("ready", before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as (process, url):
        assert line(process) == "ready"
        process.send_signal(signal.SIGHUP)
        assert httpx.get(url, timeout=PATIENCE_S).text == "ok"
        assert line(process) == "asked"
        process.send_signal(signal.SIGTERM)
        assert [line(process), line(process)] == ["drained, 0 left", "stopped"]
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
@pytest.mark.parametrize("fate, ends", [("fetching", ["cancelled"]), ("loading", ["drained, 0 left", "stopped"])])
@pytest.mark.full(but=("loading-ends1-15-0",))
def test_before_it_is_ready_http_answers_and_a_signal_ends_the_server_at_once(
    number: signal.Signals, status: int, fate: str, ends: list[str]
) -> None:
    with server(fate, 60) as (process, url):
        assert httpx.get(url, timeout=PATIENCE_S).text == "ok"
        assert line(process) == "asked"
        began_s = time.monotonic()
        process.send_signal(number)
        assert [line(process) for _ in ends] == ends
        _, said = process.communicate(timeout=PATIENCE_S)
        assert time.monotonic() - began_s < PATIENCE_S  # requests would be given 60
        assert process.returncode == status
        assert said == "faser serve: stopped before it was ready\n"


@pytest.mark.full
def test_a_fetch_that_fails_ends_the_server_with_its_reason() -> None:
    with server("bad-fetch") as (process, _):
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert errors.strip() == "there is no network"


@pytest.mark.parametrize(
    "fate, reason", [("bad-config", "the model has no layers"), ("bad-engine", "the engine died")]
)
@pytest.mark.full(but=("bad-config-the model has no layers",))
def test_an_engine_that_cannot_load_ends_the_server_with_its_reason(fate: str, reason: str) -> None:
    with server(fate) as (process, _):
        assert line(process) == "stopped"
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert errors.strip().endswith(reason)


@pytest.mark.full
def test_an_engine_that_ends_for_good_ends_the_server_with_its_reason_and_status_1() -> None:
    with server("dying") as (process, _):
        assert [line(process), line(process), line(process)] == ["ready", "drained, 0 left", "stopped"]
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert errors.strip().endswith("the engine died (signal 9)")
