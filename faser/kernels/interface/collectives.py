"""Collectives: what the ranks of a model that is split over devices compute together.

Every rank calls the same ones in the same order, with tensors of the same shapes. Knows neither models nor steps.
"""

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """The ranks of one model, as one of them sees them.

    On a device calls do not wait for it, and may be captured in CUDA graphs.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place; every rank gets the same bits. x: contiguous. Returns x."""
        ...

    def gather(self, part: Tensor) -> list[Tensor] | None:
        """The parts of all ranks, by rank; None on every rank but the first. part: contiguous."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x with that of the first rank. x: contiguous."""
        ...


class DeviceCollectives(Collectives, Protocol):
    """Collectives of ranks that each compute on a device of their own."""

    def connect(self) -> None:
        """Connect to the other ranks, which call it too. Raises ConfigError for what is missing."""
        ...

    def close(self) -> None:
        """Let go of the other ranks. Does not wait for them."""
        ...
