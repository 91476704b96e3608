"""What a server cannot start with: one line that names it, exit status 2, and no process left."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.server import ROOT, START_TIMEOUT_S, Server, end, start


def truncate_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def break_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": "1.0", "model": ')


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
    break_config: "config.json",
    break_template: "the chat template does not compile: line 1",
    enlarge_tokenizer: "the tokenizer has 601 tokens, but the model's vocabulary has 512",
}


@pytest.fixture(scope="module")
def broken(
    tiny_checkpoint: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Callable[[Path], None], Server]]:
    """A server for each kind of damage. Started together: most of a start is waiting."""
    servers = {}
    for damage in DAMAGES:
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


def test_a_model_that_does_not_exist_is_named(folder: Path) -> None:
    line = refused(Path("/no/such/model"), folder)
    assert line == "faser serve: /no/such/model does not exist, and is no hub id of the form owner/name"


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path: Path, folder: Path) -> None:
    assert refused(tmp_path, folder) == f"faser serve: {tmp_path} has no config.json; it is not a checkpoint"


def test_a_port_in_use_is_named_before_the_model_is_loaded(tiny_checkpoint: Path, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(tiny_checkpoint, folder, "--port", str(port))
    assert line == f"faser serve: --port is {port}; 127.0.0.1:{port} cannot be used: Address already in use"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_too_small_for_the_model_is_told_in_bytes_and_stays_clean(small_disk: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "faser", "pull"],
        cwd=ROOT,
        env={"FASER_CACHE_DIR": str(small_disk), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "has 1,048,576 bytes free; installing SmolLM2-135M-Instruct needs 600,000,000" in ended.stderr
    assert not [path for path in small_disk.rglob("*") if path.is_file()]
