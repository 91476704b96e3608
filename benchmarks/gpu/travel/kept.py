"""Folders that take long to make: kept from one bundle to the next, with digests of what they hold."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from faser.files import write_atomically

Say = Callable[[str], None]


def kept(folder: Path, made_of: str, make: Callable[[Path], None], say: Say) -> Path:
    """The folder; anew where it was made of something else, is not whole, or a file has changed since.

    make: fills a new folder beside it, which then takes its place.
    """
    stamp = folder.with_name(f"{folder.name}.json")
    if folder.is_dir() and stamp.exists():
        known = json.loads(stamp.read_text("utf-8"))
        if known == {"made_of": made_of, "sha256": digest_of(folder)}:
            say(f"{folder.name}: kept")
            return folder
        say(f"{folder.name}: is of {'other files' if known['made_of'] == made_of else 'something else'}")
    say(f"{folder.name}: is being made")
    stamp.unlink(missing_ok=True)
    beside = folder.with_name(f"{folder.name}.tmp")
    for each in (beside, folder):
        shutil.rmtree(each, ignore_errors=True)
    beside.mkdir(parents=True)
    make(beside)
    beside.rename(folder)
    write_atomically(stamp, json.dumps({"made_of": made_of, "sha256": digest_of(folder)}) + "\n")
    return folder


def digest_of(folder: Path) -> str:
    """Of all names and contents, but for byte code."""
    found = hashlib.sha256()
    for path in sorted(each for each in folder.rglob("*") if each.is_file() and each.suffix != ".pyc"):
        found.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
