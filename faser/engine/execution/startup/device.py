"""Where an engine runs: puts the name of a device in the place of auto, once, before anything is loaded.

Knows what devices there are, not how anything is computed on them.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import torch

from faser.config.engine import EngineConfig
from faser.config.environment import cuda_environment
from faser.errors import ConfigError
from faser.kernels.cuda.device import CudaFacts, cuda_facts, open_cuda

_log = logging.getLogger("faser.engine")


def flashinfer_installed() -> bool:
    return find_spec("flashinfer") is not None


def place(
    config: EngineConfig,
    look: Callable[[], CudaFacts] = cuda_facts,
    has_flashinfer: Callable[[], bool] = flashinfer_installed,
) -> EngineConfig:
    """The config with the device's own name, cpu or cuda:N, and on a GPU with the backend's.

    The first thing of an engine: it sets the environment that CUDA's libraries read when they are loaded, and the
    config is checked once more, now that the device is known. Warns of what has no effect there. A config that was
    placed comes back as it is.

    Raises ConfigError naming what is missing of a GPU that was asked for, and what the device cannot do.
    """
    if config.device != "cpu" and torch.version.cuda is not None:
        cuda_environment(compile_kernels=config.compile_kernels)
    device, backend = config.device, config.backend
    if device == "auto":
        device, missing = auto_device(backend, look(), has_flashinfer())
        if missing is not None:
            _log.warning("computing on the CPU, though there is a GPU: %s", missing)
    elif config.on_gpu:
        device = str(open_cuda(device, look()))
    if device != "cpu" and backend == "auto":
        backend = "flashinfer"
    placed = replace(config, device=device, backend=backend)
    for name in placed.without_effect:
        _log.warning("--%s has no effect on a CPU", name.replace("_", "-"))
    return placed


def auto_device(backend: str, facts: CudaFacts, has_flashinfer: bool) -> tuple[str, str | None]:
    """What auto stands for: the first GPU, or cpu, and then what is missing of the GPU that is there, if one is.

    Raises ConfigError naming what is missing where the backend computes on GPUs only.
    """
    if backend == "flashinfer":
        return str(open_cuda("cuda", facts)), None
    if backend == "native" or not facts.capabilities:
        return "cpu", None
    if backend == "auto" and not has_flashinfer:
        return "cpu", "flashinfer is not installed; pip install 'faser[cuda]'"
    try:
        return str(open_cuda("cuda", facts)), None
    except ConfigError as error:
        return "cpu", str(error)
