"""Names of models are resolved. The network is a fake."""

from pathlib import Path

import pytest

from faser.engine.checkpoints.downloads import ByteProgress
from faser.engine.checkpoints.source import check_source, resolve
from faser.errors import ModelError
from tests.engine.checkpoints.gguf.gguf_files import write_gguf
from tests.engine.checkpoints.tiny_wheel import never, quiet


class FakeHub:
    """Stands for the network in resolve: hub ids are directories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[tuple[str, str | None]] = []

    def wheel(self, requirement: str, directory: Path, num_bytes: int, progress: ByteProgress) -> Path:
        return never(requirement, directory, num_bytes, progress)

    def snapshot(
        self, model_id: str, revision: str | None, patterns: tuple[str, ...], progress: ByteProgress
    ) -> Path:
        assert "tokenizer.json" in patterns
        progress(3, 7)
        self.asked.append((model_id, revision))
        return self.root / model_id


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


def test_a_fetch_from_the_hub_reports_its_bytes_and_its_end(tmp_path: Path) -> None:
    directory = tmp_path / "owner" / "name"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    reports: list[tuple[str, int, int]] = []
    resolve(
        "owner/name",
        tmp_path,
        progress=lambda stage, done, total: reports.append((stage, done, total)),
        downloads=FakeHub(tmp_path),
    )
    assert reports == [("fetching owner/name", 3, 7), ("fetching owner/name", 1, 1)]


def test_what_needs_no_network_is_known_without_one(tmp_path: Path) -> None:
    assert check_source(None, None) is None
    assert check_source("owner/name", "v1") is None
    write_gguf(tmp_path / "m.gguf")
    assert check_source(str(tmp_path / "m.gguf"), None) == tmp_path / "m.gguf"
    with pytest.raises(ModelError, match="does not exist"):
        check_source("./missing", None)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "m.gguf"])
def test_a_git_lfs_pointer_is_called_one(tmp_path: Path, name: str) -> None:
    for each in ("config.json", "model.safetensors", "tokenizer.json", "m.gguf"):
        (tmp_path / each).write_text("{}")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 269060552\n")
    model = tmp_path / name if name.endswith(".gguf") else tmp_path
    with pytest.raises(ModelError) as caught:
        resolve(str(model), tmp_path, progress=quiet)
    assert str(caught.value) == (
        f"{tmp_path / name} is a Git LFS pointer, not the file; run git lfs pull in its folder"
    )
