"""The Dockerfile, as far as it can be tried without building it."""

import http.server
import json
import re
import shutil
import ssl
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

import faser
from faser.config.server import ServerConfig
from faser.config.sources import SETTINGS
from tests.cli.certificates import ONE

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("status, healthy", [(200, True), (503, False)])
def test_the_health_check_passes_when_health_answers_200_only(
    status: int, healthy: bool, tls: bool, tmp_path: Path
) -> None:
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
    environment = {}
    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        environment["FASER_PORT"] = str(server.server_port)
        if tls:
            certificate, key = ONE.write(tmp_path)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            environment["FASER_SSL_CERTFILE"] = str(certificate)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
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
    page = (ROOT / "docs" / "start.md").read_text()
    documented = re.findall(r"docker stop --time (\d+)|--stop-timeout (\d+)|stop_grace_period: (\d+)s", page)
    graces = [int(each) for found in documented for each in found if each]
    assert len(graces) == 3
    assert min(graces) > ServerConfig().shutdown_timeout


def test_the_exposed_port_is_the_one_it_serves_on() -> None:
    assert re.findall(r"FASER_PORT=(\d+)|EXPOSE (\d+)", DOCKERFILE) == [("8000", ""), ("", "8000")]


def test_the_default_model_lies_where_the_program_looks_and_no_volume_hides_it() -> None:
    (cache,) = re.findall(r"FASER_CACHE_DIR=(\S+) /opt/faser/bin/faser pull", DOCKERFILE)
    # sys.prefix is /opt/faser
    assert f"COPY --from=build {cache} /opt/faser/share/faser\n" in DOCKERFILE
    volumes = re.findall(r"^VOLUME (.*)$", DOCKERFILE, re.MULTILINE)
    assert volumes == ["/data"]


def test_temporary_files_have_a_place_where_tmp_cannot_be_written() -> None:
    """Python's last choice is the current folder; downloads need one."""
    assert re.findall(r"^WORKDIR (.*)$", DOCKERFILE, re.MULTILINE)[-1] == "/data"


def test_what_changes_with_every_version_comes_last() -> None:
    copied = re.findall(r"^COPY --from=\w+ (\S+)", DOCKERFILE, re.MULTILINE)
    assert copied == ["/opt/faser", "/model", "/out"]
    assert DOCKERFILE.index("ARG REVISION") > DOCKERFILE.index("ENTRYPOINT")


def test_its_version_is_the_programs() -> None:
    assert re.findall(r"^ARG VERSION=(.*)$", DOCKERFILE, re.MULTILINE) == [faser.__version__]


def test_every_file_it_copies_is_in_the_context() -> None:
    """.dockerignore leaves everything out but what it names."""
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        path for line in re.findall(r"^COPY (?!--)(.*)$", DOCKERFILE, re.MULTILINE) for path in line.split()[:-1]
    ]
    assert [path for path in copied if not (ROOT / path).exists()] == []
    assert [path for path in copied if not any(path == each or path.startswith(f"{each}/") for each in kept)] == []


@pytest.mark.parametrize("extras", [(), ("cuda",)])
def test_an_image_installs_what_the_project_declares(extras: tuple[str, ...], tmp_path: Path) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    script = ROOT / "deploy" / "image" / "requirements.py"
    done = subprocess.run(
        [sys.executable, script, *extras], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    optional = [each for extra in extras for each in declared["optional-dependencies"][extra]]
    assert done.stdout.splitlines() == declared["dependencies"] + optional


def test_an_extra_that_there_is_not_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    script = ROOT / "deploy" / "image" / "requirements.py"
    done = subprocess.run(
        [sys.executable, script, "gpu"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "no extra gpu; it has cuda" in done.stderr


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("make deploy-tools installs it")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
