"""DFlash 2's convolutions: around the attention and the network of each layer, over the rows of a block.

    x --> kernels --> convolve(x, side 0) --> attention or network --> convolve(., side 1) --> added to the stream
           |                                                                ^
           '-- of both sides, products of x itself -------------------------'

    convolve: out_t = sum over taps o of (base[o] + dynamic_t[o]) * x_(t - o); rows before the block are zero

A channel has a base kernel of its own; channels of a group share the dynamic part. Source: z-lab's DFlash 2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import BlockBuffers, FeedForward
from faser.kernels.interface.shapes import PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """base: [2, T, H] float32, of both sides. dynamic: the product that gives [2, T, H / group_size]."""

    base: Tensor
    dynamic: PackedLinear
    group_size: int

    def begin(self, backend: Backend, x: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """x convolved, and the dynamic kernels of the other side. x: [B, H]; depth: see BlockRows."""
        sides, taps, width = self.base.shape
        out = x.new_empty((len(x), sides * taps * width // self.group_size))
        kernels = backend.linear(x, self.dynamic, out).float().view(len(x), sides, taps, -1)
        return convolve(x, self.base[0], kernels[:, 0], depth), kernels[:, 1]

    def end(self, x: Tensor, kernels: Tensor, depth: Tensor) -> Tensor:
        """x convolved with what `begin` gave for this side."""
        return convolve(x, self.base[1], kernels, depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConvolutions:
    """Convolutions of one layer."""

    attention: Convolution
    network: Convolution

    def feed_forward(
        self,
        backend: Backend,
        mixed: Tensor,
        hidden: Tensor,
        block: FeedForward,
        kernels: Tensor,
        depth: Tensor,
        buffers: BlockBuffers,
    ) -> None:
        """Blocks.feed_forward with the end of the attention's convolution and all of the network's.

        kernels: what `begin` gave for the attention.
        """
        added = backend.linear(mixed, block.attention_out, buffers.normed)
        hidden.add_(self.attention.end(added, kernels, depth))
        normed = backend.rms_norm(hidden, block.gate_up.norm, block.gate_up.eps, buffers.normed)
        inputs, kernels = self.network.begin(backend, normed, depth)
        gate_up = backend.linear(inputs, block.gate_up.linear, buffers.gate_up)
        inner = backend.gate(gate_up, buffers.inner, block.activation)
        added = backend.linear(inner, block.down, buffers.normed)
        hidden.add_(self.network.end(added, kernels, depth))


def convolve(x: Tensor, base: Tensor, dynamic: Tensor, depth: Tensor) -> Tensor:
    """Convolve rows x [B, H] with those before them. base: [T, H]; dynamic: [B, T, groups], both float32.

    A group is adjacent channels. depth: [B], how many rows of its block come before a row, directly before it.
    Returns [B, H] in the type of x.
    """
    _, taps, groups = dynamic.shape
    kernels = base + dynamic[..., None].expand(-1, -1, -1, x.shape[1] // groups).flatten(2)
    values = x.float()
    found = kernels[:, 0] * values
    for tap in range(1, taps):
        found += torch.where(depth[:, None] >= tap, kernels[:, tap] * values.roll(tap, 0), 0.0)
    return found.to(x.dtype)
