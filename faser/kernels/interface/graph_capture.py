"""CUDA graphs: device work that a backend captures once and replays many times.

A graph works at fixed addresses: every buffer it reads or writes stays in place, and the host writes the inputs of
the next replay into those buffers. Nothing here knows models, sequences or tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.interface.drafting import FollowedRows, StepMatch
from faser.kernels.interface.shapes import AttentionPlan, AttentionShape, RowLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBatchSize:
    """Rows and sequences of a captured step. The real ones come first, padding follows.

    one_row_each: every sequence has exactly one row, as in decoding without drafts; rows equals sequences.
    rows_each: every sequence, padding included, has exactly this many rows, as where all verify drafts of one
    length; None: any number.
    tile_rows: attention's tiles are for sequences of at most this many rows; one with more rows takes several of
    them. None: for as many as one sequence may have while all others have one.
    """

    rows: int
    sequences: int
    one_row_each: bool
    rows_each: int | None = None
    tile_rows: int | None = None


class CapturedGraph(Protocol):
    """Captured device work; one thread at a time may replay it."""

    def replay(self) -> None:
        """Launch the work. Does not wait."""
        ...


class StagingBuffer(Protocol):
    """A pinned host buffer and its copy at a fixed place on the device."""

    @property
    def device(self) -> Tensor:
        """Return the numbers [count] on the device; work launched after a `send` reads those of that send."""
        ...

    def host(self) -> NDArray[Any]:
        """Return a host buffer [count] of arbitrary values, to be filled before the next `send`.

        Two host buffers take turns: waits until the device has copied what the send before the last one sent.
        """
        ...

    def send(self) -> None:
        """Launch the copy to the device; skipped if the device has these numbers already. Does not wait."""
        ...

    def will_change(self) -> None:
        """Work on the device writes to the numbers: the next send is not skipped."""
        ...


class Readback(Protocol):
    """Values on their way from the device to the host."""

    def wait(self) -> tuple[NDArray[Any], ...]:
        """The values, once all work launched before the readback is done. May be called again."""
        ...


class GraphCapture(Protocol):
    """Captures graphs of one backend instance on one lane. They share a memory pool: no two run at the same time.

    Staging buffers and readbacks are not bound to the lane: their copies run on the caller's current stream.
    """

    def tile_rows(self, shape: AttentionShape) -> tuple[int, ...]:
        """Most rows of one sequence that a tile of attention holds, for each width but the widest, ascending.

        From 2 on, since one row has sizes of its own. Wider tiles than a step needs make its attention slower,
        narrower ones read the positions of a sequence several times.
        """
        ...

    def reserve(self, shape: AttentionShape, sizes: Sequence[GraphBatchSize]) -> None:
        """Make room for what attention keeps during steps of these sizes, before a step or graph knows its place.

        Otherwise a larger step gets new memory, and the graphs that know the old one keep that too.
        """
        ...

    def plan(self, size: GraphBatchSize, block_size: int, max_blocks: int) -> AttentionPlan:
        """A plan at fixed addresses, for layouts that fit into `size`. All of it is padding until `update_plan`.

        max_blocks: most blocks of all sequences together.
        """
        ...

    def update_plan(self, plan: AttentionPlan, layout: RowLayout) -> None:
        """Make `plan` the plan of this layout, for all work launched from now on.

        Rows and sequences beyond the layout's are padding: they store nothing, and their results are arbitrary.
        """
        ...

    def match(self, step: StepMatch) -> None:
        """Launch the search for what a step accepts."""
        ...

    def may_advance(self, plan: AttentionPlan) -> bool:
        """Return whether `advance` serves this plan, which work has been captured with."""
        ...

    def advance(self, plan: AttentionPlan, rows: FollowedRows, step: StepMatch | None) -> None:
        """Launch the move of a plan's rows to the next pass of drafts that follow a step.

        The plan has one row for each sequence, and is that of the longest sequences that there can be. step: of a
        first pass, whose rows are the last two tokens of each draft's sequence; None: a row follows the last pass.
        """
        ...

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        """Run the work until its kernels are loaded, then capture it.

        The work must use tensors that stay alive and in place, and must not wait for the device. The graph owns
        what the work allocates.
        """
        ...

    def staging_buffer(self, count: int, dtype: torch.dtype) -> StagingBuffer: ...

    def readback(self, values: Sequence[Tensor]) -> Readback:
        """Launch copies of device tensors to the host. Later work may overwrite the tensors."""
        ...

    @property
    def graph_bytes(self) -> int:
        """Device memory that the graphs hold, buffers of attention included; 0 where that is not known."""
        ...
