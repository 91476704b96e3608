"""Gated delta nets: what a layer computes, and the recurrent states of sequences.

A value head has a state S, [Dk, Dv], that is zero before a sequence's first token. A row has a key k and a query
q, [Dk], of norm 1, a value v, [Dv], a rate β in (0, 1) and a decay g <= 0:

    S <- exp(g) S;    S <- S + k (β (v - Sᵀ k))ᵀ;    o = Sᵀ q / √Dk

Keys, queries and values are silu of a causal convolution, channel by channel, over the last `kernel` rows.
Source: Yang et al., arXiv:2412.06464, eq. 10.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.interface.shapes import RowLayout
from faser.kernels.interface.short_conv import ConvShape

CHUNK = 16  # tokens
NUMBERS = 6  # of each sequence, in StateStep.numbers
States = Any  # opaque but for KeptStates: each backend returns objects of its own class; callers pass them back


class KeptStates(Protocol):
    """Recurrent states that their owner may copy: the part that all States share."""

    def kept(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Return the states [N, Hv, Dk, Dv] and the inputs of convolutions of each layer that has a state.

        The inputs are [N, I, channels], that of position p at p modulo I. N: slots. Both are written in place by
        steps.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Heads of a delta net: Hk of Dk channels, Hv of Dv.

    Value head h reads key head h // (Hv // Hk), or if they are tiled, h % Hk.
    """

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    kernel: int
    tiled: bool = False

    @property
    def k_size(self) -> int:
        return self.num_k_heads * self.k_head_dim

    @property
    def q_size(self) -> int:
        """Columns of what the layer gives to its output product: those of all values."""
        return self.num_v_heads * self.v_head_dim

    @property
    def channels(self) -> int:
        """That the convolution has: of queries, keys, values."""
        return 2 * self.k_size + self.q_size

    @property
    def columns(self) -> int:
        """Return the columns of a row: queries, keys, values, z."""
        return self.channels + self.q_size

    @property
    def state_values(self) -> int:
        """Return how many float32 values the state of a sequence has."""
        return self.num_v_heads * self.k_head_dim * self.v_head_dim

    @property
    def row_values(self) -> int:
        """Return how many float32 values are kept of a row, besides the convolution's inputs."""
        return self.k_size + self.q_size + 2 * self.num_v_heads


MixerShape = DeltaShape | ConvShape  # of a layer that has a state in place of keys and values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class DeltaNet:
    """Weights but for those of the products. float32.

    conv: [kernel, channels], the row's own last. decay: [Hv], by which g = decay softplus(a + dt_bias); dt_bias:
    [Hv]. norm: [Dv], of what each head gives, with eps.
    """

    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


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
            total += 4 * (each.state_values + self.kept_rows * each.row_values)
            total += self.kept_inputs(each) * each.channels * self.dtype.itemsize
        return total

    @property
    def snapshot_bytes(self) -> int:
        """Return the bytes of one snapshot."""
        states = sum(each.state_values for each in self.shapes)
        inputs = sum((each.kernel - 1) * each.channels for each in self.shapes)
        return 4 * states + inputs * self.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        return self.num_slots * self.slot_bytes + self.num_snapshots * self.snapshot_bytes


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


def row_counts(layout: RowLayout) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return each sequence's first row in the step, that row's position, and how many rows it has."""
    starts = layout.query_start.numpy().astype(np.int64)
    counts = np.diff(starts)
    return starts[:-1], layout.seq_len.numpy().astype(np.int64) - counts, counts
