"""Whether drafting may overlap with verification, and which partition divides the processors for it."""

import logging
from collections.abc import Callable, Sequence

import torch

from faser.config.engine import EngineConfig
from faser.engine.execution.overlap.cores import Cores, core_numbers
from faser.engine.execution.overlap.green_contexts import GreenContexts, default_verify_counts
from faser.engine.execution.overlap.lanes import Lanes
from faser.engine.execution.overlap.partition import Partition, Serial
from faser.engine.execution.overlap.streams import Streams
from faser.errors import ConfigError
from faser.kernels.cuda.lanes import CudaLaneDevice, GreenContextError, GreenDriver, LaneDevice, open_green_driver
from faser.kernels.interface.backend import Backend

_log = logging.getLogger("faser.engine")

# From a partition's name and a GPU: the partition, and why it is another one than the named one, if it is.
DivideGpu = Callable[[str, torch.device], tuple[Partition, str | None]]


def divide_gpu(name: str, device: torch.device) -> tuple[Partition, str | None]:
    """See make_gpu_partition."""
    return make_gpu_partition(name, CudaLaneDevice(device), lambda: open_green_driver(device))


def make_lanes(
    config: EngineConfig,
    target: Backend,
    draft: Backend | None,
    partition: Partition | None = None,
    divide: DivideGpu = divide_gpu,
) -> Lanes | None:
    """The lanes of an engine whose drafting may overlap with verification; None where it may not.

    draft: None: there is no draft model. partition: None: the one that the config names.
    Raises ConfigError where overlapping is demanded and impossible.
    """
    obstacle = _obstacle(config, target, draft)
    if config.spec_overlap == "on" and obstacle:
        raise ConfigError(f"--spec-overlap is on, but {obstacle}")
    if obstacle or config.spec_overlap == "off":
        return None
    fallback = ""
    if partition is None:
        partition, fallback = _partition(config, target.device, divide)
    return Lanes(partition=partition, target=target, draft=draft, fallback=fallback)


def make_partition(name: str, cores: Sequence[int] | None = None) -> Partition:
    """On a CPU: serial, cores, or auto, which is cores where there are two. cores: None: all of this process.

    Raises ConfigError for a partition of a GPU, for an unknown name, and for fewer than two cores.
    """
    found = core_numbers() if cores is None else tuple(cores)
    match name:
        case "serial":
            return Serial()
        case "cores":
            return Cores(found)
        case "auto":
            return Cores(found) if len(found) > 1 else Serial()
        case "streams" | "sm":
            raise ConfigError(f"partition {name} divides a GPU; device is cpu: choose auto, cores or serial")
        case _:
            raise ConfigError(f"partition is {name}; it must be auto, serial or cores")


def make_gpu_partition(
    name: str, device: LaneDevice, open_driver: Callable[[], GreenDriver]
) -> tuple[Partition, str | None]:
    """serial, streams, sm, or auto, which is sm; streams in the place of sm where the GPU cannot be divided.

    The second value says why it cannot; None: the partition is the named one. open_driver may raise
    GreenContextError. Raises ConfigError for the partition of a CPU and for an unknown name.
    """
    match name:
        case "serial":
            return Serial(), None
        case "streams":
            return Streams(device), None
        case "sm" | "auto":
            try:
                driver = open_driver()
                return GreenContexts(driver, device, default_verify_counts(driver.num_processors)), None
            except GreenContextError as refusal:
                return Streams(device), str(refusal)
        case "cores":
            raise ConfigError("partition cores divides a CPU; device is a GPU: choose auto, sm, streams or serial")
        case _:
            raise ConfigError(f"partition is {name}; on a GPU it must be auto, sm, streams or serial")


def _obstacle(config: EngineConfig, target: Backend, draft: Backend | None) -> str | None:
    """Why drafting and verification cannot overlap; None: they can."""
    speculation, cores = config.speculation, core_numbers(config.threads)
    if speculation.policy == "off":
        return "nothing is drafted: the policy is off"
    if draft is None:
        return f"method {speculation.method} has no draft model"
    if speculation.draft_sample_method == "probabilistic":
        return "draft_sample_method is probabilistic; only point masses can be judged at the border of two drafts"
    if speculation.rejection_sample_method == "synthetic":
        return "rejection_sample_method is synthetic; the next draft must start with tokens of the target"
    if config.spec_partition == "serial":
        return "spec_partition is serial: drafting and verification take turns"
    if target.device.type == "cpu" and len(cores) < 2:
        return f"two lanes take two cores; there is {len(cores)}"
    return None


def _partition(config: EngineConfig, device: torch.device, divide: DivideGpu) -> tuple[Partition, str]:
    if device.type == "cpu":
        return make_partition(config.spec_partition, core_numbers(config.threads)), ""
    partition, refusal = divide(config.spec_partition, device)
    if refusal is not None:
        _log.warning("lanes share all of %s, as plain streams: it cannot be divided: %s", device, refusal)
    return partition, refusal or ""
