"""A stand-in for a lent machine, which enforces the rules of such machines on this one. It has no GPU.

The checkout travels: files that git tracks, new ones that it does not ignore, and paths that are carried along.
A command runs in its root, with an empty folder $OUT, and is killed at its limit. Few files come back from $OUT.
What a command leaves elsewhere stays until the machine is given back. Python finds its own library, what was
brought, and the packages in lent_packages.txt; others it does not, wherever they are installed.

The runs of the first half hour, rehearsed on a stand-in for the machine, with tiny models on the CPU.

    python -m benchmarks.gpu.travel.rehearsal OUT [--load DIR] [--budget-s 480] [--limit-s 600]

OUT gets what would come back, an archive a run, and all of them merged. The machine stays warm between the runs.
With a load, FlashInfer is imported from it alone afterwards, and its modules are loaded, by this torch. Without
one, the packages that a load brings are this machine's. The exit status is 1 where something did not come back, is
not complete or is missing in the load.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.archive import merge, read_records
from benchmarks.gpu.phases import RUNS
from benchmarks.gpu.travel.bundle import CARRIED, size_of, travelling

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


_ROOT = Path(__file__).parents[3]
_COMMAND_CHARS = 2000  # of a command at most
_FOLDER = "faser-lent"
_HOME = f'"$HOME/{_FOLDER}"'
# With nothing but the load and the checkout on the path, beside what the machine has.
FLASHINFER = (
    f"export FASER_CACHE_DIR={_HOME}/cache PYTHONPATH=$PYTHONPATH:$PWD:{_HOME}/packages; "
    "python3 -m benchmarks.gpu.decoding.environment"
)


def main(arguments: list[str]) -> int:
    asked = parser().parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    problems = []
    with tempfile.TemporaryDirectory(prefix="faser-stub-device-") as home:
        packages = known_packages() if asked.load else (*known_packages(), *CARRIED)
        device = StubDevice(Path(home), asked.checkout, Limits(seconds=asked.limit_s), packages)
        for run in RUNS:
            reply = device.run(command_of(run, asked.load, asked.budget_s), asked.load)
            print(reply.output_tail)
            problems += problems_of(run, reply)
            if (found := reply.files / f"{run}.tar.gz").exists():
                shutil.copyfile(found, asked.out / found.name)
        if asked.load is not None:
            problems += problems_of_flashinfer(device.run(FLASHINFER, asked.load))
    archives = [found for run in RUNS if (found := asked.out / f"{run}.tar.gz").exists()]
    for record in merge(archives, asked.out / "merged", dry_run=True):
        print(f"{record.phase}: {record.state}, {record.seconds:.0f} s")
    for archive in archives:
        print(f"{archive.name}: {archive.stat().st_size / MIB:.2f} MiB")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def command_of(run: str, load: Path | None, budget_s: float) -> str:
    """As it would be given to a machine, but for the last option."""
    carried = "" if load is None else f"--load .lent/{load.name}"
    command = f"python3 benchmarks/gpu/travel/day.py {run} {carried} --home {_HOME} --archive $OUT/{run}.tar.gz"
    command += f" --budget-s {budget_s:g} --dry-run"
    assert len(command) <= _COMMAND_CHARS, command
    return command


def problems_of_flashinfer(reply: Reply) -> list[str]:
    """What the load lacks of FlashInfer, or that it came from elsewhere."""
    last = reply.output_tail.strip().rpartition("\n")[2]
    if reply.status != 0:
        return [f"FlashInfer of the load: {last or 'nothing was said'}"]
    found = json.loads(last)
    print(f"FlashInfer of the load: {found}")
    if f"{_FOLDER}/packages/flashinfer/" not in found["package"]:
        return [f"FlashInfer was imported from {found['package']}"]
    return []


def problems_of(run: str, reply: Reply) -> list[str]:
    """What is not as it has to be after a run that nothing disturbed."""
    found = [f"run {run}: {each} did not come back" for each in reply.left_out]
    if reply.status != 0:
        how = "was killed" if reply.status is None else f"ended with status {reply.status}"
        found.append(f"run {run} {how} after {reply.seconds:.0f} s")
    archive = reply.files / f"{run}.tar.gz"
    if not archive.exists():
        return [*found, f"run {run} left no archive"]
    _, records = read_records(archive)
    states = {name: records[name].state if name in records else "missing" for name in RUNS[run].seconds}
    return [*found, *(f"run {run}, {name}: {state}" for name, state in states.items() if state != "complete")]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m benchmarks.gpu.travel.rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("out", type=Path, metavar="OUT")
    add("--load", type=Path, metavar="DIR", help="of benchmarks.gpu.travel.bundle [none]")
    add("--budget-s", type=float, default=480.0, help="seconds of each run [480]")
    add("--limit-s", type=float, default=600.0, help="seconds after which a run is killed [600]")
    add("--checkout", type=Path, default=_ROOT, help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
