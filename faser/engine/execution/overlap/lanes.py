"""Which backends compute on the lanes of a partition, and calls that keep a backend on one lane's processors."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from faser.engine.execution.overlap.partition import Lane, Partition, PendingResult, synchronous
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.shapes import DeviceLane, LaneError

T = TypeVar("T")

_log = logging.getLogger("faser.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """A partition and the backends on its lanes. draft: None where no draft model computes.

    fallback: why the partition is not the configured one; empty: it is.
    """

    partition: Partition
    target: Backend
    draft: Backend | None
    fallback: str = ""


def run_on_lane(backend: Backend | None, lane: Lane, call: Callable[[], T]) -> T:
    """Call while the backend computes on the lane's processors only. backend: None: the call computes nothing."""
    if backend is None:
        return call()
    backend.use(lane.processors)
    try:
        return call()
    finally:
        backend.use(None)


def enqueue_on_lane(backend: Backend, lane: Lane, enqueue: Callable[[], PendingResult[T]]) -> PendingResult[T]:
    """run_on_lane for work that is enqueued now and waited for later: both parts run on the lane."""
    pending = run_on_lane(backend, lane, enqueue)
    return replace(pending, wait=lambda: run_on_lane(backend, lane, pending.wait))


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
        draft=tuple(each.device_lane for each in draft_lanes if each.device_lane is not None),
        verify=tuple(each.device_lane for each in verify_lanes if each.device_lane is not None),
    )


def make_on_lanes(
    lanes: Lanes, make: Callable[[DeviceLanes], T], otherwise: Callable[[], Partition] | None
) -> tuple[Lanes, T]:
    """What `make` makes for the device lanes, and the lanes: other ones if these cannot run the models' kernels.

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
    _log.warning("lanes are %s instead of %s: %s", replaced.partition.name, lanes.partition.name, refusal)
    return replaced, make(device_lanes_of(replaced.partition))
