"""Signals and deaths: running requests end well or with an error, nothing hangs, and no process survives."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.end_to_end.conftest import MODEL
from tests.end_to_end.server import Server, end, serving, start
from tests.waiting import until

PROMPT = "the quick brown fox"
SHORT, LONG = 200, 1500  # tokens of an answer
# Nobody drafts, so that no steps are measured at the start: that would be most of it.
_FAST_START = ("--speculative-policy", "off", "--served-model-name", MODEL)
RESTART_S = 60.0  # of an engine, on a machine that does other things too


@pytest.fixture(scope="module")
def fresh(tiny_checkpoint: Path, folder: Path, full: bool) -> Iterator[Iterator[Server]]:
    """Servers that answer, each to be used up by one test. Started together: most of a start is waiting."""
    flags = (*_FAST_START, "--shutdown-timeout")
    servers = [
        start(tiny_checkpoint, folder, *flags, timeout) for timeout in ("60", "0.2", *("25",) * (4 if full else 2))
    ]
    try:
        for each in servers:
            each.wait_ready()
        yield iter(servers)
    finally:
        for each in servers:
            end(each)


@pytest.fixture
def strict(tiny_checkpoint: Path, folder: Path) -> Iterator[Server]:
    """A server that starts its engine again once."""
    with serving(tiny_checkpoint, folder, *_FAST_START, "--engine-restarts", "1") as server:
        yield server


@pytest.fixture
def impatient(tiny_checkpoint: Path, folder: Path) -> Iterator[Server]:
    """A server that waits 5 seconds for a sign of life."""
    with serving(tiny_checkpoint, folder, *_FAST_START, "--engine-timeout", "5") as server:
        yield server


class Stream:
    """A long answer that a thread reads while a test does something to the server."""

    def __init__(self, server: Server, max_tokens: int) -> None:
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(server, max_tokens))
        self._thread.start()
        assert self._begun.wait(20)

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive(), "the stream hangs"

    def _read(self, server: Server, max_tokens: int) -> None:
        fields: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
        try:
            with server.client() as client:
                for chunk in client.completions.create(
                    model=MODEL, prompt=PROMPT, max_tokens=max_tokens, stream=True, extra_body=fields
                ):
                    choice: Any = chunk.choices[0]
                    self.num_tokens += len(choice.token_ids)
                    self.finish_reason = choice.finish_reason
                    self._begun.set()
        except (openai.APIError, httpx.HTTPError) as error:
            self.error = error
        finally:
            self._begun.set()


def asks(server: Server) -> httpx.Response:
    with server.http() as http:
        return http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})


def ready(server: Server) -> dict[str, Any]:
    with server.http() as http:
        answer: dict[str, Any] = http.get("/ready").json()
    return answer


def health(server: Server) -> int:
    with server.http() as http:
        return http.get("/health").status_code


def test_sigterm_lets_a_stream_finish_and_takes_nothing_new(fresh: Iterator[Server]) -> None:
    server = next(fresh)
    engine = server.engine_process()
    stream = Stream(server, SHORT)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: not ready(server)["ready"])
    assert ready(server)["reason"] == "draining"
    assert health(server) == 200
    refused = asks(server)
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) >= 1
    assert "draining" in refused.json()["error"]["message"]
    stream.join()
    assert (stream.num_tokens, stream.finish_reason, stream.error) == (SHORT, "length", None)
    assert server.wait_end() == 0
    assert not engine.is_running()


def test_what_does_not_finish_in_time_gets_an_error_and_the_exit_status_is_0(fresh: Iterator[Server]) -> None:
    server = next(fresh)
    stream = Stream(server, LONG)
    server.process.send_signal(signal.SIGTERM)
    stream.join()
    assert stream.num_tokens < LONG
    assert stream.finish_reason is None
    assert isinstance(stream.error, openai.APIError)
    assert "the server is shutting down; the request was not finished within" in str(stream.error)
    assert server.wait_end() == 0


def test_a_killed_engine_fails_what_runs_and_is_started_again(fresh: Iterator[Server]) -> None:
    server = next(fresh)
    stream = Stream(server, LONG)
    answers: list[httpx.Response] = []
    whole = threading.Thread(target=lambda: answers.append(_long_answer(server)))
    whole.start()
    until(lambda: server.metric("num_requests_running") == 2)
    server.engine_process().kill()
    stream.join()
    whole.join(10)
    assert isinstance(stream.error, openai.APIError)
    assert "signal 9" in str(stream.error)
    (answer,) = answers
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) >= 2  # a pause of a second, and a start
    assert "signal 9" in answer.json()["error"]["message"]
    assert (health(server), ready(server)["reason"]) == (200, "restarting")
    assert server.is_idle()
    refused = asks(server)
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) >= 1
    assert "restarting: the engine died (signal 9)" in refused.json()["error"]["message"]
    with server.http() as http:
        assert http.get("/v1/models").status_code == 200
    until(lambda: ready(server)["ready"], RESTART_S)
    assert asks(server).status_code == 200
    assert [line for line in server.log.splitlines() if line.startswith("ERROR")] == [
        "ERROR faser.engine: the engine died (signal 9); it is started again in 1 s "
        "(1 of 3 restarts within 10 minutes used)"
    ]
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0


@pytest.mark.full
def test_sigterm_while_the_engine_is_started_again_ends_the_server_with_status_0(fresh: Iterator[Server]) -> None:
    server = next(fresh)
    engine = server.engine_process()
    engine.kill()
    until(lambda: ready(server).get("reason") == "restarting")
    until(lambda: bool(psutil.Process(server.process.pid).children()) and _has_ended(engine), RESTART_S)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0
    assert _has_ended(engine)


def test_the_death_after_the_last_restart_ends_the_server_with_status_1(strict: Server) -> None:
    server = strict
    server.engine_process().kill()
    until(lambda: not ready(server)["ready"])
    until(lambda: ready(server)["ready"], RESTART_S)
    server.engine_process().kill()
    assert server.wait_end() == 1
    assert server.log.splitlines()[-1] == (
        "faser serve: the engine died (signal 9); it is not started again (1 of 1 restarts within 10 minutes used)"
    )


@pytest.mark.full
def test_a_hanging_engine_is_killed_and_started_again(impatient: Server) -> None:
    server = impatient
    stream = Stream(server, LONG)
    server.engine_process().suspend()
    stream.join()
    assert isinstance(stream.error, openai.APIError)
    assert "the engine hung: it was silent for 5 s and was killed" in str(stream.error)
    refused = asks(server)
    assert refused.status_code == 503
    assert "hung" in refused.json()["error"]["message"]
    until(lambda: ready(server)["ready"], RESTART_S)
    assert asks(server).status_code == 200


def _long_answer(server: Server) -> httpx.Response:
    with server.http() as http:
        body = {"prompt": PROMPT, "max_tokens": LONG, "ignore_eos": True}
        return http.post("/v1/completions", json=body)


def test_a_killed_front_end_leaves_no_engine_at_work(fresh: Iterator[Server]) -> None:
    server = next(fresh)
    engine = server.engine_process()
    stream = Stream(server, LONG)
    server.process.kill()
    stream.join()
    assert stream.error is not None
    until(lambda: _has_ended(engine))


@pytest.mark.full
def test_a_killed_front_end_leaves_no_idle_engine(fresh: Iterator[Server]) -> None:
    server = next(fresh)
    engine = server.engine_process()
    server.process.kill()
    until(lambda: _has_ended(engine))


def _has_ended(process: psutil.Process) -> bool:
    """Whether the process has ended; a zombie has."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_sigterm_ends_a_server_that_is_still_loading(tiny_checkpoint: Path, folder: Path) -> None:
    server = start(tiny_checkpoint, folder)
    try:
        until(lambda: "starting the engine" in server.log)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        assert " ready at " not in server.log
    finally:
        end(server)


def test_an_engine_killed_while_loading_ends_the_server_with_status_1(tiny_checkpoint: Path, folder: Path) -> None:
    server = start(tiny_checkpoint, folder)
    try:
        until(lambda: bool(psutil.Process(server.process.pid).children()))
        server.engine_process().kill()
        assert server.wait_end() == 1
        assert server.log.splitlines()[-1] == "faser serve: the engine died (signal 9)"
    finally:
        end(server)
