"""What a result has to say about where it was measured: processor, memory, system, versions."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

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
