"""Which device and backend an engine uses: resolves `auto` before anything is loaded."""

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from faser.config.declaration import Label, find_problems, flag_label, settings_of
from faser.config.engine import EngineConfig, gpu_defaults
from faser.config.environment import cuda_environment
from faser.errors import ConfigError
from faser.kernels.cuda.device import CudaFacts, cuda_facts, open_cuda

_log = logging.getLogger("faser.engine")


def flashinfer_installed() -> bool:
    return find_spec("flashinfer") is not None


def resolve_device(
    config: EngineConfig,
    find_devices: Callable[[], CudaFacts] = cuda_facts,
    has_flashinfer: Callable[[], bool] = flashinfer_installed,
) -> EngineConfig:
    """The config with the device's name, cpu or cuda:N, and on a GPU with its backend and its defaults.

    Call it first: it sets the environment that CUDA's libraries read when they are loaded. The config is validated
    again, now for this device. Logs a warning for every setting that has no effect there. Idempotent.

    Raises ConfigError naming what the requested GPU lacks, or what the device cannot do.
    """
    if config.device != "cpu" and torch.version.cuda is not None:
        cuda_environment(compile_kernels=config.compile_kernels)
    device, backend = config.device, config.backend
    facts = find_devices() if device != "cpu" else CudaFacts(build=None, capabilities=())
    if device == "auto":
        device, missing = auto_device(backend, facts, has_flashinfer())
        if missing is not None:
            _log.warning("computing on the CPU, though there is a GPU: %s", missing)
    elif config.on_gpu:
        device = str(open_cuda(device, facts))
    if device != "cpu" and backend == "auto":
        backend = "flashinfer"
    found = {each.name: getattr(config, each.name) for each in settings_of(EngineConfig)}
    chosen: dict[str, Any] = (
        {} if device == "cpu" else gpu_defaults(found, config.by_device, _memory_bytes(facts, device))
    )
    values = {**found, **chosen, "device": device, "backend": backend}
    problems = find_problems(EngineConfig, values, _labels(config))
    if problems:
        raise ConfigError("; ".join(problems))
    resolved = replace(config, device=device, backend=backend, by_device=(), **chosen)
    if chosen:
        _log.info("%s", f"for {device}: " + ", ".join(f"{flag_label(name)} {chosen[name]}" for name in chosen))
    for name in resolved.without_effect:
        _log.warning("%s has no effect on a CPU", flag_label(name))
    return resolved


def _memory_bytes(facts: CudaFacts, device: str) -> int:
    """Of the device cuda:N; 0 where it is not known."""
    index = int(device.partition(":")[2] or 0)
    return facts.memory_bytes[index] if index < len(facts.memory_bytes) else 0


def _labels(config: EngineConfig) -> Label:
    """What messages call a setting: its flag; a device that no flag names is "the device"."""

    def label(name: str) -> str:
        return "the device" if name == "device" and config.device == "auto" else flag_label(name)

    return label


def auto_device(backend: str, facts: CudaFacts, has_flashinfer: bool) -> tuple[str, str | None]:
    """The device that auto stands for, the first GPU or cpu; with cpu, why a GPU that is present is not used.

    Raises ConfigError naming what is missing where the backend computes on GPUs only.
    """
    if backend == "flashinfer":
        return str(open_cuda("cuda", facts, "--backend is flashinfer, which computes on GPUs")), None
    if backend == "native" or not facts.capabilities:
        return "cpu", None
    if backend == "auto" and not has_flashinfer:
        return "cpu", "flashinfer is not installed; pip install 'faser[cuda]'"
    try:
        return str(open_cuda("cuda", facts, "the first GPU")), None
    except ConfigError as error:
        return "cpu", str(error)
