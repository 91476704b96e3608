"""Gated short convolutions, in place of attention: the mixer of most layers of LFM2.

A row gives b, c and x, [H] each, and a layer has weights w, [kernel, H], the row's own last:

    u_t = b_t x_t    (rounded to the type of the activations)
    o_t = c_t Σ_j w_j u_(t - kernel + 1 + j),    where rows before the first one are zero

All that a sequence keeps is its last u, in the same places as the inputs of a delta net's convolution
(delta_net.py): a refused draft is overwritten by the next rows, and a snapshot has the kernel - 1 u before its
end.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvShape:
    """Size of a short convolution: H channels, of which each sees `kernel` rows, its own included."""

    channels: int
    kernel: int

    @property
    def q_size(self) -> int:
        """Columns of what the layer gives to its output product."""
        return self.channels

    @property
    def columns(self) -> int:
        """Return the columns of a row: b, c, x."""
        return 3 * self.channels

    @property
    def state_values(self) -> int:
        """Return how many float32 values the state has: none, there are only inputs."""
        return 0

    @property
    def row_values(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class ShortConv:
    """Weights of a short convolution. conv: [kernel, H] float32."""

    conv: Tensor
