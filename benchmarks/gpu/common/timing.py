"""Moments on the device's own clock, so that what is timed need not be waited for; and how times are summed up."""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch


class DeviceClock(Protocol):
    """Marks stand in the order of the work that is given to the device."""

    def mark(self) -> Any:
        """Behind all that was given so far. Does not wait."""
        ...

    def between_s(self, marks: Sequence[Any]) -> list[float]:
        """Seconds from each mark to the next; waits for the last one."""
        ...

    def wait(self) -> None:
        """Until all that was given is done."""
        ...


class CudaClock:
    """See DeviceClock. Events on the current stream, which the marked work has to be given to."""

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between_s(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        self.wait()
        return [1e-3 * before.elapsed_time(after) for before, after in pairwise(marks)]

    def wait(self) -> None:
        torch.cuda.synchronize()


class HostClock:
    """See DeviceClock. Of a CPU, where all work is done by the time a call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def between_s(self, marks: Sequence[float]) -> list[float]:
        return [after - before for before, after in pairwise(marks)]

    def wait(self) -> None:
        pass


def clock_of(device: str) -> DeviceClock:
    return HostClock() if device == "cpu" else CudaClock()


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Median and the deciles at both ends, in milliseconds."""
    low, middle, high = np.percentile(np.array(seconds) * 1e3, (10, 50, 90))
    return {"median": round(float(middle), 4), "p10": round(float(low), 4), "p90": round(float(high), 4)}
