"""Chooses a backend by name and imports only the chosen one."""

import logging
from pathlib import Path

from faser.errors import ConfigError
from faser.kernels.backend import Backend

_log = logging.getLogger("faser")


def make_backend(name: str, device: str, *, num_threads: int, cache_dir: Path) -> Backend:
    """The backend called name (auto, torch or native) on device.

    auto: native where it can be compiled or came with the package, else torch, and a warning that says why.
    num_threads: threads of the native kernels, the caller's included. cache_dir: where compiled kernels are kept.

    Raises ConfigError for a name or device that is not known here, and for native without a compiler.
    """
    if device != "cpu":
        raise ConfigError(f"device {device} is not supported by this build yet; it runs on cpu")
    match name:
        case "auto":
            return _native(num_threads, cache_dir) if _native_works() else _torch()
        case "torch":
            return _torch()
        case "native":
            return _native(num_threads, cache_dir)
        case _:
            raise ConfigError(f"backend is {name}; it must be auto, torch or native")


def _native_works() -> bool:
    from faser.kernels.native_build import COMPILERS, can_build

    if can_build():
        return True
    _log.warning(
        "no C++ compiler found (looked for %s) and no kernels came with the package: using the torch backend, "
        "which needs four to six times as long for a step; install g++ to get the native one",
        ", ".join(COMPILERS),
    )
    return False


def _torch() -> Backend:
    from faser.kernels.torch_backend import TorchBackend

    return TorchBackend("cpu")


def _native(num_threads: int, cache_dir: Path) -> Backend:
    from faser.kernels.native_backend import NativeBackend
    from faser.kernels.native_build import library_path

    return NativeBackend(library_path(cache_dir=cache_dir), num_threads=num_threads)
