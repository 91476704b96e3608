"""Files: written so that a reader never sees half of one; leftovers of killed writers; JSON that others wrote."""

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_STALE_S = 3600.0  # longer than any writer goes without writing


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file in the folder of path, which takes the place of path at the end; an exception removes it instead.

    Several processes may write the same path: the last one to finish wins. Raises OSError.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".tmp")
    os.close(descriptor)
    try:
        yield Path(name)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def make_private_folder(path: Path) -> None:
    """Make a folder of this user's alone, if there is none. Raises OSError, also if others may write to it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = f"other users may write to it; name a folder of your own, such as {path / 'faser'}"
        raise PermissionError(errno.EACCES, reason, str(path))


def kept_secret(path: Path, num_bytes: int) -> bytes:
    """Return the random bytes in a file, which is written if it is missing or has another size. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        found = path.read_bytes()
        if len(found) == num_bytes:
            return found
    found = secrets.token_bytes(num_bytes)
    with replacing(path) as new:  # whose mode is 0600
        new.write_bytes(found)
    return found


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that comes from a file. Raises ValueError for text that is none, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_atomically(path: Path, text: str) -> None:
    """Make the folders of path where they are missing, and write text in UTF-8. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


def remove_stale(folder: Path, *patterns: str) -> None:
    """Remove temporary files and folders that match a pattern and that nothing has written to for an hour.

    A process that is killed leaves them. What cannot be removed stays.
    """
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        with contextlib.suppress(OSError):
            if time.time() - _last_write_s(path) < _STALE_S:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _last_write_s(path: Path) -> float:
    """Unix seconds of the last write to a file, or to anything in a folder. Raises OSError."""
    return max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
