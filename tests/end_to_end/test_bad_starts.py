"""What a server cannot start with: one line that names it, exit status 2, and no process left."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.server import run_to_end


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    copy = tmp_path / "broken-model"
    shutil.copytree(tiny_checkpoint, copy)
    return copy


def complaint(model: Path | str, folder: Path, *flags: str) -> str:
    """The last line of a server that ends with status 2. No trace of Python is shown to an operator."""
    status, log = run_to_end(model, folder, *flags)
    assert status == 2, log
    assert "Traceback" not in log
    lines = [line for line in log.splitlines() if line.startswith("faser serve: ")]
    assert len(lines) == 1, log
    return lines[0]


def truncate_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def truncate_header(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def break_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": "1.0", "model": ')


def enlarge_tokenizer(model: Path) -> None:
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append(
        {
            "id": 700,
            "content": "<|beyond|>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    )
    path.write_text(json.dumps(content))


def break_config(model: Path) -> None:
    (model / "config.json").write_text("{")


def forget_a_tensor(model: Path) -> None:
    path = model / "config.json"
    content = json.loads(path.read_text()) | {"num_hidden_layers": 3}
    path.write_text(json.dumps(content))


def change_architecture(model: Path) -> None:
    path = model / "config.json"
    content = json.loads(path.read_text()) | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    path.write_text(json.dumps(content))


def break_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for message in messages %}")


@pytest.mark.parametrize(
    "damage, words",
    [
        (truncate_weights, "model.safetensors"),
        (truncate_header, "model.safetensors"),
        (break_tokenizer, "tokenizer.json is not a usable tokenizer"),
        (enlarge_tokenizer, "513"),
        (break_config, "config.json"),
        (forget_a_tensor, "model.layers.2."),
        (change_architecture, "Mamba"),
        (break_template, "the chat template does not compile: line 1"),
    ],
)
def test_a_broken_checkpoint_is_named(
    checkpoint: Path, folder: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(checkpoint)
    assert words in complaint(checkpoint, folder)


def test_a_model_that_does_not_exist_is_named(folder: Path) -> None:
    assert complaint("/no/such/model", folder).startswith("faser serve: /no/such/model does not exist")


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path: Path, folder: Path) -> None:
    assert complaint(tmp_path, folder) == f"faser serve: {tmp_path} has no config.json; it is not a checkpoint"


def test_a_port_in_use_is_named_before_the_model_is_loaded(tiny_checkpoint: Path, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = complaint(tiny_checkpoint, folder, "--port", str(port))
    assert line == f"faser serve: --port is {port}; 127.0.0.1:{port} cannot be used: Address already in use"


def test_a_cache_too_small_for_the_context_is_told_with_both_sizes(tiny_checkpoint: Path, folder: Path) -> None:
    line = complaint(tiny_checkpoint, folder, "--kv-cache-memory", "1MiB", "--max-model-len", "2048", "--block-size", "256")
    assert "--kv-cache-memory is 1048576 bytes" in line
