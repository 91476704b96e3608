"""Whether drafting may overlap with verification, on which partition, and which parts of a device lanes will have.

Knows how a partition is chosen and asked, not how it divides.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from faser.config.drafters import PASS_METHODS
from faser.config.engine import EngineConfig
from faser.config.speculation import AUTO
from faser.engine.execution.model_executor import Lanes
from faser.engine.execution.overlap.gpu_partition import make_gpu_partition
from faser.engine.execution.overlap.kept_rates import rates_on
from faser.engine.execution.overlap.partition import Lane, Partition, at_once, core_numbers, make_partition
from faser.errors import ConfigError
from faser.kernels.cuda.device_rates import Report
from faser.kernels.cuda.green_contexts import open_green_driver
from faser.kernels.cuda.streams import CudaLaneDevice
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.processors import DeviceLane

_log = logging.getLogger("faser.engine")

# Of a GPU: the partition of a name, and why it is another one than was asked for, if it is.
Divide = Callable[[str, torch.device], tuple[Partition, str | None]]


def divide_gpu(name: str, device: torch.device, report: Report = lambda *_: None) -> tuple[Partition, str | None]:
    """report: is told how far measuring is, where it has not been done before."""
    return make_gpu_partition(
        name, CudaLaneDevice(device), lambda: open_green_driver(device), rates_on(device, report)
    )


def make_lanes(
    config: EngineConfig,
    target: Backend,
    draft: Backend | None,
    partition: Partition | None = None,
    divide: Divide = divide_gpu,
) -> Lanes | None:
    """Where drafting may overlap with verification: with a draft model, whose drafts are point masses.

    draft: None: there is no draft model. partition: None: the one that the config names.
    Raises ConfigError where overlapping is demanded and impossible.
    """
    missing = _missing(config, target, draft)
    if config.spec_overlap == "on" and draft is None and config.speculation.policy != "off":
        raise ConfigError(_needs_draft_model(config.speculation.method))
    if config.spec_overlap == "on" and missing:
        raise ConfigError(f"spec_overlap is on, but {missing}")
    if config.spec_overlap == "off" or missing:
        return None
    fallback = ""
    if partition is None:
        partition, fallback = _partition(config, target.device, divide)
    return Lanes(partition=partition, target=target, draft=draft, fallback=fallback)


def _needs_draft_model(method: str) -> str:
    """Why drafting cannot overlap without a draft model, and what an operator can do, in one sentence."""
    drafter = "the default method" if method == AUTO else f"method {method}"
    source = "with the model itself" if method in PASS_METHODS else "from text alone"
    return (
        f"--spec-overlap on needs a draft model, and {drafter} drafts {source}; "
        """add --speculative-config '{"model": "DRAFT"}' or leave --spec-overlap at auto"""
    )


def _missing(config: EngineConfig, target: Backend, draft: Backend | None) -> str | None:
    """Why nothing can overlap."""
    speculation, cores = config.speculation, core_numbers(config.threads)
    if speculation.policy == "off":
        return "nobody drafts: the policy is off"
    if draft is None:
        return _needs_draft_model(speculation.method)
    if speculation.draft_sample_method == "probabilistic":
        return "draft_sample_method is probabilistic; only point masses can be judged at the border of two drafts"
    if speculation.rejection_sample_method == "synthetic":
        return "synthetic verdicts are no tokens of the target, which the next draft could start with"
    if config.spec_partition == "serial":
        return "spec_partition is serial: drafting and verification take turns"
    if target.device.type == "cpu" and len(cores) < 2:
        return f"two lanes take two cores; there is {len(cores)}"
    return None


def _partition(config: EngineConfig, device: torch.device, divide: Divide) -> tuple[Partition, str]:
    if device.type == "cpu":
        return make_partition(config.spec_partition, core_numbers(config.threads)), ""
    partition, refusal = divide(config.spec_partition, device)
    if refusal is not None:
        _log.warning("lanes share all of %s, as plain streams: it cannot be divided: %s", device, refusal)
    return partition, refusal or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlaces:
    """One of each for every share, ascending by the draft lane's; none where a partition divides no GPU."""

    draft: tuple[DeviceLane, ...] = ()
    verify: tuple[DeviceLane, ...] = ()


def places_of(partition: Partition) -> LanePlaces:
    """All that a partition will ever give out. It has its share back afterwards."""
    share_before, drafting, verifying = partition.share, [], []
    for share in partition.shares():
        partition.resize(share)
        joined = partition.both(_drafting, at_once(_verifying))
        drafting.append(joined.drafted)
        verifying.append(joined.verified)
    if drafting:
        partition.resize(share_before)
    return LanePlaces(
        draft=tuple(each.place for each in drafting if each.place is not None),
        verify=tuple(each.place for each in verifying if each.place is not None),
    )


def _drafting(lane: Lane, _until: object) -> Lane:
    return lane


def _verifying(lane: Lane) -> Lane:
    return lane
