"""Files: written so that a reader never sees half of one; leftovers of killed writers; JSON that others wrote."""

import contextlib
import json
import os
import shutil
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
