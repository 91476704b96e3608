"""Triton's mixtures with low-bit weights against a brute force in float64 with the weights that codes stand for.

Bugs these tests have been seen to catch: the scale of the neighbour group; a zero point off by one; codes of the
next expert, its scales, minimums, their halves, its order of columns, or none; gate for up; dequantised, always
the first experts, their biases, their order; in copies, minimums lost and factors of the wrong groups.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from faser.errors import ConfigError, EngineError
from faser.kernels.cuda.choices import Choices
from faser.kernels.cuda.flashinfer.backend import expert_matrices
from faser.kernels.cuda.flashinfer.device_kernels import (
    CudaLinear,
    _networks,
    experts_kernels,
    few_row_experts_kernels,
)
from faser.kernels.cuda.flashinfer.low_bit_mixtures import MOST_TOGETHER, LowBitMixtures
from faser.kernels.cuda.low_bit import CudaLowBit, Factors, LowBitMatrix, alike, pack_low_bit
from faser.kernels.cuda.triton.expert_weights import ExpertCodes
from faser.kernels.interface.blocks import Experts
from faser.kernels.interface.low_bit.rows import LowBitRows
from faser.types.activation import Activation
from tests.kernels.cuda.fake_graph import dequantised
from tests.kernels.cuda.flashinfer.chosen import Chosen
from tests.kernels.cuda.triton.rows import DEVICE
from tests.kernels.cuda.triton.test_few_row_mixtures import Measured, backend_of
from tests.kernels.cuda.triton.test_low_bit import grouped
from tests.kernels.interface.low_bit.blocks import random_blocks

COUNT, TOP, EPS = 3, 2, 1e-5
NEAR = 2.0**-9  # float16
SIZES = {True: (256, 256), False: (160, 96)}  # of rows and networks, by whether a format has superblocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Formats of gate and up, and of down; bits and group of integers where that is no name of a block format."""

    gate_up: str
    down: str
    activation: Activation = Activation.SILU
    biased: bool = False
    ordered: bool = False


KINDS = {
    "gpt-oss": Kind(gate_up="MXFP4", down="MXFP4", activation=Activation.SWIGLU_OAI, biased=True),
    "awq": Kind(gate_up="4 32 lowered", down="4 32 lowered"),
    "gptq": Kind(gate_up="4 32", down="4 32", ordered=True),
    "w8a16": Kind(gate_up="8 32", down="4 32"),
    "Q4_K_M": Kind(gate_up="Q4_K", down="Q6_K"),
    "Q5_K and Q8_0": Kind(gate_up="Q5_K", down="Q8_0"),
    "Q4_0 and Q5_1": Kind(gate_up="Q4_0", down="Q5_1"),
    "Q4_1 and Q5_0": Kind(gate_up="Q4_1", down="Q5_0"),
    "IQ4_XS and IQ4_NL": Kind(gate_up="IQ4_XS", down="IQ4_NL"),
}


@dataclass
class Mixture:
    """Seeded weights, and what is to come out."""

    kind: Kind
    gate_up: list[CudaLowBit] = field(init=False)
    down: list[CudaLowBit] = field(init=False)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)
        wide = any(
            name.startswith(("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")) for name in (self.kind.gate_up, self.kind.down)
        )
        self.hidden, self.inner = SIZES[wide]
        self.scale = 2.0**-5 if wide else 1.0  # of rows: scales of superblocks make weights large
        self.router = self.random(COUNT, self.hidden)
        self.gate_up = [
            self._packed(self.kind.gate_up, 2 * self.inner, self.hidden, each) for each in range(COUNT)
        ]
        self.down = [self._packed(self.kind.down, self.hidden, self.inner, 9 + each) for each in range(COUNT)]

    def random(self, *size: int) -> Tensor:
        return (torch.randn(size, generator=self._random) / math.sqrt(size[-1])).half().to(DEVICE)

    def rows(self, count: int) -> Tensor:
        return 16 * self.scale * self.random(count, self.hidden)

    def _packed(self, name: str, rows: int, depth: int, seed: int) -> CudaLowBit:
        weight = rows_of(name, rows, depth, seed)
        if self.kind.ordered and seed % 3:  # the first of each product has its columns in order
            weight = replace(weight, order=np.random.default_rng(seed).permutation(depth).astype(np.int32))
        bias = 2 * math.sqrt(rows) * self.random(rows) if self.kind.biased else None
        return pack_low_bit(weight, bias, torch.device(DEVICE))

    @property
    def block(self) -> Experts:
        router = CudaLinear(self.router, None)
        gate_up, down = tuple(self.gate_up), tuple(self.down)
        return Experts(
            router=router, gate_up=gate_up, down=down, top_k=TOP, renormalise=True, activation=self.kind.activation
        )

    def added(self, x: Tensor, piece_bytes: int | None = None) -> Tensor:
        """By the launches for any number of rows."""
        block, hidden = self.block, torch.zeros_like(x)
        run = experts_kernels(block, *map(expert_matrices, (block.gate_up, block.down)))
        read = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        run(x, x.float() @ self.router.float().T, hidden, read, None, None, piece_bytes=piece_bytes)
        return hidden

    def in_few_launches(self, x: Tensor) -> dict[str, Tensor]:
        """By the launches that take the norm, whose weight is the scale of rows."""
        block, norm, found = self.block, torch.full((self.hidden,), self.scale, device=DEVICE), {}
        matrices = map(expert_matrices, ((block.router,), block.gate_up, block.down))
        for name, run in few_row_experts_kernels(block, *matrices).items():
            found[name] = torch.zeros_like(x)
            run(x, norm, EPS, found[name], torch.zeros(1, dtype=torch.int64, device=DEVICE), None, None)
        return found

    def wanted(self, x: Tensor) -> Tensor:
        """What is added, by weights that are rounded to 16 bits, and inner values as well."""
        found = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
        for row, value in enumerate(x):
            logits = self.router.double() @ value.double()
            chosen = logits.argsort(descending=True)[:TOP]
            for expert, weight in zip(chosen.tolist(), logits[chosen].softmax(0), strict=True):
                found[row] += weight * self._network(value, expert)
        return found

    def _network(self, x: Tensor, expert: int) -> Tensor:
        gate, up = product(x, self.gate_up[expert]).half().double().chunk(2)
        if self.kind.activation is Activation.SWIGLU_OAI:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        else:
            inner = functional.silu(gate) * up
        return product(inner.half(), self.down[expert])


def product(x: Tensor, packed: CudaLowBit) -> Tensor:
    found = dequantised(packed).half().double() @ x.double()
    return found if packed.bias is None else found + packed.bias.double()


def rows_of(name: str, rows: int, depth: int, seed: int) -> LowBitRows:
    if name.startswith(("Q", "I", "M")):
        return random_blocks(name, rows, depth, seed=seed)
    bits, size, *lowered = name.split()
    # Seeded by sizes, so that rows of another expert are those of a larger matrix.
    whole = grouped(int(bits), rows * (1 + seed), depth, int(size), lowered=bool(lowered))
    return whole.take(np.arange(rows * seed, rows * (1 + seed)))


def near(found: Tensor, wanted: Tensor) -> None:
    assert_close(found.double(), wanted, rtol=4 * NEAR, atol=2 * NEAR * float(wanted.abs().max()))


@pytest.mark.full(but=("gpt-oss", "gptq", "awq", "Q4_K_M"))
@pytest.mark.parametrize("name", KINDS)
def test_a_mixture_is_that_of_the_numbers_that_codes_stand_for(name: str) -> None:
    mixture = Mixture(KINDS[name])
    x = mixture.rows(2)
    near(mixture.added(x), mixture.wanted(x))


@pytest.mark.full(but=("gpt-oss",))
@pytest.mark.parametrize("name", KINDS)
def test_few_rows_in_three_launches_are_those_of_five(name: str) -> None:
    mixture = Mixture(KINDS[name])
    x = mixture.rows(2)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    wanted = mixture.wanted((mixture.scale * normed).half())
    for found in mixture.in_few_launches(x).values():
        near(found, wanted)


@pytest.mark.parametrize("name", ["gpt-oss"])
def test_a_row_has_the_same_bits_whatever_other_rows_there_are(name: str) -> None:
    """Up to 16 rows. Of the dense products, the same bound."""
    mixture = Mixture(KINDS[name])
    x = mixture.rows(16)
    together = mixture.added(x)
    assert torch.equal(mixture.added(x[[15, 3]]), together[[15, 3]])


@pytest.mark.parametrize("name", ["gpt-oss", "gptq"])
@pytest.mark.full(but=("gptq",))
def test_dequantised_experts_give_the_bits_of_codes(name: str) -> None:
    """Two experts at a time, one of which no row chooses. Oracle: codes that are read."""
    mixture = Mixture(KINDS[name])
    x = mixture.rows(2)
    mixture.router[0] = -64 * x.sum(0)
    assert torch.equal(mixture.added(x, piece_bytes=2 * 2 * 2 * mixture.inner * mixture.hidden), mixture.added(x))


def test_many_rows_of_an_expert_are_computed_in_the_faster_way() -> None:
    """Which is measured once; few rows are not measured."""
    mixture = Mixture(KINDS["gptq"])
    taken: list[tuple[int, bool]] = []

    def run(x: Tensor, _logits: Tensor, hidden: Tensor, *_: object, piece_bytes: int | None) -> None:
        taken.append((len(x), piece_bytes is not None))
        hidden.copy_(x)

    for way in ("dequantised", "as stored"):
        choices = Chosen(way)
        mixed = LowBitMixtures(choices).measured(run, mixture.block)
        edge = MOST_TOGETHER * COUNT // TOP
        for rows in (edge, edge + 1, edge + 2):
            x = mixture.rows(rows)
            mixed(x, torch.zeros(rows, COUNT), torch.zeros_like(x), torch.zeros(1), None, None)
        served = [each for each in taken if each[0] != edge + 1][-2:]
        assert served == [(edge, False), (edge + 2, way == "dequantised")]
        assert choices.keys == [
            "low-bit mixture of 3, 2 each, (192, 160), ('nibbles', 8, 32, (float16, 1)), "
            "('nibbles', 8, 32, (float16, 1)), float16"
        ]


def test_experts_of_several_kinds_are_copied_into_one() -> None:
    """Gate and up in two formats; scales that half floats do not hold in one expert; no minimums in another."""
    mixture = Mixture(KINDS["awq"])
    (matrix,) = mixture.down[1].parts
    scales = matrix.scales.values.float() * (1 + 2.0**-12)
    mixture.down[1] = replace(
        mixture.down[1], parts=(replace(matrix, scales=Factors(values=scales, halves=None)),)
    )
    mixture.down[2] = replace(mixture.down[2], parts=(replace(mixture.down[2].parts[0], minimums=None),))
    for expert, names in enumerate((("Q4_0", "Q8_0"), ("Q8_0", "Q8_0"), ("MXFP4", "Q5_1"))):
        halves = [rows_of(name, mixture.inner, mixture.hidden, expert).parts[0] for name in names]
        mixture.gate_up[expert] = pack_low_bit(LowBitRows(parts=tuple(halves)), None, torch.device(DEVICE))
    x = mixture.rows(2)
    near(mixture.added(x), mixture.wanted(x))


@pytest.mark.parametrize(
    "others", [("Q8_0",), ("MXFP4", "Q5_K"), ("IQ4_NL", "Q4_1"), ("4 64 lowered",), ("Q6_K",)]
)
def test_matrices_that_become_one_kind_keep_their_weights(others: tuple[str, ...]) -> None:
    given = [packed_matrix(name, seed) for seed, name in enumerate(("Q4_0", *others))]
    found = alike(given)
    assert len({each.kind for each in found}) == 1
    for one, other in zip(given, found, strict=True):
        assert_close(other.dequantised(), one.dequantised(), rtol=2.0**-22, atol=0)
    assert alike(given[:1])[0] is given[0]


def packed_matrix(name: str, seed: int) -> LowBitMatrix:
    (matrix,) = pack_low_bit(rows_of(name, 4, 512, seed), None, torch.device(DEVICE)).parts
    return matrix


def test_codes_are_held_once_and_in_as_many_bits_as_they_are_stored() -> None:
    """Kernels read what was packed. Of MXFP4 a scale takes a byte."""
    mixture = Mixture(KINDS["gpt-oss"])
    parts = [each.parts[0] for each in (*mixture.gate_up, *mixture.down)]
    held = sum(each.num_bytes for each in parts)
    assert held == COUNT * 3 * mixture.hidden * mixture.inner * 17 / 32
    networks = _networks(*map(expert_matrices, (mixture.block.gate_up, mixture.block.down)))
    read: list[LowBitMatrix] = []
    for stored in (networks.gate_up.stored, networks.down.stored):
        assert isinstance(stored, ExpertCodes)
        read += stored.matrices
    assert [id(each) for each in read] == [id(each) for each in parts]


def test_a_shared_expert_in_another_format_leaves_the_separate_launches() -> None:
    """Which copy no experts; in the format of the others it is one more of them."""
    mixture, backend = Mixture(KINDS["awq"]), backend_of(Choices(Measured()))
    like, other = (Mixture(KINDS[name]) for name in ("awq", "gpt-oss"))
    for shared, is_alike in ((like, True), (other, False)):
        router = CudaLinear(torch.cat((mixture.router, mixture.router[:1])), None)
        block = replace(mixture.block, router=router, shared=(shared.gate_up[0], shared.down[0]))
        assert bool(backend._few_row_ways(block)) is is_alike


def test_what_does_not_fit_is_refused_by_name() -> None:
    mixture = Mixture(KINDS["gpt-oss"])
    mixed = (*mixture.down[:2], CudaLinear(torch.zeros(mixture.hidden, mixture.inner), None))
    with pytest.raises(
        ConfigError, match="in low-bit codes and others are not; --quantization none dequantises them"
    ):
        expert_matrices(mixed)
    mixture.down = Mixture(KINDS["Q4_K_M"]).down
    with pytest.raises(EngineError, match=r"gate_up has codes of \(192, 160\); the kernel needs \(512, 160\)"):
        mixture.added(mixture.rows(1))
