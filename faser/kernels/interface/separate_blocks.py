"""Layers and their units as smaller operations, one after the other: of backends without better ones."""

from torch import Tensor

from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import (
    BlockBuffers,
    Blocks,
    DecoderStack,
    FeedForward,
    LayerBuffers,
    NormedLinear,
)
from faser.kernels.interface.shapes import AttentionPlan, KvCache


class SeparateLayers:
    """See Layers. The backend's attention and units, one after the other."""

    def __init__(self, backend: Backend, blocks: Blocks) -> None:
        self._backend = backend
        self._blocks = blocks

    def run(
        self,
        stack: DecoderStack,
        first: int,
        last: int,
        hidden: Tensor,
        cache: KvCache,
        plan: AttentionPlan,
        buffers: LayerBuffers,
        *,
        captures: bool = False,
    ) -> None:
        backend, blocks, layers = self._backend, self._blocks, stack.layers
        qkv, mixed, scratch = buffers.qkv, buffers.mixed, buffers.block
        if first < last and (product := layers[first].qkv) is not None:
            blocks.normed_linear(hidden, product, qkv, scratch)
        for number in range(first, last):
            layer = layers[number]
            if captures and layer.states is not None:
                layer.states[: len(hidden)].copy_(hidden)
            queries = backend.rope_append(
                qkv,
                layer.angles,
                cache,
                number,
                layer.shape,
                plan,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=layer.eps,
            )
            backend.attend(queries, cache, number, layer.shape, plan, mixed)
            following = layers[number + 1].qkv if number + 1 < last else None
            blocks.feed_forward(mixed, hidden, layer.feed_forward, following, qkv, scratch)


class SeparateBlocks:
    """See Blocks. The backend's operations, one after the other."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def normed_linear(self, hidden: Tensor, product: NormedLinear, out: Tensor, buffers: BlockBuffers) -> Tensor:
        normed = self._backend.rms_norm(hidden, product.norm, product.eps, buffers.normed)
        found: Tensor = self._backend.linear(normed, product.linear, out)
        return found

    def feed_forward(
        self,
        mixed: Tensor,
        hidden: Tensor,
        block: FeedForward,
        following: NormedLinear | None,
        out: Tensor,
        buffers: BlockBuffers,
    ) -> None:
        backend = self._backend
        backend.linear(mixed, block.attention_out, hidden, residual=hidden)
        self.normed_linear(hidden, block.gate_up, buffers.gate_up, buffers)
        backend.silu_mul(buffers.gate_up, buffers.inner)
        backend.linear(buffers.inner, block.down, hidden, residual=hidden)
        if following is not None:
            self.normed_linear(hidden, following, out, buffers)
