"""`faser env [--json]` and `faser pull [MODEL]`: commands that need no running engine.

env shows versions, device and backend, for bug reports, or compiles CUDA kernels in advance, for this machine or
for one without a compiler. pull fetches a model into the cache, so that a later start needs no network.
"""

import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from faser import __version__
from faser.cli.console import TERMINATED, ProgressReporter
from faser.config.declaration import show_bytes
from faser.config.environment import cache_dir, child_environment, flashinfer_workspace
from faser.config.sources import CommandParser, UsageError
from faser.engine.checkpoints.source import resolve
from faser.errors import ConfigError
from faser.kernels.cpu.build import (
    LOW_BIT_INSTRUCTIONS,
    Isa,
    NativeLibrary,
    chosen_isa,
    find_library,
    runnable_isas,
)
from faser.kernels.cuda.flashinfer.build import (
    ARCH,
    HEAD_DIMS,
    MODULES,
    PRODUCTS,
    build_modules,
    modules_dir,
    product_modules,
)
from faser.machine import available_memory, usable_cores, usable_memory
from faser.processes import exit_on_sigterm

_ENV_HELP = f"""usage: faser env [--json]
       faser env --build-kernels [--arch {ARCH}] [--out DIR] [--only NAME,NAME]

Show versions, device and backend, or compile CUDA kernels in advance.

  --json            as a JSON object
  --build-kernels   compile FlashInfer's modules, a minute each; needs no GPU, keeps existing modules
  --arch            compute capability of the target GPU: {ARCH} is an H100 or H200
  --out             folder for the modules [the cache folder]
  --only            some of {", ".join(MODULES[: len(HEAD_DIMS)])},
                    {", ".join(MODULES[len(HEAD_DIMS) :])},
                    {", ".join(PRODUCTS)}, and those of attention with endings, in this order:
                    _window for layers with a sliding window, _capped for models that cap scores, _fp8 for
                    --kv-cache-dtype fp8; thus decode_256_window_capped"""

_PULL_HELP = """usage: faser pull [MODEL] [--revision REVISION]

Fetch a model into the cache and print its path. Without MODEL: the embedded SmolLM2-135M-Instruct.
MODEL: a hub id, or owner/name:Q4_K_M for the GGUF files of one quantization.

  --revision REVISION   branch, tag or commit of a hub model [the main branch]"""

_NAME_ENDS = "<>=!~;[ ("  # of a requirement


def env(arguments: Sequence[str]) -> int:
    """Print the facts, or compile; returns 0."""
    parser = CommandParser("faser env")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--build-kernels", action="store_true")
    for name in ("--arch", "--out", "--only"):
        parser.add_argument(name)
    parser.add_argument("--help", "-h", action="store_true")
    given = parser.parse_args(arguments)
    if given.help:
        print(_ENV_HELP)
        return 0
    if given.build_kernels:
        return _build_kernels(given.arch or ARCH, given.out, given.only)
    for name in ("arch", "out", "only"):
        if getattr(given, name) is not None:
            raise UsageError([f"--{name} goes with --build-kernels"])
    found = facts()
    if given.json:
        print(json.dumps(found, indent=2))
        return 0
    width = max(len(name) for name in found)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in found.items()))
    return 0


def _build_kernels(arch: str, out: str | None, only: str | None) -> int:
    common = (*MODULES, *(each.name for each in product_modules(arch)))
    names = common if only is None else tuple(only.split(","))
    folder = modules_dir(cache_dir() / "kernels", arch) if out is None else Path(out)
    print(f"compiling {', '.join(names)} for {arch} into {folder}", flush=True)
    build_modules(
        names,
        arch=arch,
        out=folder,
        environment=child_environment(),
        announce=lambda text: print(text, flush=True),
    )
    return 0


def facts() -> dict[str, str]:
    """The facts of a bug report, without secrets. Loads torch, which knows the GPUs, but no model."""
    return {
        "faser": __version__,
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": f"{usable_cores()} usable of {os.cpu_count()}",
        "cpu features": " ".join(_cpu_features()) or "none that kernels use",
        "cpu kernels": _cpu_kernels(),
        "memory": f"{show_bytes(usable_memory())} usable, {show_bytes(available_memory())} free",
        **_cuda(),
        "compiler": shutil.which("g++") or shutil.which("clang++") or "none",
        "cache": str(cache_dir()),
        **_packages(),
    }


def _cuda() -> dict[str, str]:
    """The GPUs, and the device and backend that auto selects."""
    from faser.engine.execution.startup.device import auto_device, flashinfer_installed
    from faser.kernels.cuda.device import cuda_facts
    from faser.kernels.report import cuda_report

    found = cuda_facts()
    device, missing = auto_device("auto", found, flashinfer_installed())
    on_cpu = "torch (no compiler, no prebuilt kernels)" if _library() is None else "native"
    return {
        **cuda_report(found, cache_dir() / "kernels", flashinfer_workspace()),
        "device": device if missing is None else f"{device}; {missing}",
        "backend": on_cpu if device == "cpu" else "flashinfer",
    }


def _cpu_kernels() -> str:
    """The instruction set of the native kernels, and where they come from."""
    found = _library()
    if found is None:
        return "none"
    products = f"low-bit products with {LOW_BIT_INSTRUCTIONS[found.isa]}"
    emulated = " with emulated tiles" if found.isa is Isa.AMX and runnable_isas()[0] is not Isa.AMX else ""
    return f"{found.isa}{emulated}, {found.origin}; {products}; KV cache in --dtype or int8"


def _library() -> NativeLibrary | None:
    """The compiled kernels, or those to be; None: there is no compiler, either."""
    isa = chosen_isa()
    try:
        return find_library(isa, cache_dir=cache_dir() / "kernels")
    except ConfigError:
        return None


def _packages() -> dict[str, str]:
    """Versions of FASER's dependencies, by the names in its metadata."""
    found = {}
    for requirement in requires("faser") or ():
        if "extra ==" in requirement:
            continue
        name = next((requirement[:i] for i, char in enumerate(requirement) if char in _NAME_ENDS), requirement)
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def _cpu_name() -> str:
    names = [line for line in _cpu_lines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def _cpu_features() -> list[str]:
    flags = next((line for line in _cpu_lines() if line.startswith("flags")), "").split()
    return [
        each for each in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if each in flags
    ]


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def pull(arguments: Sequence[str]) -> int:
    """Returns 0. Raises ModelError if the model cannot be fetched."""
    parser = CommandParser("faser pull")
    parser.add_argument("MODEL", nargs="?")
    parser.add_argument("--revision")
    parser.add_argument("--help", "-h", action="store_true")
    given = parser.parse_args(arguments)
    if given.help:
        print(_PULL_HELP)
        return 0
    with exit_on_sigterm(TERMINATED), ProgressReporter() as report:
        path = resolve(given.MODEL, cache_dir(), revision=given.revision, progress=report)
    print(path)
    return 0
