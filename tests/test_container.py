"""The Dockerfile, as far as it can be tried without building it."""

import http.server
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from faser.cli.flags.sources import SETTINGS
from faser.config.server import ServerConfig

DOCKERFILE = (Path(__file__).parent.parent / "Dockerfile").read_text()


@pytest.mark.parametrize("status, healthy", [(200, True), (503, False)])
def test_the_health_check_passes_when_health_answers_200_only(status: int, healthy: bool) -> None:
    asked: list[str] = []

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Silent."""

    found = re.search(r"HEALTHCHECK .*\\\n\s*CMD (\[.*\])", DOCKERFILE)
    assert found is not None
    _, *arguments = json.loads(found[1])
    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        environment = {"FASER_PORT": str(server.server_port)}
        done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=False)
        thread.join()
    assert asked == ["/health"]
    assert (done.returncode == 0) is healthy


def test_it_runs_as_a_numbered_user_and_group_that_are_not_root() -> None:
    (last,) = re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last)


def test_every_variable_it_sets_for_faser_is_one_that_faser_reads() -> None:
    known = {each.variable for each in SETTINGS} | {"FASER_CACHE_DIR"}
    assert set(re.findall(r"\b(FASER_\w+)=", DOCKERFILE)) <= known


def test_it_stops_by_a_signal_that_drains_within_the_documented_grace_period() -> None:
    (number,) = re.findall(r"^STOPSIGNAL (.*)$", DOCKERFILE, re.MULTILINE)
    assert number == "SIGTERM"
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    documented = re.findall(r"docker stop --time (\d+)|--stop-timeout (\d+)|stop_grace_period: (\d+)s", readme)
    graces = [int(each) for found in documented for each in found if each]
    assert len(graces) == 3
    assert min(graces) > ServerConfig().shutdown_timeout


def test_the_exposed_port_is_the_one_it_serves_on() -> None:
    assert re.findall(r"FASER_PORT=(\d+)|EXPOSE (\d+)", DOCKERFILE) == [("8000", ""), ("", "8000")]


def test_the_default_model_lies_where_the_program_looks_and_no_volume_hides_it() -> None:
    (cache,) = re.findall(r"FASER_CACHE_DIR=(\S+) /opt/faser/bin/faser pull", DOCKERFILE)
    assert cache == "/opt/faser/share/faser"  # sys.prefix is /opt/faser
    volumes = re.findall(r"^VOLUME (.*)$", DOCKERFILE, re.MULTILINE)
    assert volumes == ["/data"]
