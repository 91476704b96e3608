"""One call to a lent machine: unpacks the load that came with it, and runs phases with what it brought.

    python3 benchmarks/gpu/travel/day.py a --load LOAD --archive $OUT/a.tar.gz

To be started from the root of the checkout that travelled. Loads unpack into one place, which a machine that is
still warm keeps for the next call: an archive that came in two loads is whole after the second. Imports nothing
but Python's own library, since that is all that is sure to be there. Other options go to
`python -m benchmarks.gpu run`.
"""

import argparse
import hashlib
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[3]
_MANIFEST = "manifest.json"
_HOME = Path(tempfile.gettempdir(), "faser-lent")  # the checkout's folder is overwritten by every call
_CHUNK_BYTES = 1 << 20
BUDGETS_S = {"a": 480.0, "b": 480.0, "c": 360.0}  # with three starts of a minute and a half, half an hour


def main(arguments: list[str]) -> int:
    """The status of the run; 1 where a load is damaged."""
    asked, others = parser().parse_known_args(arguments)
    began_s = time.monotonic()
    try:
        for load in asked.load:
            receive(load, asked.home)
        for name in unpack(asked.home):
            print(f"{name}: unpacked", flush=True)
    except (OSError, ValueError, lzma.LZMAError, tarfile.TarError) as error:
        sys.exit(f"the load cannot be used: {error}")
    if asked.run == "none":
        return 0
    left_s = (asked.budget_s or BUDGETS_S[asked.run]) - (time.monotonic() - began_s)
    command = [sys.executable, "-m", "benchmarks.gpu", "run", str(asked.home / "results")]
    command += ["--run", asked.run, "--budget-s", f"{left_s:.0f}", "--archive", str(asked.archive)]
    if (asked.home / "vllm").is_dir():
        command += ["--vllm", str(asked.home / "vllm")]
    return subprocess.run([*command, *others], cwd=_ROOT, env=environment(asked.home), check=False).returncode


def receive(load: Path, home: Path) -> None:
    """Copy the parts of a load, and check them. Raises ValueError for one that is damaged, OSError."""
    manifest = json.loads((load / _MANIFEST).read_text("utf-8"))
    digests = {each["name"]: each["sha256"] for parts in manifest["loads"].values() for each in parts}
    parts = home / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    if (known := parts / _MANIFEST).exists() and json.loads(known.read_text("utf-8")) != manifest:
        raise ValueError(f"{load} belongs to another bundle than the loads in {home}")
    shutil.copyfile(load / _MANIFEST, known)
    for part in sorted(load.glob("*.tar.xz.*")):
        with part.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digests.get(part.name):
                raise ValueError(f"{part.name} is damaged")
        shutil.copyfile(part, parts / part.name)


def unpack(home: Path) -> Iterator[str]:
    """Every archive all of whose parts are there, once; its name. Without loads there is nothing to do."""
    known = home / "parts" / _MANIFEST
    if not known.exists():
        return
    listed: dict[str, list[str]] = {}
    for parts in json.loads(known.read_text("utf-8"))["loads"].values():
        for each in parts:
            listed.setdefault(each["name"].partition(".")[0], []).append(each["name"])
    for name, parts in listed.items():
        files = [home / "parts" / part for part in sorted(parts)]
        done = home / "parts" / f"{name}.done"
        if done.exists() or not all(each.exists() for each in files):
            continue
        with (
            lzma.open(io.BufferedReader(_Joined(files))) as content,
            tarfile.open(fileobj=content, mode="r|") as packed,
        ):
            packed.extractall(home, filter="data")
        done.touch()
        yield name


class _Joined(io.RawIOBase):
    """The bytes of several files, one after the other."""

    def __init__(self, files: list[Path]) -> None:
        self._chunks = self._read(files)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """0: the end."""
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count

    def _read(self, files: list[Path]) -> Iterator[bytes]:
        for path in files:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk


def environment(home: Path) -> dict[str, str]:
    """With the packages and the compiled modules of the loads."""
    given: dict[str, Any] = dict(os.environ)
    paths = [str(_ROOT), str(home / "packages"), given.get("PYTHONPATH", "")]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "FASER_CACHE_DIR": str(home / "cache")}
    return {**given, **found, "PYTHONUNBUFFERED": "1"}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "day.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = made.add_argument
    add(
        "run",
        choices=(*BUDGETS_S, "none"),
        help="which phases (see RUNS in phases.py); none: only unpack",
    )
    add("--load", type=Path, action="append", default=[], metavar="DIR", help="a load of the bundle")
    add("--archive", type=Path, default=Path("results.tar.gz"), metavar="FILE", help="where the results go")
    add("--home", type=Path, default=_HOME, metavar="DIR", help=f"where loads are unpacked [{_HOME}]")
    add("--budget-s", type=float, help="seconds of this call, unpacking included [480; 360 for c]")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
