"""Installs each load generator, unmodified, into a virtual environment of its own.

    python -m benchmarks generators.setup [TOOL ...]

Owns what is installed there and with which versions; none of it is a dependency of FASER. vLLM's `bench serve`
comes from vLLM's source package, of which nothing is compiled: its wheel would install CUDA.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runner import command_line

DEFAULT_DIRECTORY = Path("benchmarks/generators/.venv")
VLLM_SOURCE = "source"  # folder in vLLM's environment that holds the unpacked source package

_TORCH = "torch==2.13.0"
_VLLM = "vllm==0.33.0"
_PACKAGES = {
    "vllm": (
        f"{_TORCH} pybase64 msgspec cbor2 psutil pyzmq openai-harmony cachetools py-cpuinfo pillow"
        " prometheus-client xgrammar fastapi partial-json-parser llguidance einops transformers aiohttp tqdm"
        " urllib3 requests openai cloudpickle uvloop pandas setuptools<81 setuptools-scm setuptools-rust packaging"
        " jinja2 cmake ninja wheel"
    ),
    "guidellm": f"{_TORCH} guidellm==0.8.1",
    "aiperf": "aiperf==0.13.0",
    "lm_eval": "lm-eval[api]==0.4.13 transformers==5.23.0",
}
_TIMEOUT_S = 3600


def main(arguments: Sequence[str] | None = None) -> int:
    """Set up the tools named on the command line; returns 0, or raises CalledProcessError with pip's words."""
    parser = command_line(__doc__)
    parser.add_argument("tools", nargs="*", metavar=f"{{{','.join(_PACKAGES)}}}", help="default: all")
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, help="default: %(default)s")
    parser.add_argument("--torch-index", help="package index with torch's CPU wheels, if pip does not know one")
    parser.add_argument("--vllm-source", type=Path, help="vllm-*.tar.gz; default: pip fetches it (47 MB)")
    parser.add_argument("--again", action="store_true", help="remove an environment that exists and start over")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.tools) - set(_PACKAGES)):
        parser.error(f"{', '.join(unknown)}: not among {', '.join(_PACKAGES)}")
    for tool in given.tools or _PACKAGES:
        began_s = time.monotonic()
        directory = given.directory.absolute() / tool
        python = _environment(directory, again=given.again)
        index = ("--extra-index-url", given.torch_index) if given.torch_index else ()
        _pip(python, "install", *index, *_PACKAGES[tool].split())
        if tool == "vllm":
            unpack(given.vllm_source or _fetch_source(python, directory / "download"), directory / VLLM_SOURCE)
        print(f"{tool}: {directory}, {time.monotonic() - began_s:.0f} s", flush=True)
    return 0


def unpack(archive: Path, target: Path) -> None:
    """Write the Python package of vLLM's source archive to target, which is replaced."""
    if target.exists():
        shutil.rmtree(target)
    with tarfile.open(archive) as source:
        root = source.getnames()[0].partition("/")[0]
        wanted = [each for each in source.getmembers() if each.name.startswith(f"{root}/vllm/")]
        source.extractall(target, members=wanted, filter="data")
    for each in (target / root).iterdir():
        each.rename(target / each.name)
    (target / "NAME").write_text(root, encoding="utf-8")


def _fetch_source(python: Path, folder: Path) -> Path:
    """vLLM's source package. pip asks it for its metadata, for which it needs the packages that build it."""
    environment = {"VLLM_VERSION_OVERRIDE": _VLLM.partition("==")[2], "VLLM_TARGET_DEVICE": "empty"}
    options = ("--no-deps", "--no-binary", "vllm", "--no-build-isolation", "--dest", str(folder))
    _pip(python, "download", *options, _VLLM, environment=environment)
    return next(folder.glob("vllm-*.tar.gz"))


def _environment(directory: Path, *, again: bool) -> Path:
    """The Python of the virtual environment in directory, made first where there is none."""
    if again and directory.exists():
        shutil.rmtree(directory)
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    return python


def _pip(python: Path, verb: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
    command = [str(python), "-m", "pip", verb, "--quiet", "--disable-pip-version-check", *arguments]
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])  # cmake and ninja are there
    variables = {**os.environ, "PATH": path, **(environment or {})}
    subprocess.run(command, check=True, timeout=_TIMEOUT_S, env=variables)
