"""Writing files so that a reader never sees half of one."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


def write_atomically(path: Path, text: str) -> None:
    """Make the folders of path where they are missing, and write text in UTF-8. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")
