"""Makes a backend by name, and imports only that one."""

import logging
from pathlib import Path

from faser.errors import ConfigError
from faser.kernels.interface.backend import Backend
from faser.types.engine import ProgressCallback

_log = logging.getLogger("faser")
# The kind of device that each backend needs; None: any.
_DEVICE_OF: dict[str, str | None] = {"auto": None, "torch": None, "native": "cpu", "flashinfer": "cuda"}


def make_backend(
    name: str,
    device: str,
    *,
    num_threads: int,
    cache_dir: Path,
    progress: ProgressCallback | None = None,
    measures: bool = True,
) -> Backend:
    """The backend called name (auto, torch, native or flashinfer) on device (cpu, cuda or cuda:N).

    auto on a CPU: native if it can be compiled or came with the package, else torch, with a warning that says why.
    auto on a GPU: flashinfer. num_threads: threads of the native kernels, the caller's included. cache_dir: folder
    for compiled kernels. progress: called while the native kernels are compiled; see library_path. measures:
    whether a GPU's kernels are chosen by their times; else references are taken, the same ones on every GPU.

    Raises ConfigError for an unknown name or device, for a backend that does not run on the device, and for what
    is missing: native's compiler; a CUDA build of torch, the device, or the package flashinfer.
    """
    if name not in _DEVICE_OF:
        raise ConfigError(f"backend is {name}; it must be {', '.join(_DEVICE_OF)}")
    kind, _, number = device.partition(":")
    if device != "cpu" and (kind != "cuda" or (number and not number.isdecimal())):
        raise ConfigError(f"device is {device}; it must be cpu, cuda or cuda:N")
    needed = _DEVICE_OF[name]
    if needed not in (None, kind):
        raise ConfigError(f"the {name} backend computes on {needed}; device is {device}")
    if kind == "cuda":
        return _on_cuda(name, device, cache_dir, measures=measures)
    if name == "torch" or (name == "auto" and not _native_works()):
        return _torch(device)
    return _native(num_threads, cache_dir, progress)


_HOPPER = (9, 0)


def _native_works() -> bool:
    from faser.kernels.cpu.build import COMPILERS, can_build

    if can_build():
        return True
    _log.warning(
        "no C++ compiler found (looked for %s) and none of the package's kernels fit: using the torch backend, "
        "which needs four to six times as long for a step; install g++ to get the native one",
        ", ".join(COMPILERS),
    )
    return False


def _torch(device: str) -> Backend:
    from faser.kernels.torch_backend import TorchBackend

    return TorchBackend(device)


def _on_cuda(name: str, device: str, cache_dir: Path, *, measures: bool) -> Backend:
    import torch

    from faser.kernels.cuda.choices import Choices, device_choices
    from faser.kernels.cuda.device import CudaDevice, cuda_facts, open_cuda

    facts = cuda_facts()
    opened = open_cuda(device, facts)
    if name == "torch":
        return _torch(str(opened))
    torch.cuda.set_device(opened)  # Triton launches on the calling thread's current device, not on the tensors'
    from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
    from faser.kernels.cuda.flashinfer.build import arch_of, modules_dir, product_modules
    from faser.kernels.cuda.flashinfer.device_kernels import triton_kernels
    from faser.kernels.cuda.flashinfer.library import load_flashinfer
    from faser.kernels.cuda.flashinfer.product_kernels import ProductKernels, load_blockscale, load_products
    from faser.kernels.cuda.triton.launcher import add_to_cache
    from faser.kernels.cuda.triton.scaled_fp8 import scaled_fp8

    capability = facts.capabilities[opened.index]
    arch = arch_of(capability)
    modules = modules_dir(cache_dir, arch)
    library = load_flashinfer(modules if modules.exists() else None)
    fp8 = scaled_fp8(opened, capability)
    add_to_cache()
    choices = device_choices(opened, cache_dir / "choices.json") if measures else Choices()

    def products() -> ProductKernels:
        return ProductKernels(opened, load_products(product_modules(arch)))

    blockscale = load_blockscale if capability == _HOPPER else None
    return FlashInferBackend(
        CudaDevice(opened), library, triton_kernels(opened), fp8, choices, products, blockscale
    )


def _native(num_threads: int, cache_dir: Path, progress: ProgressCallback | None) -> Backend:
    from faser.kernels.cpu.backend import NativeBackend
    from faser.kernels.cpu.build import find_library, library_path

    found = find_library(cache_dir=cache_dir)
    _log.info("native kernels: %s, %s", found.isa, found.origin)
    return NativeBackend(library_path(found.isa, cache_dir=cache_dir, progress=progress), num_threads=num_threads)
