"""A stand-in for a lent machine, which enforces the rules of such machines on this one. It has no GPU.

The checkout travels: files that git tracks, new ones that it does not ignore, and paths that are carried along.
A command runs in its root, with an empty folder $OUT, and is killed at its limit. Few files come back from $OUT.
What a command leaves elsewhere stays until the machine is given back. Python finds its own library, what was
brought, and the packages in lent_packages.txt; others it does not, wherever they are installed.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.travel.checkout import size_of, travelling

MIB = 1 << 20
_POLL_S = 0.05
_TAIL_CHARS = 12_000
_SITE = '''
"""Hides packages that the machine does not have."""
import importlib.abc, importlib.machinery, sys

KNOWN = set({packages!r}) | set(sys.stdlib_module_names)
BROUGHT = {brought!r}

class Hides(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if path is not None or name in KNOWN or name.startswith("_") or name == "sitecustomize":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
        if spec is None or any(place.startswith(root) for place in places for root in BROUGHT):
            return None
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hides())
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """seconds: of a command. travel_bytes: of the checkout and what is carried. file_bytes: of a file that comes
    back; files, back_bytes: of all of them. folders: how deep below $OUT a file may lie."""

    seconds: float = 600.0
    travel_bytes: int = 64 * MIB
    files: int = 8
    file_bytes: int = 16 * MIB
    back_bytes: int = 64 * MIB
    folders: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What comes back of a command. files: their folder, where left_out says why others are not in it.

    status: None: it was killed.
    """

    status: int | None
    seconds: float
    output_tail: str
    files: Path
    left_out: tuple[str, ...]


def known_packages() -> tuple[str, ...]:
    lines = Path(__file__).with_name("lent_packages.txt").read_text("utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


class StubDevice:
    """Lives in a folder of its own until it is given back. packages: that it has; None: the known ones."""

    def __init__(
        self, home: Path, checkout: Path, limits: Limits | None = None, packages: Sequence[str] | None = None
    ) -> None:
        self._home = home
        self._checkout = checkout
        self._limits = limits or Limits()
        self._packages = known_packages() if packages is None else tuple(packages)
        self._calls = 0

    def run(self, command: str, carry: Path | None = None, kill_when: Callable[[], bool] = lambda: False) -> Reply:
        """Run a line of bash. carry: a folder whose content lies in .lent/NAME there.

        kill_when: asked all the time; once it holds the command is killed as at its limit. Raises ValueError for
        more than may travel.
        """
        repository, out = self._home / "checkout", self._home / "out"
        self._travel(repository, carry)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        log, began_s = self._home / "output.log", time.monotonic()
        with log.open("wb") as output:
            child = subprocess.Popen(
                ["bash", "-c", command],
                cwd=repository,
                env=self._environment(repository, out),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            status = self._wait(child, began_s + self._limits.seconds, kill_when)
        seconds = time.monotonic() - began_s
        self._calls += 1
        files, left_out = self._bring_back(out, self._home / f"back-{self._calls}")
        tail = log.read_text("utf-8", errors="replace")[-_TAIL_CHARS:]
        return Reply(status=status, seconds=seconds, output_tail=tail, files=files, left_out=left_out)

    def give_back(self) -> None:
        """Everything there is gone."""
        shutil.rmtree(self._home, ignore_errors=True)

    def _travel(self, repository: Path, carry: Path | None) -> None:
        members = [(each, self._checkout / each) for each in travelling(self._checkout)]
        if carry is not None:
            found = [each for each in carry.rglob("*") if each.is_file()]
            members += [(Path(".lent", carry.name, each.relative_to(carry)), each) for each in found]
        total = sum(size_of(file) for _, file in members)
        if total > self._limits.travel_bytes:
            raise ValueError(f"{total} bytes would travel; {self._limits.travel_bytes} may")
        shutil.rmtree(repository, ignore_errors=True)
        for place, file in members:
            (repository / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, repository / place, follow_symlinks=False)

    def _environment(self, repository: Path, out: Path) -> dict[str, str]:
        site = self._home / "site"
        site.mkdir(exist_ok=True)
        brought = [f"{self._home}/"]
        (site / "sitecustomize.py").write_text(_SITE.format(packages=self._packages, brought=brought), "utf-8")
        user = self._home / "user"
        user.mkdir(exist_ok=True)
        places = (str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin")
        return {
            "PATH": os.pathsep.join(places),
            "HOME": str(user),
            "TMPDIR": str(user),
            "OUT": str(out),
            "PYTHONPATH": str(site),
            "PWD": str(repository),
        }

    def _wait(self, child: subprocess.Popen[bytes], ends_s: float, kill_when: Callable[[], bool]) -> int | None:
        try:
            while time.monotonic() < ends_s and not kill_when():
                try:
                    return child.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    pass
            return None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()

    def _bring_back(self, out: Path, files: Path) -> tuple[Path, tuple[str, ...]]:
        files.mkdir()
        limits, left_out, total, count = self._limits, [], 0, 0
        for path in sorted(each for each in out.rglob("*") if not each.is_dir()):
            name, size = path.relative_to(out), path.stat().st_size
            reason = None
            if count >= limits.files:
                reason = f"more than {limits.files} files"
            elif size > limits.file_bytes or total + size > limits.back_bytes:
                reason = f"{size} bytes are too many"
            elif len(name.parts) > limits.folders + 1:
                reason = f"more than {limits.folders} folders down"
            elif not all(letter.isalnum() or letter in "._-" for part in name.parts for letter in part):
                reason = "a name with odd letters"
            if reason is not None:
                left_out.append(f"{name} ({reason})")
                continue
            (files / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, files / name)
            total, count = total + size, count + 1
        return files, tuple(left_out)
