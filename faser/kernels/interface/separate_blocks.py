"""The units of a layer as a backend's single operations, one after the other: of backends without better ones."""

from torch import Tensor

from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import BlockBuffers, FeedForward, NormedLinear


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
