"""Mixers: what a layer may have in place of attention, and the recurrent states of sequences that go with it.

A mixer is a Mixer: its weights, its sizes, and its arithmetic in torch, which is the oracle of the kernels that a
backend has for it. delta_net.py and short_conv.py are examples.

What is kept of a sequence is its state after whole chunks of CHUNK tokens, and the rows since then:

    position    0 ....... | c ............ c + CHUNK - 1 | ........ n - 1 | n ..... n + γ |
    state       S after c |          rows are kept                        | drafted rows   |
                                                         (n is the next row, c <= n < c + CHUNK before the step)

A row's output follows from S and the kept rows of its chunk; nothing else depends on where a step begins or ends.
So a draft that is refused is rolled back by doing nothing: its rows are overwritten by the next ones, and no state
has them, since a chunk enters the state that is kept only when all its tokens are known. Drafted rows behind the
end of a chunk are computed with a copy of the state that lives as long as the call. A state after whole chunks has
the same bits however its tokens came: by prompt, by decoding or by drafts.

A snapshot is a copy of what any sequence needs that begins with the same c tokens: S after c, and the kernel - 1
inputs of convolutions before c. It has no rows, since c ends a chunk.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from faser.kernels.interface.shapes import RowLayout
from faser.optional import present

CHUNK = 16  # tokens
NUMBERS = 6  # of each sequence, in StateStep.numbers
States = Any  # opaque but for KeptStates: each backend returns objects of its own class; callers pass them back


class KeptStates(Protocol):
    """Recurrent states that their owner may copy: the part that all States share."""

    def kept(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Return the states [N, ...] and the inputs of convolutions of each layer that has a state.

        The inputs are [N, I, channels], that of position p at p modulo I. N: slots. Both are written in place by
        steps.
        """
        ...


class MixerShape(Protocol):
    """Sizes of a mixer. kind: its name in messages, in the plural.

    columns: of a row that it reads, which a product gives. q_size: columns that it gives to the output product.
    rate_columns: of a second product, in float32; 0: there is none. kernel: rows that its convolution sees, the
    row itself included; 1: there is none. channels: of these rows. state_size: of a sequence's state. row_sizes:
    of the values that are kept of a row; of both, all are float32.
    """

    kind: ClassVar[str]

    @property
    def columns(self) -> int: ...
    @property
    def q_size(self) -> int: ...
    @property
    def rate_columns(self) -> int: ...
    @property
    def kernel(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def state_size(self) -> tuple[int, ...]: ...
    @property
    def row_sizes(self) -> tuple[tuple[int, ...], ...]: ...


class Mixer(Protocol):
    """Weights of a mixer, float32, but for those of the products before and behind it."""

    @property
    def shape(self) -> MixerShape: ...

    def mix(self, x: Tensor, rates: Tensor | None, held: "LayerStates", step: "StateStep", out: Tensor) -> None:
        """Compute all rows of a step in torch: see Backend.mix. held: the layer's states."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """Size of the states of num_slots sequences, and of snapshots. layers: of each layer; None: it has no state.

    most_drafts: drafted rows that a sequence has in one step, at most. dtype: of the activations, in which inputs
    of convolutions are kept; all else is float32.
    """

    layers: tuple[MixerShape | None, ...]
    num_slots: int
    most_drafts: int
    dtype: torch.dtype
    num_snapshots: int = 0

    @property
    def shapes(self) -> list[MixerShape]:
        """Return those of the layers that have a state."""
        return [each for each in self.layers if each is not None]

    @property
    def kept_rows(self) -> int:
        """Rows that a sequence keeps: those of a chunk that is not whole, and drafts."""
        return CHUNK + self.most_drafts

    def kept_inputs(self, layer: MixerShape) -> int:
        """Inputs of convolutions that a sequence keeps; the refused ones are among them.

        A snapshot is taken up to CHUNK - 1 known rows after the end of its chunk, and needs the inputs before it.
        """
        return layer.kernel + self.most_drafts + (CHUNK - 1 if self.num_snapshots else 0)

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of one sequence."""
        total = 0
        for each in self.shapes:
            row_values = sum(map(math.prod, each.row_sizes))
            total += 4 * (_state_values(each) + self.kept_rows * row_values)
            total += self.kept_inputs(each) * each.channels * self.dtype.itemsize
        return total

    @property
    def snapshot_bytes(self) -> int:
        """Return the bytes of one snapshot."""
        inputs = sum((each.kernel - 1) * each.channels for each in self.shapes)
        return 4 * sum(map(_state_values, self.shapes)) + inputs * self.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        return self.num_slots * self.slot_bytes + self.num_snapshots * self.snapshot_bytes


def _state_values(layer: MixerShape) -> int:
    return math.prod(layer.state_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStep:
    """The rows of a step as the states of their sequences see them. [S] int64 each, of S sequences.

    states: of all slots. slots: each sequence's own. ends: tokens in the state that is kept, a multiple of CHUNK.
    starts: position of the first row; rows ends … starts - 1 are kept. counts: rows. num_drafts: how many of them,
    the last ones, may be refused. first_rows: in the step.
    sent: `numbers` on the device, at a place that stays, for work that a graph captures; the arrays are empty
    then. None: the backend sends them.
    """

    states: States
    slots: NDArray[np.int64]
    ends: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    num_drafts: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    sent: Tensor | None = None

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Stack slots, ends, starts, counts, new_ends and first_rows for kernels on a device: [NUMBERS, S]."""
        return np.stack((self.slots, self.ends, self.starts, self.counts, self.new_ends, self.first_rows))

    @property
    def new_ends(self) -> NDArray[np.int64]:
        """Return the states' ends after the step: all whole chunks of rows that cannot be refused are in them."""
        return (self.starts + self.counts - self.num_drafts) // CHUNK * CHUNK

    def sequences(self) -> Iterator["SequenceRows"]:
        """Yield where each sequence is, as plain integers."""
        columns = (self.slots, self.ends, self.starts, self.counts, self.new_ends, self.first_rows)
        for slot, end, start, count, new_end, first in zip(*(each.tolist() for each in columns), strict=True):
            yield SequenceRows(slot, end, start, new_end, slice(first, first + count))


class SequenceRows(NamedTuple):
    """A sequence in a step: see StateStep. rows: in the step."""

    slot: int
    end: int
    start: int
    new_end: int
    rows: slice


def row_counts(layout: RowLayout) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return each sequence's first row in the step, that row's position, and how many rows it has."""
    starts = layout.query_start.numpy().astype(np.int64)
    counts = np.diff(starts)
    return starts[:-1], layout.seq_len.numpy().astype(np.int64) - counts, counts


@dataclass(frozen=True, slots=True)
class LayerStates:
    """States of N slots in a layer, float32 but inputs. Rows of position p are at p modulo their number.

    state: [N, *state_size]. inputs: of the convolution, [N, inputs, channels]. rows: [N, rows, *size] of each of
    the row_sizes.
    """

    state: Tensor
    inputs: Tensor
    rows: tuple[Tensor, ...]

    @classmethod
    def allocate(cls, shape: StateShape, layer: MixerShape, device: torch.device) -> "LayerStates":
        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros((shape.num_slots, *size), dtype=dtype, device=device)

        return cls(
            state=zeros(*layer.state_size),
            inputs=zeros(shape.kept_inputs(layer), layer.channels, dtype=shape.dtype),
            rows=tuple(zeros(shape.kept_rows, *size) for size in layer.row_sizes),
        )


class TorchStates:
    """layers: of each layer; None: it has no state."""

    def __init__(self, shape: StateShape, device: torch.device) -> None:
        self.layers = tuple(
            None if each is None else LayerStates.allocate(shape, each, device) for each in shape.layers
        )

    def kept(self) -> list[tuple[Tensor, Tensor]]:
        """Return the state and inputs of each layer that has them. See KeptStates."""
        return [(each.state, each.inputs) for each in present(self.layers)]


def convolved(x: Tensor, weights: Tensor, kept: Tensor, start: int) -> Tensor:
    """Return the causal convolution of each channel of rows x, [R, channels], which are kept, in float32.

    weights: [kernel, channels], a row's own last. start: position of the first row.
    """
    past = len(weights) - 1
    known = before(kept, max(start - past, 0), start)
    whole = functional.pad(torch.cat((known, x)).float(), (0, 0, past - len(known), 0))
    keep(kept, x, start)
    windows = torch.stack([whole[tap : tap + len(x)] for tap in range(len(weights))], 1)
    return (windows * weights).sum(1)


def before(kept: Tensor, first: int, end: int) -> Tensor:
    """Return what is kept of the positions first … end - 1."""
    return kept[torch.arange(first, end, device=kept.device) % len(kept)]


def keep(kept: Tensor, new: Tensor, start: int) -> None:
    """Keep the last of the positions from start on, as many as there is room for."""
    last = new[-len(kept) :]
    end = start + len(new)
    kept[torch.arange(end - len(last), end, device=kept.device) % len(kept)] = last
