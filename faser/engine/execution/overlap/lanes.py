"""The lanes of an engine: which partition divides the processors, if any, and the backends that compute there."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from faser.config.engine import EngineConfig
from faser.engine.execution.overlap.partition import (
    Cores,
    Lane,
    Partition,
    PendingResult,
    Serial,
    core_numbers,
    synchronous,
)
from faser.engine.execution.overlap.streams import default_verify_counts, green_contexts, plain_streams
from faser.errors import ConfigError
from faser.kernels.cuda.lanes import CudaLaneDevice, GreenContextError, GreenDriver, LaneDevice, open_green_driver
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.shapes import DeviceLane, LaneError
from faser.optional import present

T = TypeVar("T")

_log = logging.getLogger("faser.engine")

# From a partition's name and a GPU: the partition, and why it is another one than the named one, if it is.
DivideGpu = Callable[[str, torch.device], tuple[Partition, str | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """fallback: why the partition is not the configured one; empty: it is."""

    partition: Partition
    target: Backend
    draft: Backend
    fallback: str = ""


def run_on_lane(backend: Backend, lane: Lane, call: Callable[[], T]) -> T:
    """Call while the backend computes on the lane's processors only."""
    backend.use(lane.processors)
    try:
        return call()
    finally:
        backend.use(None)


def enqueue_on_lane(backend: Backend, lane: Lane, enqueue: Callable[[], PendingResult[T]]) -> PendingResult[T]:
    """run_on_lane for work that is enqueued now and waited for later: both parts run on the lane."""
    pending = run_on_lane(backend, lane, enqueue)
    return replace(pending, wait=lambda: run_on_lane(backend, lane, pending.wait))


def divide_gpu(name: str, device: torch.device) -> tuple[Partition, str | None]:
    """Divide a GPU into two lanes, or fall back to streams: see make_gpu_partition."""
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
    if obstacle or draft is None or config.spec_overlap == "off":
        return None
    fallback = ""
    if partition is None:
        partition, fallback = _partition(config, target.device, divide)
    return Lanes(partition=partition, target=target, draft=draft, fallback=fallback)


def _obstacle(config: EngineConfig, target: Backend, draft: Backend | None) -> str | None:
    """Return why drafting and verification cannot overlap; None: they can."""
    speculation, cores = config.speculation, core_numbers(config.threads)
    if speculation.policy == "off":
        return "nothing is drafted: the policy is off"
    if draft is None:
        return f"method {speculation.method} has no draft model"
    if speculation.draft_sample_method == "probabilistic":
        return "draft_sample_method is probabilistic; only point masses can be verified by a bonus token"
    if speculation.rejection_sample_method == "synthetic":
        return "rejection_sample_method is synthetic; the next draft must start with tokens of the target"
    if config.tensor_parallel_size > 1:
        return "the model is divided among ranks"
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


def make_partition(name: str, cores: Sequence[int] | None = None) -> Partition:
    """On a CPU: serial, cores, or auto, which is cores where there are two. cores: None: all of this process.

    Raises ConfigError for another name, and for cores where there are fewer than two.
    """
    if name not in ("serial", "cores", "auto"):
        raise ConfigError(f"partition is {name}; on a CPU it must be auto, serial or cores")
    found = core_numbers() if cores is None else tuple(cores)
    return Serial() if name == "serial" or (name == "auto" and len(found) < 2) else Cores(found)


def make_gpu_partition(
    name: str, device: LaneDevice, open_driver: Callable[[], GreenDriver]
) -> tuple[Partition, str | None]:
    """serial, streams, sm, or auto, which is sm; streams in the place of sm where the GPU cannot be divided.

    The second value says why it cannot; None: the partition is the named one. open_driver may raise
    GreenContextError. Raises ConfigError for another name.
    """
    if name not in ("serial", "streams", "sm", "auto"):
        raise ConfigError(f"partition is {name}; on a GPU it must be auto, sm, streams or serial")
    if name == "serial":
        return Serial(), None
    if name == "streams":
        return plain_streams(device), None
    try:
        driver = open_driver()
        return green_contexts(driver, device, default_verify_counts(driver.num_processors)), None
    except GreenContextError as refusal:
        return plain_streams(device), str(refusal)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLanes:
    """The device lanes of every share, ascending by the draft lane's share; empty for a partition of a CPU."""

    draft: tuple[DeviceLane, ...] = ()
    verify: tuple[DeviceLane, ...] = ()


def device_lanes_of(partition: Partition) -> DeviceLanes:
    """All device lanes that a partition will ever use. Its share is the same afterwards."""
    share_before, draft_lanes, verify_lanes = partition.share, [], []
    for share in partition.shares():
        partition.resize(share)
        joined = partition.run_both(lambda lane, _verify_done: lane, synchronous(lambda lane: lane))
        draft_lanes.append(joined.drafted)
        verify_lanes.append(joined.verified)
    if draft_lanes:
        partition.resize(share_before)
    return DeviceLanes(
        draft=tuple(present(each.device_lane for each in draft_lanes)),
        verify=tuple(present(each.device_lane for each in verify_lanes)),
    )


def make_on_lanes(
    lanes: Lanes, make: Callable[[DeviceLanes], T], otherwise: Callable[[], Partition] | None
) -> tuple[Lanes, T]:
    """Return the lanes and the result of `make` on them: other lanes if these cannot run the models' kernels.

    otherwise: makes the partition that replaces this one, and frees what the failed try has left; None: there is
    no other. Raises LaneError where neither partition can run them.
    """
    try:
        return lanes, make(device_lanes_of(lanes.partition))
    except LaneError as error:
        if otherwise is None:
            raise
        refusal = str(error)
    lanes.partition.close()
    replaced = replace(lanes, partition=otherwise(), fallback=refusal)
    names = replaced.partition.name, lanes.partition.name
    _log.warning("falling back to partition %s (requested %s): %s", *names, refusal)
    return replaced, make(device_lanes_of(replaced.partition))
