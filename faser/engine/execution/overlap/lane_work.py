"""Calls with a backend that computes on a lane's processors only.

Knows neither what is computed nor who divides the processors.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from faser.engine.execution.overlap.partition import Lane, PendingResult
from faser.kernels.interface.backend import Backend

T = TypeVar("T")


def on_lane(backend: Backend | None, lane: Lane, call: Callable[[], T]) -> T:
    """What it returns. backend: None: nothing is computed."""
    if backend is None:
        return call()
    backend.use(lane.processors)
    try:
        return call()
    finally:
        backend.use(None)


def given_on_lane(backend: Backend, lane: Lane, give: Callable[[], PendingResult[T]]) -> PendingResult[T]:
    """The same for work that is given first and waited for later."""
    underway = on_lane(backend, lane, give)
    return replace(underway, wait=lambda: on_lane(backend, lane, underway.wait))
