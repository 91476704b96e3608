"""Collectives: what the ranks of a model that is split over devices compute together.

Every rank calls the same ones in the same order, with tensors of the same shapes. Knows neither models nor steps.
"""

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """The ranks of one model, as one of them sees them."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place; every rank gets the same bits. x: contiguous. Returns x."""
        ...

    def gather(self, part: Tensor) -> list[Tensor] | None:
        """The parts of all ranks, by rank; None on every rank but the first. part: contiguous."""
        ...
