"""Work that is recorded once and replayed: what a backend offers beside eager calls, where its device can.

A recording is device work at fixed addresses: whatever it reads and writes stays where it is, and the host says
what is new by writing into those places before each replay. Nothing here knows models, sequences or tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.interface.backend import AttentionPlan, RowLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBatchSize:
    """The size of a recorded step: of so many rows and sequences, real ones first, padding behind.

    one_row_each: every sequence has exactly one row, as in plain decoding; then rows equals sequences.
    """

    rows: int
    sequences: int
    one_row_each: bool


class CapturedGraph(Protocol):
    """Device work that is given again as often as wanted, by the thread that has it in hand."""

    def replay(self) -> None:
        """Give it to the device. Does not wait."""
        ...


class StagingBuffer(Protocol):
    """Numbers that the host writes and the device reads at a fixed place."""

    @property
    def device(self) -> Tensor:
        """[count], on the device: what was sent last, for work given after that."""
        ...

    def host(self) -> NDArray[Any]:
        """[count], to be filled for the next send; what is in there is arbitrary.

        Waits until the device has copied what was sent from there before, which is two sends ago.
        """
        ...

    def send(self) -> None:
        """Give the copy to the device, unless it has these numbers already. Does not wait."""
        ...


class Readback(Protocol):
    """Values on their way from the device."""

    def wait(self) -> tuple[NDArray[Any], ...]:
        """The values, when everything given to the device before the fetch is done. May be asked again."""
        ...


class GraphCapture(Protocol):
    """Of one backend instance at one place: its recordings share a pool of memory, so no two run at the same time.

    Stages and fetches belong to no place: they are work for the stream that is the caller's current one.
    """

    def plan(self, bucket: GraphBatchSize, block_size: int, max_blocks: int) -> AttentionPlan:
        """A plan of fixed places for layouts that fit into the bucket; its sequences have max_blocks at most.

        max_blocks counts the blocks of all sequences together. Until `lay_out` it is all padding.
        """
        ...

    def lay_out(self, plan: AttentionPlan, layout: RowLayout) -> None:
        """Make it the plan of a layout, for whatever is given to the device from now on.

        Rows and sequences beyond the layout's are padding: they store nothing, and what they yield is arbitrary.
        """
        ...

    def record(self, work: Callable[[], None]) -> CapturedGraph:
        """Run it as often as kernels need to be ready, then record it.

        It must use tensors that stay alive and in place, and must not wait for the device. What is allocated
        within it belongs to the recording.
        """
        ...

    def stage(self, count: int, dtype: torch.dtype) -> StagingBuffer: ...

    def fetch(self, values: Sequence[Tensor]) -> Readback:
        """Bring tensors of the device to the host. They may be overwritten by work given later."""
        ...

    @property
    def recorded_bytes(self) -> int:
        """Device memory that the recordings hold, buffers of attention included; 0 where that is not known."""
        ...
