"""The part of a bug report about CUDA: torch's build, driver, devices, packages, compiled modules.

Decides nothing. What is missing has a line too, which says so.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from faser.config.declaration import show_bytes
from faser.kernels.cuda.device import CudaFacts
from faser.kernels.cuda.flashinfer.build import arch_of, folder_of_compiled, known_modules, precompiled_folders

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One CUDA device."""

    name: str
    total_bytes: int
    free_bytes: int


def ask_gpu(index: int) -> Gpu:
    """Initialises CUDA on the device, which takes some of its memory until this process ends."""
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(name=torch.cuda.get_device_name(index), total_bytes=total, free_bytes=free)


def cuda_report(
    facts: CudaFacts,
    kernels: Path,
    workspace: Path,
    *,
    ask: Callable[[int], Gpu] = ask_gpu,
    driver: Path = _DRIVER,
) -> dict[str, str]:
    """Name and value of every line. kernels, workspace: see faser.kernels.cuda.flashinfer.build."""
    build = "none: torch is built without CUDA" if facts.build is None else f"{facts.build}, of torch"
    return {
        "cuda": build,
        "gpu driver": driver_version(driver),
        **_gpus(facts, ask),
        "flashinfer": _version("flashinfer-python", "not installed; pip install 'faser[cuda]'"),
        "triton": _version("triton", "not installed"),
        **_modules(facts, kernels, workspace),
    }


def driver_version(file: Path = _DRIVER) -> str:
    """Version of NVIDIA's kernel module."""
    try:
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", file.read_text())
    except OSError:
        return "none found"
    return found[1] if found else "unknown"


def _gpus(facts: CudaFacts, ask: Callable[[int], Gpu]) -> dict[str, str]:
    if not facts.capabilities:
        return {"gpus": "none that torch can use"}
    return {f"cuda:{index}": _described(facts, index, ask) for index in range(len(facts.capabilities))}


def _described(facts: CudaFacts, index: int, ask: Callable[[int], Gpu]) -> str:
    major, minor = facts.capabilities[index]
    try:
        gpu = ask(index)
    except RuntimeError as error:  # a broken device, or one that another process has for itself
        return f"compute capability {major}.{minor}; it does not answer: {str(error).splitlines()[0]}"
    memory = f"{show_bytes(gpu.total_bytes)}, {show_bytes(gpu.free_bytes)} free"
    return f"{gpu.name}, compute capability {major}.{minor}, {memory}"


def _modules(facts: CudaFacts, kernels: Path, workspace: Path) -> dict[str, str]:
    """Compiled modules of each architecture that a device here has or that modules were compiled for here."""
    archs = {arch_of(capability) for capability in facts.capabilities} | _compiled_archs(kernels)
    if not archs:
        return {"gpu kernels": "none compiled"}
    return {f"gpu kernels {arch}": _listed(arch, kernels, workspace) for arch in sorted(archs)}


def _compiled_archs(kernels: Path) -> set[str]:
    found = (re.fullmatch(r"flashinfer-.*-sm(\d+)(\da?)", folder.name) for folder in kernels.glob("flashinfer-*"))
    return {f"{each[1]}.{each[2]}" for each in found if each is not None}


def _listed(arch: str, kernels: Path, workspace: Path) -> str:
    folders = (*precompiled_folders(kernels, arch), folder_of_compiled(workspace, arch))
    present = [each.label for each in known_modules() if each.is_in(folders)]
    return ", ".join(present) or f"none compiled; faser env --build-kernels --arch {arch}"


def _version(package: str, otherwise: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise
