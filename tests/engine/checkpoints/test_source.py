"""Names of models are resolved. The network is a fake."""

from pathlib import Path

import pytest

from faser.engine.checkpoints.downloads import ByteProgress
from faser.engine.checkpoints.source import cached, check_source, resolve, resolve_adapter
from faser.errors import ModelError
from tests.engine.checkpoints.gguf.gguf_files import write_gguf
from tests.engine.checkpoints.tiny_wheel import never, quiet


class FakeHub:
    """Stands for the network in resolve: hub ids are directories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[tuple[str, str | None]] = []
        self.patterns: list[tuple[str, ...]] = []
        self.offline = False

    def wheel(self, requirement: str, directory: Path, num_bytes: int, progress: ByteProgress) -> Path:
        return never(requirement, directory, num_bytes, progress)

    def snapshot(
        self, model_id: str, revision: str | None, patterns: tuple[str, ...], progress: ByteProgress
    ) -> Path:
        progress(3, 7)
        self.asked.append((model_id, revision))
        self.patterns.append(patterns)
        return self.root / model_id

    def names(self, model_id: str, revision: str | None) -> list[str]:
        if self.offline:
            raise ModelError(f"{model_id} could not be fetched")
        self.asked.append((model_id, revision))
        root = self.root / model_id
        return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]


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
    with pytest.raises(ModelError, match="a bundled model"):
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
    "name",
    [
        *("no/such/path", "./missing", "/missing/model", "missing.gguf", "owner/m.gguf", "x", "llama3:8b"),
        *("https://example.com/owner/name", "owner/name:", "owner/name:Q4_0:Q8_0"),
    ],
)
def test_a_name_that_is_neither_path_nor_id_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(name, tmp_path, progress=quiet, downloads=FakeHub(tmp_path))
    assert str(caught.value) == f"{name!r} is neither a local path nor a hub id (owner/name or owner/name:Q4_K_M)"


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
    with pytest.raises(ModelError, match="neither a local path nor a hub id"):
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


@pytest.fixture
def gguf_hub(tmp_path: Path) -> FakeHub:
    """A hub whose only repository, o/r, has two GGUF models, one of them in parts, and an encoder of images."""
    directory = tmp_path / "o" / "r"
    (directory / "Q8_0").mkdir(parents=True)
    write_gguf(directory / "m-Q4_K_M.gguf")
    write_gguf(directory / "Q8_0" / "m-Q8_0.gguf", tensors_a_part=12)
    write_gguf(directory / "mmproj-F16.gguf")
    return FakeHub(tmp_path)


@pytest.mark.parametrize("prefix", ["", "hf.co/", "huggingface.co/", "https://huggingface.co/", "https://hf.co/"])
def test_a_tag_fetches_the_files_of_one_quantization(tmp_path: Path, gguf_hub: FakeHub, prefix: str) -> None:
    parts = tuple(f"Q8_0/m-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2))
    found = resolve(f"{prefix}o/r:q8_0", tmp_path, revision="v1", progress=quiet, downloads=gguf_hub)
    assert found == tmp_path / "o" / "r" / parts[0]
    assert gguf_hub.patterns == [parts]
    assert gguf_hub.asked == [("o/r", "v1")] * 2


def test_a_repository_of_gguf_files_alone_gives_the_usual_quantization(tmp_path: Path, gguf_hub: FakeHub) -> None:
    found = resolve("https://huggingface.co/o/r/", tmp_path, progress=quiet, downloads=gguf_hub)
    assert found == tmp_path / "o" / "r" / "m-Q4_K_M.gguf"
    assert gguf_hub.patterns[1:] == [("m-Q4_K_M.gguf",)]


def test_a_tag_that_the_repository_lacks_fetches_nothing(tmp_path: Path, gguf_hub: FakeHub) -> None:
    with pytest.raises(ModelError, match="o/r has no GGUF file of Q2_K; it has Q8_0, Q4_K_M"):
        resolve("o/r:Q2_K", tmp_path, progress=quiet, downloads=gguf_hub)
    assert gguf_hub.patterns == []


def test_a_folder_with_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m-Q8_0.gguf", tensors_a_part=12)
    write_gguf(tmp_path / "mmproj-F16.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert check_source(str(tmp_path), None) == tmp_path / "m-Q8_0-00001-of-00002.gguf"
    write_gguf(tmp_path / "m-Q4_K_M.gguf")
    with pytest.raises(ModelError) as caught:
        check_source(str(tmp_path), None)
    assert str(caught.value) == (
        f"{tmp_path} has 2 GGUF models (m-Q4_K_M.gguf, m-Q8_0-00001-of-00002.gguf); name one of these files: "
        f"{tmp_path}/m-Q4_K_M.gguf"
    )
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert check_source(str(tmp_path), None) == tmp_path


def test_a_folder_without_the_first_part_of_its_model_is_told_which_one_it_lacks(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tensors_a_part=12)
    first = tmp_path / "m-00001-of-00002.gguf"
    first.unlink()
    with pytest.raises(ModelError) as caught:
        check_source(str(tmp_path), None)
    assert str(caught.value) == f"{first} is missing; put all parts of the model into one folder"


def test_without_network_the_hubs_cache_serves_a_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--o--r"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    write_gguf(snapshot / "m-Q8_0.gguf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub = FakeHub(tmp_path)
    hub.offline = True
    for name in ("o/r:Q8_0", "hf.co/o/r"):
        assert cached(name, tmp_path) == snapshot / "m-Q8_0.gguf"
    assert resolve("o/r:Q8_0", tmp_path, progress=quiet, downloads=hub) == snapshot / "m-Q8_0.gguf"
    with pytest.raises(ModelError, match="o/r has no GGUF file of Q4_0; it has Q8_0"):
        cached("o/r:Q4_0", tmp_path)
    with pytest.raises(ModelError, match="could not be fetched"):
        resolve("o/r:Q4_0", tmp_path, progress=quiet, downloads=hub)


def test_adapters_are_local_paths_or_hub_ids(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    folder = tmp_path / "adapter"
    folder.mkdir()
    assert resolve_adapter(str(folder), progress=quiet, downloads=hub) == folder
    assert hub.asked == []
    assert resolve_adapter("owner/adapter", progress=quiet, downloads=hub) == tmp_path / "owner" / "adapter"
    assert hub.patterns == [("adapter_config.json", "adapter_model.safetensors")]
    for name in ("no/such/path", "adapter-that-is-not-here", "owner/adapter:Q8_0"):
        with pytest.raises(ModelError, match=f"{name}' is neither a local path nor a hub id"):
            resolve_adapter(name, progress=quiet, downloads=hub)
