"""One call on a machine without a network: unpacks the load, and runs phases with what it holds.

    python3 benchmarks/gpu/travel/day.py a --load LOAD --archive $OUT/a.tar.gz

To be started from the root of the checkout that travelled. The load unpacks into a place that a machine which is
still warm keeps for the next call. Imports nothing but Python's own library, since that is all that is sure to be
there. Other options go to `python -m benchmarks.gpu run`.
"""

import argparse
import hashlib
import json
import lzma
import os
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
_HOME = Path(tempfile.gettempdir(), "faser-gpu")  # the checkout's folder is overwritten by every call
BUDGETS_S = dict.fromkeys("abcde", 480.0)  # three of them, with starts of two minutes, are half an hour


def main(arguments: list[str]) -> int:
    """The status of the run; 1 where a load is damaged."""
    asked, others = parser().parse_known_args(arguments)
    began_s = time.monotonic()
    try:
        if asked.load is not None:
            for name in receive(asked.load, asked.home):
                print(f"{name}: unpacked", flush=True)
            share(asked.load, asked.home)
        settle(asked.home / "triton")
    except (OSError, ValueError, lzma.LZMAError, tarfile.TarError) as error:
        sys.exit(f"the load cannot be used: {error}")
    left_s = (asked.budget_s or BUDGETS_S[asked.run]) - (time.monotonic() - began_s)
    command = [sys.executable, "-m", "benchmarks.gpu", "run", str(asked.home / "results")]
    command += ["--run", asked.run, "--budget-s", f"{left_s:.0f}", "--archive", str(asked.archive)]
    if (asked.home / "vllm").is_dir():
        command += ["--vllm", str(asked.home / "vllm")]
    return subprocess.run([*command, *others], cwd=_ROOT, env=environment(asked.home), check=False).returncode


def receive(load: Path, home: Path) -> Iterator[str]:
    """Check and unpack the archives of a load that are not there yet; their names.

    Raises ValueError for one that is damaged, OSError.
    """
    for each in json.loads((load / _MANIFEST).read_text("utf-8"))["archives"]:
        packed, done = load / each["name"], home / f"{each['name']}.done"
        if done.exists() and done.read_text("utf-8") == each["sha256"]:
            continue
        with packed.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != each["sha256"]:
                raise ValueError(f"{packed.name} is damaged")
        home.mkdir(parents=True, exist_ok=True)
        with lzma.open(packed) as content, tarfile.open(fileobj=content, mode="r|") as members:
            members.extractall(home, filter="data")
        done.write_text(each["sha256"], "utf-8")
        yield each["name"]


def share(load: Path, home: Path) -> None:
    """Packages that vLLM imports too, from a folder of its own."""
    for pattern in json.loads((load / _MANIFEST).read_text("utf-8"))["shared"]:
        for package in (home / "packages").glob(pattern):
            if not (link := home / "vllm" / package.name).is_symlink():
                link.symlink_to(package)


def settle(cache: Path) -> None:
    """Triton's groups of files have the paths of the machine that compiled them."""
    for group in cache.glob("*/__grp__*"):
        paths = json.loads(group.read_text("utf-8"))["child_paths"]
        here = {name: str(group.parent / name) for name in paths}
        group.write_text(json.dumps({"child_paths": here}), "utf-8")


def environment(home: Path) -> dict[str, str]:
    """With the packages and the compiled modules of the loads."""
    given: dict[str, Any] = dict(os.environ)
    paths = [str(_ROOT), str(home / "packages"), given.get("PYTHONPATH", "")]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "FASER_CACHE_DIR": str(home / "cache")}
    if (home / "triton").is_dir():
        found["TRITON_CACHE_DIR"] = str(home / "triton")
    return {**given, **found, "PYTHONUNBUFFERED": "1"}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "day.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = made.add_argument
    add(
        "run",
        choices=tuple(BUDGETS_S),
        help="which phases (see RUNS in phases.py)",
    )
    add("--load", type=Path, metavar="DIR", help="the load, if it is not there from the call before")
    add("--archive", type=Path, default=Path("results.tar.gz"), metavar="FILE", help="where the results go")
    add("--home", type=Path, default=_HOME, metavar="DIR", help=f"where loads are unpacked [{_HOME}]")
    add("--budget-s", type=float, help="seconds of this call, unpacking included [480]")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
