"""Triton's mixtures with weights in 8-bit floats, against those of the numbers that they stand for.

Bugs these tests have been seen to catch: the scales of the next expert, of gate for up, of the group beside.
"""

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.errors import ConfigError
from faser.kernels.cuda.flashinfer.backend import expert_matrices
from faser.kernels.cuda.flashinfer.device_kernels import experts_kernels, few_row_experts_kernels
from faser.kernels.interface.blocks import Experts
from faser.kernels.interface.fp8 import FP8, Fp8Linear, Fp8Rows, pack_fp8
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.cuda.triton.rows import DEVICE

COUNT, TOP, HIDDEN, INNER = 4, 2, 144, 96
KINDS = [(32, 64), (128, 128), None]  # rows and columns of a block; None: one scale a row


class Mixture:
    """Seeded weights whose scales differ by up to 50 times, and rows."""

    def __init__(self, block: tuple[int, int] | None) -> None:
        self._random, self._block = torch.Generator().manual_seed(0), block
        self.router = self.random(COUNT, HIDDEN).bfloat16()
        self.gate_up = tuple(self._rows(2 * INNER, HIDDEN) for _ in range(COUNT))
        self.down = tuple(self._rows(HIDDEN, INNER) for _ in range(COUNT))
        self.x = self.random(3, HIDDEN).bfloat16() * HIDDEN**0.5

    def random(self, rows: int, width: int) -> Tensor:
        drawn = torch.randn(rows, width, generator=self._random)
        return drawn / math.sqrt(width)

    def _rows(self, rows: int, width: int) -> Fp8Rows:
        lines, group = self._block or (1, width)
        scales = torch.exp(torch.randn(-(-rows // lines), -(-width // group), generator=self._random)) / 2
        by_row = scales.repeat_interleave(lines, 0)[:rows].contiguous()
        values = (self.random(rows, width)).to(FP8)
        if self._block is None:
            return Fp8Rows(values=values, scales=by_row[:, 0].contiguous())
        return Fp8Rows(values=values, scales=by_row, group=group)

    def block(self, gate_up: tuple[object, ...], down: tuple[object, ...]) -> Experts:
        backend = TorchBackend(DEVICE)
        router = backend.pack(self.router)
        return Experts(router=router, gate_up=gate_up, down=down, top_k=TOP, renormalise=True)

    def packed(self, weights: tuple[Fp8Rows, ...]) -> tuple[Fp8Linear, ...]:
        return tuple(pack_fp8(each, None, torch.device(DEVICE)) for each in weights)

    def wanted(self, x: Tensor) -> Tensor:
        """What is added, by dequantised weights in float32."""
        backend, hidden = TorchBackend(), torch.zeros_like(x, dtype=torch.float32)
        plain = [tuple(backend.pack(each.dequantised()) for each in some) for some in (self.gate_up, self.down)]
        block = Experts(
            router=backend.pack(self.router.float()), gate_up=plain[0], down=plain[1], top_k=TOP, renormalise=True
        )
        backend.experts(x.float(), block, hidden)
        return hidden


@pytest.mark.parametrize("block", KINDS)
def test_a_mixture_is_that_of_the_numbers_that_codes_and_scales_stand_for(block: tuple[int, int] | None) -> None:
    mixture = Mixture(block)
    packed = mixture.packed(mixture.gate_up), mixture.packed(mixture.down)
    run = experts_kernels(mixture.block(*packed), *map(expert_matrices, packed))
    x, read = mixture.x.to(DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    hidden, logits = torch.zeros_like(x), (x.float() @ mixture.router.to(DEVICE).float().T)
    run(x, logits, hidden, read, None, None)
    wanted = mixture.wanted(mixture.x)
    assert_close(hidden.cpu().float(), wanted, rtol=2.0**-6, atol=2.0**-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("block", KINDS[:1])
def test_few_rows_in_three_launches_are_those_of_five(block: tuple[int, int]) -> None:
    mixture = Mixture(block)
    packed = mixture.packed(mixture.gate_up), mixture.packed(mixture.down)
    made = mixture.block(*packed)
    router = expert_matrices((Routed(mixture.router.to(DEVICE)),))
    x, read = mixture.x.to(DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    norm = torch.ones(HIDDEN, device=DEVICE)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    wanted = mixture.wanted(normed.bfloat16().cpu())
    for name, run in few_row_experts_kernels(made, router, *map(expert_matrices, packed)).items():
        hidden = torch.zeros_like(x)
        partial(run, x, norm, 1e-6, hidden, read, None, None)()
        assert_close(
            hidden.cpu().float(), wanted, rtol=2.0**-6, atol=2.0**-6 * float(wanted.abs().max()), msg=name
        )


class Routed:
    """A product in 16 bits, as the backend packs it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.bias = weight, None


def test_experts_of_one_layer_have_one_form() -> None:
    mixture = Mixture((32, 64))
    mixed = (*mixture.packed(mixture.down[:1]), Routed(mixture.router))
    with pytest.raises(ConfigError, match="some experts of a layer are in fp8 and others are not"):
        expert_matrices(mixed)
