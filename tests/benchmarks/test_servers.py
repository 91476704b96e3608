"""Real processes: a small HTTP server with a child that keeps a core busy in a session of its own."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.servers import Recipe, Server, ServerError, free_port, paid_ratios
from tests.waiting import until

_SPIN = "while True: pass"
_STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
_SERVE = """
import http.server, signal, subprocess, sys

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by itself"))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def _recipe(log_path: Path, program: str, child: str = _SPIN) -> Recipe:
    port = free_port()
    return Recipe(
        name="small",
        command=(sys.executable, "-c", program, str(port), child),
        environment={"GREETING": "hello"},
        base_url=f"http://127.0.0.1:{port}",
        log_path=log_path,
    )


@pytest.fixture
def spinning(tmp_path: Path) -> Iterator[Server]:
    with Server(_recipe(tmp_path / "log", _SERVE), grace_s=0.5) as server:
        server.wait_until_healthy(20)
        yield server


def test_a_frozen_server_and_its_children_use_no_processor_until_they_are_thawed(spinning: Server) -> None:
    spinning.freeze()
    before_s = spinning.cpu_s()
    time.sleep(0.3)
    assert spinning.cpu_s() - before_s <= 0.02

    spinning.thaw()
    until(lambda: spinning.cpu_s() - before_s > 0.05)
    spinning.wait_until_healthy(20)


@pytest.mark.parametrize("child", [_SPIN, _STUBBORN])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.full(but=(f"True-{_SPIN}", f"False-{_STUBBORN}"))
def test_no_process_is_left_after_a_server_frozen_or_not(tmp_path: Path, child: str, frozen: bool) -> None:
    before = psutil.Process().children(recursive=True)
    with Server(_recipe(tmp_path / "log", _SERVE, child), grace_s=0.5) as server:
        server.wait_until_healthy(20)
        family = [each for each in psutil.Process().children(recursive=True) if each not in before]
        assert len(family) == 2
        if frozen:
            server.freeze()

    assert not [process for process in family if process.is_running()]
    assert "ended by itself" in (tmp_path / "log").read_text()


def test_a_server_that_ends_while_starting_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    program = "import os; raise SystemExit('no weights, ' + os.environ['GREETING'])"
    server = Server(_recipe(tmp_path / "log", program))

    with server, pytest.raises(ServerError, match=r"(?s)small ended while starting.*no weights, hello"):
        server.wait_until_healthy(20)


def test_a_server_that_never_listens_is_an_error_after_the_time_it_was_given(tmp_path: Path) -> None:
    server = Server(_recipe(tmp_path / "log", "import time; time.sleep(60)"), grace_s=0.5)

    with server, pytest.raises(ServerError, match=r"not healthy after 0\.4 s"):
        server.wait_until_healthy(0.4)


def test_what_drafts_bring_is_read_from_the_metrics() -> None:
    page = "\n".join(
        f'faser_spec_paid_ratio{{bound="{bound}",engine="0",model_name="m",sequences="4-7"}} {value}'
        for bound, value in (("low", 0.95171), ("mean", 1.0), ("high", 1.0312))
    )
    assert paid_ratios(f"# TYPE faser_spec_paid_ratio gauge\n{page}\nother 1\n") == {
        "4-7": {"low": 0.952, "mean": 1.0, "high": 1.031}
    }
    assert paid_ratios("other 1\n") == {}
