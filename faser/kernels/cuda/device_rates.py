"""What parts of a GPU are able to do: bytes moved and operations computed in a second, for every way to divide it.

Owns how that is measured and the values. Knows nothing of who will have the parts, nor where rates are kept. None
of it has run on a GPU yet.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from faser.kernels.cuda.green_contexts import GROUP_UNIT, GreenContextError, GreenDriver, Group, open_stream
from faser.kernels.cuda.streams import LaneDevice

STAGE = "measuring the GPU's processors"
_REPEATS = 7
_WARM_UPS = (
    32  # on everything, before anything is timed: an idle device has a slow clock. 6 to 40 ms are expected.
)

# A stage, how much of it is done, and how much there is.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRates:
    """One way to divide a device. verify: processors of the group; draft: of the remainder.

    operations_per_s: multiplications and additions of a product in bfloat16, on the group alone.
    bytes_per_s: read and written by a kernel that only moves, on the remainder alone.
    """

    verify: int
    draft: int
    operations_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Of a whole device, and of every way to divide it, ascending by the remainder.

    Raises ValueError for what cannot have been measured.
    """

    num_processors: int
    operations_per_s: float
    bytes_per_s: float
    splits: tuple[SplitRates, ...]

    def __post_init__(self) -> None:
        rates = [self.operations_per_s, self.bytes_per_s]
        rates += [rate for each in self.splits for rate in (each.operations_per_s, each.bytes_per_s)]
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"rates are {rates}; all must be above 0 and finite")
        drafts = [each.draft for each in self.splits]
        if not drafts or drafts != sorted(set(drafts)):
            raise ValueError(f"remainders are {drafts}; there must be some, ascending, each once")
        for each in self.splits:
            if min(each.verify, each.draft) < 1 or each.verify + each.draft > self.num_processors:
                raise ValueError(
                    f"{each.verify} and {each.draft} processors are no split of {self.num_processors}"
                )


class RateLoads(Protocol):
    """Work of one kind each, given to the calling thread's current stream. Nothing waits for the device."""

    @property
    def copy_bytes(self) -> int:
        """Read and written by one copy."""
        ...

    @property
    def product_operations(self) -> int: ...

    def copy(self) -> None:
        """Bound by memory: far more than the device's caches hold."""
        ...

    def product(self, num_processors: int) -> None:
        """Bound by computing. num_processors: how many there are for it."""
        ...

    def forget(self) -> None:
        """Give up what products keep for each stream that they were given to. The device must have done them.

        So does whoever else computes products in this process, recordings included: there must be none.
        """
        ...


def measure_rates(
    driver: GreenDriver, device: LaneDevice, opened: AbstractContextManager[RateLoads], report: Report
) -> DeviceRates:
    """Rates of the device and of its parts, each alone on the device.

    Nobody else may compute meanwhile, and nothing may have been recorded before: see RateLoads.forget.

    opened: has the loads from when it is entered on.
    Groups and remainders have a context each, one at a time, destroyed when the part is measured.
    Raises GreenContextError where the driver refuses, for a device too small to be divided, and where the work
    itself fails: out of memory, for example.
    """
    try:
        splits = splits_of(driver)
        with opened as loads:
            device.wait()  # their tensors were made on the caller's stream
            try:
                return _measured(driver, device, loads, splits, report)
            finally:
                device.wait()  # for work that was given before something failed
    except RuntimeError as error:
        raise GreenContextError(f"{STAGE}: {str(error).partition(chr(10))[0]}") from error


def splits_of(driver: GreenDriver) -> tuple[tuple[Group, Group], ...]:
    """Every way to divide all processors into a group and a remainder that has some, ascending by the remainder.

    Of 132: 128 and 4, 120 and 12 … 8 and 124. Raises GreenContextError where there is none.
    """
    total = driver.num_processors
    found: dict[int, tuple[Group, Group]] = {}
    for count in reversed(range(GROUP_UNIT, total, GROUP_UNIT)):
        group, rest = driver.split(count)
        if rest.count:
            found[rest.count] = group, rest
    if not found:
        raise GreenContextError(
            f"{total} processors cannot be divided: the smallest group has {GROUP_UNIT}, and some must remain"
        )
    return tuple(found[count] for count in sorted(found))


def _measured(
    driver: GreenDriver,
    device: LaneDevice,
    loads: RateLoads,
    splits: tuple[tuple[Group, Group], ...],
    report: Report,
) -> DeviceRates:
    report(STAGE, 0, len(splits) + 1)
    total, everything = driver.num_processors, device.stream(0)
    with device.on(everything):
        for _ in range(_WARM_UPS):
            loads.product(total)
    operations_per_s = _product_rate(device, everything, loads, total)
    bytes_per_s = _copy_rate(device, everything, loads)
    found = []
    for done, (group, rest) in enumerate(splits, start=1):
        report(STAGE, done, len(splits) + 1)
        with _part(driver, device, group) as stream:
            group_rate = _product_rate(device, stream, loads, group.count)
        with _part(driver, device, rest) as stream:
            rest_rate = _copy_rate(device, stream, loads)
        found.append(
            SplitRates(verify=group.count, draft=rest.count, operations_per_s=group_rate, bytes_per_s=rest_rate)
        )
    report(STAGE, len(splits) + 1, len(splits) + 1)
    return DeviceRates(
        num_processors=total,
        operations_per_s=operations_per_s,
        bytes_per_s=bytes_per_s,
        splits=tuple(found),
    )


@contextmanager
def _part(driver: GreenDriver, device: LaneDevice, group: Group) -> Iterator[object]:
    """A stream on a group. Its context is destroyed when the device has done what was given there."""
    with ExitStack() as made:
        stream = device.adopt(open_stream(driver, group, made))
        made.callback(device.wait)
        yield stream


def _product_rate(device: LaneDevice, stream: object, loads: RateLoads, num_processors: int) -> float:
    seconds = _median_s(device, stream, lambda: loads.product(num_processors))
    loads.forget()
    return loads.product_operations / seconds


def _copy_rate(device: LaneDevice, stream: object, loads: RateLoads) -> float:
    return loads.copy_bytes / _median_s(device, stream, loads.copy)


def _median_s(device: LaneDevice, stream: object, work: Callable[[], None]) -> float:
    """Seconds of one run, of several in a row behind one that only warms up. The device has done all of them."""
    marks = [device.event() for _ in range(_REPEATS + 1)]
    with device.on(stream):
        work()
        marks[0].mark()
        for mark in marks[1:]:
            work()
            mark.mark()
    marks[-1].wait()
    seconds = statistics.median(device.elapsed_s(*each) for each in pairwise(marks))
    if seconds <= 0:
        raise GreenContextError(f"{STAGE}: a run took {seconds} s by the device's clock")
    return seconds
