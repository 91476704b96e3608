"""What divides a GPU between two lanes: groups of its processors, or two streams that compete for all of them.

Owns the groups' contexts and streams. What runs on a lane is given the lane, whose place names its stream. Which
shares are offered is chosen in gpu_shares, from rates of this very device. Nothing of this has run on a GPU yet.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

from faser.engine.execution.overlap.gpu_shares import describe, shares_for
from faser.engine.execution.overlap.kept_rates import RatesOf
from faser.engine.execution.overlap.partition import Draft, Lane, OverlapResult, Partition, Serial, Verify
from faser.engine.execution.overlap.stream_lanes import LanePair, StreamLanes
from faser.errors import ConfigError
from faser.kernels.cuda.green_contexts import GreenContextError, GreenDriver, Group, open_stream
from faser.kernels.cuda.streams import LaneDevice
from faser.kernels.interface.processors import DeviceLane

D = TypeVar("D")
V = TypeVar("V")

_log = logging.getLogger("faser.engine")

_NOMINAL_SHARE = 0.5  # of two streams, neither has processors of its own
# Drafting is a chain of small kernels that never fills the device, verification has blocks enough to use what is
# left: with the short ones served first, both are done earliest. Where groups are disjoint, nobody is first.
_DRAFT_PRIORITY, _VERIFY_PRIORITY = -1, 0


class Streams:
    """Two plain streams: blocks of both lanes' kernels compete for every processor. See Partition."""

    name = "streams"
    share = _NOMINAL_SHARE

    def __init__(self, device: LaneDevice) -> None:
        self._lanes = StreamLanes(device)
        self._pair = LanePair(
            draft=_lane("draft", self.share, device.num_processors, device.stream(_DRAFT_PRIORITY)),
            verify=_lane("verify", 1 - self.share, device.num_processors, device.stream(_VERIFY_PRIORITY)),
        )

    def shares(self) -> tuple[float, ...]:
        """A single one, by name: nobody has processors of its own."""
        return (self.share,)

    def resize(self, share: float) -> None:
        if share != self.share:
            raise ConfigError(f"a draft lane's share is {share}; of two streams it is {self.share} by name")

    def both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        return self._lanes.both(self._pair, draft, verify)

    def close(self) -> None:
        self._lanes.close()


class SmGroups:
    """Groups of processors that nobody shares: verification has a group proper, drafting what the split left.

    All splits, their contexts and their streams are made here, and again never. Lanes change their groups between
    two calls of `both`, when neither has work. What was recorded on a lane must not be replayed after `close`.

    verify_counts: how many processors a verify lane may have; the driver may make more of it.
    Raises GreenContextError where the driver refuses, and where no group would leave any processors.
    """

    name = "sm"

    def __init__(self, driver: GreenDriver, device: LaneDevice, verify_counts: Sequence[int]) -> None:
        self._driver = driver
        self._device = device
        self._made = ExitStack()
        with ExitStack() as unfinished:
            self._pairs = self._divide(verify_counts, unfinished)
            self._lanes = StreamLanes(device)
            self._made = unfinished.pop_all()
        self.resize(self.shares()[0])

    @property
    def share(self) -> float:
        return self._share

    def shares(self) -> tuple[float, ...]:
        return tuple(self._pairs)

    def resize(self, share: float) -> None:
        pair = self._pairs.get(share)
        if pair is None:
            raise ConfigError(f"a draft lane's share is {share}; of this GPU it is one of {self.shares()}")
        self._share, self._pair = share, pair

    def both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        return self._lanes.both(self._pair, draft, verify)

    def close(self) -> None:
        with self._made:
            self._lanes.close()

    def _divide(self, verify_counts: Sequence[int], made: ExitStack) -> dict[float, LanePair]:
        """By the draft lane's share, ascending. made: gets what destroys the contexts and streams."""
        total = self._driver.num_processors
        found: dict[float, LanePair] = {}
        for count in sorted(verify_counts, reverse=True):
            group, rest = self._driver.split(count)
            share = rest.count / total
            if rest.count and share not in found:
                found[share] = LanePair(
                    draft=_lane("draft", share, rest.count, self._stream(rest, made)),
                    verify=_lane("verify", 1 - share, group.count, self._stream(group, made)),
                )
        if not found:
            raise GreenContextError(f"{total} processors cannot be divided: groups of {verify_counts} leave none")
        return found

    def _stream(self, group: Group, made: ExitStack) -> object:
        return self._device.adopt(open_stream(self._driver, group, made))


def make_gpu_partition(
    name: str, device: LaneDevice, open_driver: Callable[[], GreenDriver], rates: RatesOf
) -> tuple[Partition, str | None]:
    """serial, streams, sm, or auto, which is sm: with streams instead where the GPU cannot be divided.

    The second says why it cannot; None: the partition is the one asked for. open_driver may raise
    GreenContextError. rates: by which sm chooses shares; a GPU whose rates cannot be measured cannot be divided.
    Raises ConfigError for what a CPU divides, and for a name that is not known.
    """
    match name:
        case "serial":
            return Serial(), None
        case "streams":
            return Streams(device), None
        case "sm" | "auto":
            try:
                return _groups(open_driver(), device, rates), None
            except GreenContextError as refused:
                return Streams(device), str(refused)
        case "cores":
            raise ConfigError("partition cores divides a CPU; device is a GPU: choose auto, sm, streams or serial")
        case _:
            raise ConfigError(f"partition is {name}; on a GPU it must be auto, sm, streams or serial")


def _groups(driver: GreenDriver, device: LaneDevice, rates_of: RatesOf) -> SmGroups:
    rates = rates_of(driver, device)
    splits = shares_for(rates)
    partition = SmGroups(driver, device, [each.verify for each in splits])
    _log.info("lanes may have %s", describe(rates, splits))
    return partition


def _lane(name: str, share: float, num_processors: int, stream: object) -> Lane:
    place = DeviceLane(name=name, share=share, num_processors=num_processors, stream=stream)
    return Lane(cores=None, place=place)
