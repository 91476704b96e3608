"""Gated short convolutions, in place of attention: the mixer of most layers of LFM2.

A row gives b, c and x, [H] each, and a layer has weights w, [kernel, H], the row's own last:

    u_t = b_t x_t    (rounded to the type of the activations)
    o_t = c_t Σ_j w_j u_(t - kernel + 1 + j),    where rows before the first one are zero

All that a sequence keeps is its last u, as inputs of a convolution (mixers.py): a refused draft is overwritten by
the next rows, and a snapshot has the kernel - 1 u before its end.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from faser.kernels.interface.mixers import LayerStates, StateStep, convolved


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvShape:
    """Size of a short convolution: H channels, of which each sees `kernel` rows, its own included."""

    kind: ClassVar[str] = "short convolutions"
    rate_columns: ClassVar[int] = 0
    state_size: ClassVar[tuple[int, ...]] = (0,)  # there are only inputs
    row_sizes: ClassVar[tuple[tuple[int, ...], ...]] = ()

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class ShortConv:
    """Weights of a short convolution. conv: [kernel, H] float32."""

    shape: ConvShape
    conv: Tensor

    def mix(self, x: Tensor, rates: Tensor | None, held: LayerStates, step: StateStep, out: Tensor) -> None:
        """Write o to out. x: [R, columns], b, c, x."""
        assert rates is None, "a short convolution has no rates"
        for slot, _, start, _, rows in step.sequences():
            b, c, given = x[rows].chunk(3, -1)
            out[rows] = (c * convolved(b * given, self.conv, held.inputs[slot], start)).to(out.dtype)
