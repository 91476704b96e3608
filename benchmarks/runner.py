"""What a result has to say about where it was measured: processor, memory, system, versions.

Busy processes beside a measurement: how something fares on a machine that is not its own.

Arms in turn: their order in a round, ratios within a round with an interval, programs run in two checkouts.

The machines that FASER is measured on are faster in one minute than in the next. So arms take turns, and a figure
is compared only with its neighbours'. Knows neither servers nor engines.
"""

import contextlib
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.progress import track

_ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
_PRINT_VERSIONS = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"


def describe_machine(cores: Sequence[int]) -> dict[str, Any]:
    """cores: the ones that were used."""
    fields = _cpu_fields()
    flags = fields.get("flags", "").split()
    return {
        "cpu_model": fields.get("model name", platform.processor()),
        "cpu_family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "cpu_flags": [flag for flag in _ISA_FLAGS if flag in flags],
        "cores_used": list(cores),
        "cores_total": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def portable(text: str) -> str:
    """text with the working directory as `.` and the user's home as `~`: results are read elsewhere."""
    return text.replace(str(Path.cwd()), ".").replace(str(Path.home()), "~")


def git_commit(checkout: Path | None = None) -> str:
    """The commit of a checkout, the present one if None, with -dirty if it differs; unknown without one or git."""
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="]
    ended = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    return ended.stdout.strip() or "unknown"


def python_versions(python: Path, package: str) -> dict[str, str]:
    """Of a distribution and of torch, in the environment of this interpreter."""
    command = [str(python), "-c", _PRINT_VERSIONS, package, "torch"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    version, torch_version = ended.stdout.split()
    return {"version": version, "torch": torch_version}


def _cpu_fields() -> dict[str, str]:
    """The first processor's fields in /proc/cpuinfo; none where there is no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text().split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


# Ends with its parent, also with one that was killed. Looks for it about ten times a second.
_SPIN = """
import os, sys
parent = int(sys.argv[1])
while os.getppid() == parent:
    for _ in range(2_000_000):
        pass
"""
_END_TIMEOUT_S = 10.0


@contextlib.contextmanager
def beside_load(count: int) -> Iterator[None]:
    """`count` processes of normal priority that each keep a core busy as long as the block runs."""
    command = [sys.executable, "-c", _SPIN, str(os.getpid())]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.callback(_end, subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(_END_TIMEOUT_S)


T = TypeVar("T")

BASE, THIS = "base", "this"

# Student's t, 97.5 %, by degrees of freedom from 1 on. Beyond the table it sinks to 1.960: taking the last value
# instead widens an interval by 4 % at most.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Of one arm against another in the same rounds. low, high: of a 95 % interval; None with a single round."""

    mean: float
    low: float | None
    high: float | None
    rounds: int

    def rounded(self, digits: int = 4) -> dict[str, float | None]:
        return {name: None if value is None else round(value, digits) for name, value in asdict(self).items()}

    def text(self, digits: int = 2, unit: str = "") -> str:
        """Such as `1.52x (1.30 … 1.67)`."""
        mean = f"{self.mean:.{digits}f}{unit}"
        return mean if self.low is None else f"{mean} ({self.low:.{digits}f} … {self.high:.{digits}f})"


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Geometric mean of mine over theirs, round by round; its interval is Student's of the logarithms.

    Raises ValueError unless there are as many of either, at least one, and all are above 0.
    """
    logs = _estimate([math.log(above / below) for above, below in zip(mine, theirs, strict=True)])
    low, high = (None if bound is None else math.exp(bound) for bound in (logs.low, logs.high))
    return Estimate(mean=math.exp(logs.mean), low=low, high=high, rounds=logs.rounds)


def difference(mine: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Mean of mine minus theirs, round by round, with Student's interval. Raises ValueError as ratio does."""
    return _estimate([one - other for one, other in zip(mine, theirs, strict=True)])


def _estimate(values: Sequence[float]) -> Estimate:
    if not values:
        raise ValueError("there is no round to compare")
    mean, rounds = statistics.fmean(values), len(values)
    if rounds == 1:
        return Estimate(mean=mean, low=None, high=None, rounds=rounds)
    margin = t_975(rounds - 1) * statistics.stdev(values) / math.sqrt(rounds)
    return Estimate(mean=mean, low=mean - margin, high=mean + margin, rounds=rounds)


def t_975(freedom: int) -> float:
    """Student's t that 97.5 % stay below. freedom: degrees of it, at least 1; above 30 as at 30."""
    return _T_975[min(freedom, len(_T_975)) - 1]


def in_turn(arms: Sequence[T], number: int) -> list[T]:
    """The order of a round: backwards in every other one, so that no arm always follows the same one."""
    return list(arms) if number % 2 else list(reversed(arms))


def run_program(program: str, checkout: Path, *arguments: str) -> Any:
    """The JSON in the last line that a Python program prints, run in a checkout of FASER and importing from it.

    Raises CalledProcessError if it fails; what it said to stderr is shown.
    """
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def checkout_pairs(
    base: Path, count: int, run: Callable[[Path], dict[str, float]]
) -> list[dict[str, dict[str, float]]]:
    """What run(checkout) found in the base and in this checkout, in turn, `count` times."""
    checkouts = [(BASE, base.resolve()), (THIS, _CHECKOUT)]
    return [
        {name: run(checkout) for name, checkout in in_turn(checkouts, number)}
        for number in track(range(count), "pairs")
    ]


def summarise_pairs(pairs: Sequence[Mapping[str, Mapping[str, float]]], kind: str) -> dict[str, Any]:
    """Medians of either checkout for one kind, and ratios of this one over the base within a pair."""
    base, this = ([pair[name][kind] for pair in pairs] for name in (BASE, THIS))
    ratios = [mine / theirs for mine, theirs in zip(this, base, strict=True)]
    return {
        "base": round(statistics.median(base), 4),
        "this": round(statistics.median(this), 4),
        "ratio": round(statistics.median(ratios), 4),
        "least": round(min(ratios), 4),
        "most": round(max(ratios), 4),
        "geometric_mean": ratio(this, base).rounded(),
    }
