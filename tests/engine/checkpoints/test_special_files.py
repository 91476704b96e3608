"""FIFOs, devices and sockets where a checkpoint has files: refused by name, and never opened."""

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faser.cli.models import report
from faser.engine.checkpoints.source import check_source
from faser.engine.execution.models.sources import SafetensorsSource
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ModelError

NAMES = (
    *(
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ),
    *("chat_template.jinja", "additional_chat_templates/tools.jinja", "model.safetensors", "extra.safetensors"),
    *("model.safetensors.index.json", "model.gguf", "pytorch_model.bin"),
)
HANGS_S = 20


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """A read of a FIFO without a writer waits for ever: end the test instead."""

    def give_up(*_: object) -> None:
        pytest.fail("it waits for a FIFO")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANGS_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def model(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint that loads."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "additional_chat_templates").mkdir()
    check_source(str(folder), None)
    return folder


def link_a_device(path: Path) -> None:
    path.symlink_to("/dev/null")


def bind_a_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{here}/{path.name}")  # a path of any length
    os.close(here)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [os.mkfifo, link_a_device, bind_a_socket])
def test_what_is_no_regular_file_is_named(make: Callable[[Path], None], name: str, model: Path) -> None:
    path = model / name
    path.unlink(missing_ok=True)
    make(path)
    wanted = f"{path} is a FIFO, a device or a socket; put a regular file in its place"
    for read in (lambda: check_source(str(model), None), lambda: load_tokenizer(model)):
        with pytest.raises(ModelError) as caught:
            read()
        assert str(caught.value) == wanted
    assert report(str(model)).problems == (wanted,)


def test_files_that_are_not_read_may_be_anything(model: Path) -> None:
    os.mkfifo(model / "log.fifo")
    (model / "gone.json").symlink_to(model / "nowhere")
    assert check_source(str(model), None) == model
    assert report(str(model)).problems == ()


def test_files_that_are_links_load_as_in_the_hubs_cache(model: Path, tmp_path: Path) -> None:
    for path in [path for path in model.iterdir() if path.is_file()]:
        path.symlink_to(path.rename(tmp_path / f"blob-{path.name}"))
    assert report(str(model)).problems == ()


@pytest.mark.parametrize("named", ["../other.safetensors", "/dev/zero", "parts/one.safetensors", "weights.fifo"])
def test_an_index_names_weights_beside_itself_alone(named: str, model: Path) -> None:
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "weights.fifo")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": named}}))
    with pytest.raises(ModelError, match=r"index\.json names .*; weights are \.safetensors files in the folder"):
        SafetensorsSource(model)
