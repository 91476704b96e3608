"""What a server cannot start with: one line that names it, exit status 2, and no process left."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from faser.cli.main import main
from faser.machine import may_have_gpu
from tests.disks import filling_up, read_only
from tests.end_to_end.server import ROOT, START_TIMEOUT_S, Server, end, start


def truncate_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def break_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": "1.0", "model": ')


def pipe_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    os.mkfifo(model / "tokenizer.json")


def break_config(model: Path) -> None:
    (model / "config.json").write_text("{")


def break_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for message in messages %}")


def enlarge_tokenizer(model: Path) -> None:
    path = model / "tokenizer.json"
    content: dict[str, Any] = json.loads(path.read_text())
    content["model"]["vocab"]["beyond"] = 600
    path.write_text(json.dumps(content))


DAMAGES: dict[Callable[[Path], None], str] = {
    truncate_weights: "model.safetensors",
    break_tokenizer: "tokenizer.json is not a usable tokenizer",
    pipe_tokenizer: "tokenizer.json is a FIFO, a device or a socket; put a regular file in its place",
    break_config: "config.json",
    break_template: "the chat template does not compile: line 1",
    enlarge_tokenizer: "the tokenizer has 601 tokens, but the model's vocabulary has 512",
}


# One that the engine finds, and one that the front-end does; tests of checkpoints know all of them.
SHORT = (truncate_weights, pipe_tokenizer)


@pytest.fixture(scope="module")
def broken(
    tiny_checkpoint: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory, full: bool
) -> Iterator[dict[Callable[[Path], None], Server]]:
    """A server for each kind of damage. Started together: most of a start is waiting."""
    servers = {}
    for damage in DAMAGES if full else SHORT:
        model = tmp_path_factory.mktemp("damaged") / "model"
        shutil.copytree(tiny_checkpoint, model)
        damage(model)
        servers[damage] = start(model, folder)
    yield servers
    for each in servers.values():
        end(each)


def complaint(server: Server) -> str:
    """The line with which a server ends with status 2. No trace of Python is shown to an operator."""
    status = server.process.wait(START_TIMEOUT_S)
    assert status == 2, server.log
    assert "Traceback" not in server.log
    (line,) = [line for line in server.log.splitlines() if line.startswith("faser serve: ")]
    return line


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.full(but=[each.__name__ for each in SHORT])
def test_a_broken_checkpoint_is_named(
    broken: dict[Callable[[Path], None], Server], damage: Callable[[Path], None]
) -> None:
    assert DAMAGES[damage] in complaint(broken[damage])


def refused(model: Path, folder: Path, *flags: str) -> str:
    server = start(model, folder, *flags)
    try:
        return complaint(server)
    finally:
        end(server)


@pytest.mark.full
def test_a_model_that_does_not_exist_is_named(folder: Path) -> None:
    line = refused(Path("/no/such/model"), folder)
    assert (
        line
        == "faser serve: '/no/such/model' is neither a local path nor a hub id (owner/name or owner/name:Q4_K_M)"
    )


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path: Path, folder: Path) -> None:
    assert refused(tmp_path, folder) == f"faser serve: {tmp_path} has no config.json; it is not a checkpoint"


def test_a_port_in_use_is_named_before_the_model_is_loaded(tiny_checkpoint: Path, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(tiny_checkpoint, folder, "--port", str(port))
    assert line.startswith(
        f"faser serve: --port is {port}; 127.0.0.1:{port} cannot be used: Address already in use; "
    )


def pull(cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "faser", "pull"],
        cwd=ROOT,
        env={"FASER_CACHE_DIR": str(cache), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_disk_too_small_for_the_model_is_reported_and_stays_clean(tmp_path: Path) -> None:
    with filling_up(tmp_path / "disk", kib=1024) as disk:
        ended = pull(disk)
        assert ended.returncode == 2
        assert ended.stderr == (
            f"faser pull: {disk}/models has 1MiB free; installing SmolLM2-135M-Instruct needs 210MiB; the "
            f"variable FASER_CACHE_DIR names another folder\n"
        )
        assert not [path for path in disk.rglob("*") if path.is_file()]


def test_a_cache_that_is_read_only_is_one_line(tmp_path: Path) -> None:
    with read_only(tmp_path / "disk") as disk:
        ended = pull(disk)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"faser pull: {disk}/models cannot be written (Read-only file system); 210MiB are needed there; the "
        f"variable FASER_CACHE_DIR names another folder\n"
    )


@pytest.mark.skipif(may_have_gpu(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "flags, problem",
    [
        (["--device", "cuda"], "--device is cuda; this machine has no GPU"),
        (["--dtype", "half"], "--dtype is float16; it is not computed on a CPU; use bfloat16 or float32"),
        (["--quantization", "fp8"], "--quantization is fp8; no kernels for CPUs multiply 8-bit numbers; leave it"),
        (["--backend", "flashinfer"], "--backend is flashinfer; it computes on cuda, and the device is cpu"),
        (
            ["--backend", "torch", "--spec-partition", "sm"],
            "--spec-partition is sm, which divides a cuda device; the",
        ),
    ],
)
def test_what_needs_a_gpu_is_refused_before_a_model_is_looked_for(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/no/such/model", "--port", "0", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"faser serve: {problem}")
