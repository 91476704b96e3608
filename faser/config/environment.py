"""The process's environment: the only module that reads it, or writes to it."""

import os
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from faser.config.declaration import Setting


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where models, compiled kernels and step times are kept: FASER_CACHE_DIR, else the user's cache folder."""
    if own := environment.get("FASER_CACHE_DIR"):
        return Path(own).expanduser()
    if shared := environment.get("XDG_CACHE_HOME"):
        return Path(shared) / "faser"
    return Path.home() / ".cache" / "faser"


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of the engine's process: ours, without the keys, which it has no use for."""
    return {name: value for name, value in environment.items() if name not in _SECRETS}


_SECRETS = ("FASER_API_KEY", "VLLM_API_KEY")


def cuda_environment(environment: MutableMapping[str, str] = os.environ, *, compile_kernels: bool = True) -> None:
    """Tell CUDA and FlashInfer what they read from the environment; what an operator has set stays as it is.

    To be called before the process uses CUDA for the first time, and before flashinfer is imported.
    """
    wanted = {
        # Queues between this process and the GPU: streams that share one wait for each other.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        # The norm that is compiled ahead of time, also where a package brings another one.
        "FLASHINFER_USE_CUDA_NORM": "1",
        _WORKSPACE: str(flashinfer_workspace(environment)),
    }
    if not compile_kernels:
        wanted[_NO_COMPILING] = "1"
    for name, value in wanted.items():
        environment.setdefault(name, value)


def may_compile_kernels(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether FlashInfer compiles what is missing. Any text forbids it, 0 too: that is how FlashInfer reads it."""
    return not environment.get(_NO_COMPILING)


def flashinfer_workspace(environment: Mapping[str, str] = os.environ) -> Path:
    """Where FlashInfer keeps what it compiles."""
    return Path(environment.get(_WORKSPACE) or cache_dir(environment) / "kernels")


_NO_COMPILING, _WORKSPACE = "FLASHINFER_DISABLE_JIT", "FLASHINFER_WORKSPACE_BASE"


def flag_environment(
    settings: Iterable[Setting], environment: Mapping[str, str] = os.environ
) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """What the environment says about settings: (variable, text) by name; and FASER_* variables nobody knows."""
    by_variable = {each.variable: each.name for each in settings}
    given, unknown = {}, []
    if "VLLM_API_KEY" in environment:
        given["api_key"] = ("VLLM_API_KEY", environment["VLLM_API_KEY"])
    for variable, text in sorted(environment.items()):
        if variable in by_variable:
            given[by_variable[variable]] = (variable, text)
        elif variable.startswith("FASER_") and variable not in _OTHER_VARIABLES:
            unknown.append(variable)
    return given, unknown


_OTHER_VARIABLES = ("FASER_CACHE_DIR",)
