"""One layer's products, and what its units make of seeded rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from faser.kernels.cuda.choices import Choices
from faser.kernels.cuda.device import CudaDevice
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.flashinfer.device_kernels import triton_kernels
from faser.kernels.interface.blocks import BlockBuffers, Blocks, FeedForward, NormedLinear
from faser.kernels.interface.fp8 import Fp8Linear, Fp8Products, Fp8Rows, quantise_weight
from faser.kernels.interface.shapes import PackedLinear
from tests.engine.checkpoints.fp8_checkpoints import quantised_blocks
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer
from tests.kernels.cuda.triton.rows import DEVICE

HIDDEN, HEADS, INNER, QKV = 48, 32, 80, 64  # widths
EPS = 1e-5

Pack = Callable[[Tensor, Tensor | None], PackedLinear]
Outcome = tuple[Tensor, Tensor]  # the residual stream, the product for the next layer


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def backend_of(fp8: Fp8Products | None, choices: Choices | None = None) -> FlashInferBackend:
    """With FASER's own kernels as on a GPU: in Triton's interpreter, where there is none."""
    emulated = FakeAccelerator()
    device = CudaDevice(torch.device(DEVICE, 0)) if DEVICE == "cuda" else emulated
    return FlashInferBackend(device, FakeFlashInfer(emulated), triton_kernels(device.device), fp8, choices)


def expect_same(ours: Tensor, theirs: Tensor) -> None:
    """The same bits; on a GPU nearly, because kernels may add a row up in other orders."""
    if DEVICE == "cuda":
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2.0**-4, atol=2.0**-4)
    else:
        assert torch.equal(ours, theirs)


class Layer:
    """names of products in `fp8` are quantised, in blocks or by rows. has_bias: all products have one."""

    def __init__(
        self,
        backend: FlashInferBackend,
        dtype: torch.dtype,
        *,
        fp8: str = "",
        has_bias: bool = False,
        block: tuple[int, int] | None = None,
    ) -> None:
        self._backend, self._dtype, self._fp8, self._has_bias = backend, dtype, fp8.split(), has_bias
        self._block = block
        self.feed_forward = FeedForward(
            attention_out=self._packed("out", HIDDEN, HEADS),
            gate_up=NormedLinear(norm=self._norm(1), eps=EPS, linear=self._packed("gate_up", 2 * INNER, HIDDEN)),
            down=self._packed("down", HIDDEN, INNER),
        )
        self.following = NormedLinear(norm=self._norm(2), eps=EPS, linear=self._packed("qkv", QKV, HIDDEN))

    def _norm(self, seed: int) -> Tensor:
        return (1 + random(HIDDEN, seed=seed) / 4).to(self._dtype)

    def _packed(self, name: str, outputs: int, inputs: int) -> PackedLinear:
        weight = (random(outputs, inputs, seed=outputs) / inputs**0.5).to(self._dtype)
        bias = random(outputs, seed=3).to(self._dtype) if self._has_bias else None
        given: Tensor | Fp8Rows = self._quantised(weight) if name in self._fp8 else weight
        return self._backend.pack(given, bias)

    def _quantised(self, weight: Tensor) -> Fp8Rows:
        if self._block is None:
            return quantise_weight(weight)
        values, scales = quantised_blocks(weight.float(), self._block)
        by_row = scales.repeat_interleave(self._block[0], 0)[: len(weight)]
        return Fp8Rows(values=values, scales=by_row, group=self._block[1])

    def run(self, blocks: Blocks, rows: int, *, follows: bool = True) -> Outcome:
        hidden = random(rows, HIDDEN, seed=4).to(self._dtype)
        mixed = random(rows, HEADS, seed=5).to(self._dtype)
        out = torch.zeros(rows, QKV, dtype=self._dtype, device=DEVICE)
        sizes = {"normed": HIDDEN, "gate_up": 2 * INNER, "inner": INNER}
        buffers = BlockBuffers(
            **{name: torch.empty(rows, size, dtype=self._dtype, device=DEVICE) for name, size in sizes.items()}
        )
        blocks.feed_forward(mixed, hidden, self.feed_forward, self.following if follows else None, out, buffers)
        return hidden, out

    def first(self, blocks: Blocks, rows: int, out_dtype: torch.dtype) -> Tensor:
        """The product before the first attention."""
        hidden = random(rows, HIDDEN, seed=4).to(self._dtype)
        normed = torch.empty_like(hidden)
        buffers = BlockBuffers(normed=normed, gate_up=normed, inner=normed)
        out = torch.empty(rows, QKV, dtype=out_dtype, device=DEVICE)
        return blocks.normed_linear(hidden, self.following, out, buffers)

    def in_float64(self, rows: int) -> Outcome:
        """What run computes, and the product that follows, by the weights that any codes stand for."""
        hidden = random(rows, HIDDEN, seed=4).to(self._dtype).double()
        mixed = random(rows, HEADS, seed=5).to(self._dtype).double()
        block = self.feed_forward
        hidden += _product(mixed, block.attention_out)
        gate, up = _normed(hidden, block.gate_up).chunk(2, -1)
        hidden += _product(torch.nn.functional.silu(gate) * up, block.down)
        return hidden, _normed(hidden, self.following)

    def first_in_float64(self, rows: int) -> Tensor:
        return _normed(random(rows, HIDDEN, seed=4).to(self._dtype).double(), self.following)


def _product(x: Tensor, packed: PackedLinear) -> Tensor:
    is_quantised = isinstance(packed, Fp8Linear)
    weight: Tensor = packed.weight.dequantised() if is_quantised else packed.weight
    product = x @ weight.double().T
    return product if packed.bias is None else product + packed.bias.double()


def _normed(x: Tensor, product: NormedLinear) -> Tensor:
    normed = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * product.norm.double()
    return _product(normed, product.linear)
