"""Choice of an engine's device and backend, and the kernels that FlashInfer has yet to compile for its models."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from faser.config.declaration import Label, find_problems, flag_label, settings_of
from faser.config.engine import EngineConfig, gpu_defaults
from faser.config.environment import cuda_environment, ranks_here
from faser.engine.execution.models.layers import attention_shape
from faser.engine.execution.startup.memory import CachedModel
from faser.errors import ConfigError
from faser.kernels.cuda.device import CudaFacts, cuda_facts, open_cuda
from faser.kernels.cuda.flashinfer.build import (
    Attention,
    Module,
    compile_time,
    folder_of_compiled,
    needed_modules,
    package_of_modules,
    precompiled_folders,
    product_modules,
)
from faser.kernels.cuda.flashinfer.paged_attention import AttentionKind
from faser.kernels.interface.fp8 import FP8
from faser.kernels.interface.shapes import AttentionShape
from faser.types.engine import ProgressCallback

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
    if device != "cpu":
        _check_gpus(config.tensor_parallel_size, device, len(facts.capabilities))
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


def _check_gpus(size: int, device: str, count: int) -> None:
    """Raises ConfigError where there are too few GPUs for the ranks. device: of the first rank of this machine."""
    here, first = ranks_here(size), int(device.partition(":")[2] or 0)
    if size > 1 and first + here > count:
        these = "one each" if first == 0 else f"one each from {device} on"
        raise ConfigError(
            f"{flag_label('tensor_parallel_size')} is {size}; the {here} ranks on this machine need {here} GPUs, "
            f"{these}, and CUDA shows {count} (CUDA_VISIBLE_DEVICES may hide others); --device cpu needs none"
        )


def device_of_rank(device: str, local: int) -> str:
    """Return the device of a rank. device: of the first rank of this machine. local: its number there."""
    kind, _, first = device.partition(":")
    return device if kind == "cpu" else f"{kind}:{int(first or 0) + local}"


def _memory_bytes(facts: CudaFacts, device: str) -> int:
    """Return the memory of the device cuda:N; 0 where it is not known."""
    index = int(device.partition(":")[2] or 0)
    return facts.memory_bytes[index] if index < len(facts.memory_bytes) else 0


def _labels(config: EngineConfig) -> Label:
    """Return the name of a setting in messages: its flag; a device that no flag names is "the device"."""

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


def check_kernels(
    models: Sequence[CachedModel],
    arch: str,
    progress: ProgressCallback,
    *,
    kernels: Path,
    workspace: Path,
    may_compile: bool,
) -> None:
    """Report the kernels that FlashInfer will compile at their first call, and about how long that takes.

    Call it before the first step. Reports nothing where all are compiled, or where a package of compiled modules
    is installed. arch: of arch_of. kernels, workspace: folders of the modules that were compiled ahead of time,
    and of those that FlashInfer compiles.

    Raises ConfigError naming the missing kernels where none may be compiled.
    """
    if package_of_modules():
        return
    folders = precompiled_folders(kernels, arch)
    if may_compile:
        folders = (*folders, folder_of_compiled(workspace, arch))
    needed = modules_of(models)
    if may_compile and any(each.dtype is torch.bfloat16 for each in models):
        needed += product_modules(arch)  # torch's products are taken without them
    missing = [each for each in needed if not each.is_in(folders)]
    if not missing:
        return
    listed = ", ".join(each.label for each in missing)
    if not may_compile:
        places = " and ".join(str(folder) for folder in folders)
        raise ConfigError(
            f"no kernels may be compiled, and these are missing: {listed}; looked in {places}; "
            f"{_remedy(missing, arch)}"
        )
    progress(f"compiling kernels for {arch}, {compile_time(missing)} on one core: {listed}", 0, 0)


def modules_of(models: Sequence[CachedModel]) -> tuple[Module, ...]:
    """FlashInfer's modules that these models call."""
    return needed_modules(each for model in models for each in _attention(model))


def _remedy(missing: Sequence[Module], arch: str) -> str:
    if any(each.dtype != "bfloat16" for each in missing):
        return "only those of bfloat16 can be compiled ahead of time: use --dtype bfloat16 or --compile-kernels"
    return f"faser env --build-kernels --arch {arch} --only {','.join(each.name for each in missing)}"


def _attention(model: CachedModel) -> set[Attention]:
    """The kinds of attention among a model's layers."""
    return {_kind(model, attention_shape(each)) for each in set(model.computed.attentions)}


def _kind(model: CachedModel, shape: AttentionShape) -> Attention:
    single = AttentionKind(shape, model.dtype, model.kv_dtype, one_row_each=True)
    return Attention(
        head_dim=shape.head_dim,
        window=shape.window is not None,
        capped=shape.score_cap is not None,
        dtype=str(model.dtype).removeprefix("torch."),
        fp8=model.kv_dtype is FP8,
        decodes=not single.uses_tensor_cores,
    )
