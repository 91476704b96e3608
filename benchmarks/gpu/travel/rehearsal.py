"""The runs of the first half hour, rehearsed on a stand-in for the machine, with tiny models on the CPU.

    python -m benchmarks.gpu.travel.rehearsal OUT [--load DIR] [--budget-s 480] [--limit-s 600]

OUT gets what would come back, an archive a run, and all of them merged. The machine stays warm between the runs.
With a load, FlashInfer is imported from it alone afterwards, and its modules are loaded, by this torch. Without
one, the packages that a load brings are this machine's. The exit status is 1 where something did not come back, is
not complete or is missing in the load.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.archive import read_records
from benchmarks.gpu.merge import merge
from benchmarks.gpu.phases import RUNS
from benchmarks.gpu.travel.carried import CARRIED
from benchmarks.gpu.travel.stub_device import MIB, Limits, Reply, StubDevice, known_packages

_ROOT = Path(__file__).parents[3]
_COMMAND_CHARS = 2000  # of a command at most
_FOLDER = "faser-lent"
_HOME = f'"$HOME/{_FOLDER}"'
# With nothing but the load and the checkout on the path, beside what the machine has.
FLASHINFER = (
    f"export FASER_CACHE_DIR={_HOME}/cache PYTHONPATH=$PYTHONPATH:$PWD:{_HOME}/packages; "
    "python3 -m benchmarks.gpu.common.flashinfer_modules"
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
