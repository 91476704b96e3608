"""Random delta nets, and sequences whose rows come in steps, with drafts that are refused."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from faser.engine.execution.runner.state_cache import StateCache
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.delta_net import DeltaNet, DeltaShape
from faser.kernels.interface.mixers import StateShape
from faser.kernels.interface.shapes import RowLayout

MOST_DRAFTS = 20  # more than a chunk


def random_net(shape: DeltaShape, seed: int = 0) -> DeltaNet:
    generator = torch.Generator().manual_seed(seed)
    return DeltaNet(
        shape=shape,
        conv=torch.randn(shape.kernel, shape.channels, generator=generator) / 2,
        decay=-torch.rand(shape.num_v_heads, generator=generator) * 2,
        dt_bias=torch.randn(shape.num_v_heads, generator=generator),
        norm=1 + torch.randn(shape.v_head_dim, generator=generator) / 4,
        eps=1e-6,
    )


@dataclass(frozen=True)
class Tokens:
    """Inputs of a sequence's rows: qkv [T, columns], rates [T, 2 Hv] float32."""

    qkv: Tensor
    rates: Tensor

    @classmethod
    def random(cls, shape: DeltaShape, count: int, dtype: torch.dtype, seed: int) -> "Tokens":
        generator = torch.Generator().manual_seed(seed)
        qkv = torch.randn(count, shape.columns, generator=generator).to(dtype)
        return cls(qkv, torch.randn(count, 2 * shape.num_v_heads, generator=generator))

    def part(self, first: int, end: int) -> "Tokens":
        return Tokens(self.qkv[first:end], self.rates[first:end])

    def then(self, other: "Tokens") -> "Tokens":
        return Tokens(torch.cat((self.qkv, other.qkv)), torch.cat((self.rates, other.rates)))


@dataclass(frozen=True)
class Rows:
    """Rows of the sequence in a slot, from position start on; the last num_drafts of them may be refused."""

    slot: int
    start: int
    tokens: Tokens
    num_drafts: int = 0

    @property
    def count(self) -> int:
        return len(self.tokens.qkv)


class Layer:
    """One delta net, of two layers the second, with the states of a few slots."""

    def __init__(
        self, backend: Backend, shape: DeltaShape, net: DeltaNet, *, num_slots: int, dtype: torch.dtype
    ) -> None:
        self._backend, self._shape, self._net = backend, shape, net
        states = StateShape(layers=(None, shape), num_slots=num_slots, most_drafts=MOST_DRAFTS, dtype=dtype)
        self.cache = StateCache(backend, states)

    @torch.inference_mode()
    def step(self, *rows: Rows) -> list[Tensor]:
        """Outputs of each sequence's rows, [count, Hv Dv]."""
        counts = torch.tensor([each.count for each in rows], dtype=torch.int32)
        starts = torch.tensor([each.start for each in rows], dtype=torch.int32)
        layout = RowLayout(
            query_start=torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int())),
            seq_len=starts + counts,
            positions=torch.empty(0, dtype=torch.int32),
            block_table=torch.empty(0, dtype=torch.int32),
            slots=[each.slot for each in rows],
            num_drafts=[each.num_drafts for each in rows],
        )
        qkv = torch.cat([each.tokens.qkv for each in rows])
        rates = torch.cat([each.tokens.rates for each in rows])
        out = torch.full((len(qkv), self._shape.q_size), torch.nan, dtype=qkv.dtype)
        step = self.cache.begin(layout)
        self._backend.mix(qkv, rates, self._net, 1, step, out)
        return list(torch.split(out, counts.tolist()))

    def whole(self, tokens: Tokens, sizes: Sequence[int] = (), *, slot: int = 0) -> Tensor:
        """Outputs of a sequence whose rows come in steps of these sizes, the rest in one."""
        found, start = [], 0
        for size in (*sizes, len(tokens.qkv)):
            part = tokens.part(start, start + size)
            if len(part.qkv):
                found += self.step(Rows(slot, start, part))
            start += len(part.qkv)
        return torch.cat(found)


class Life:
    """A sequence that drafts at random: right tokens, then wrong ones, which are refused."""

    def __init__(self, tokens: Tokens, wrong: Tokens, slot: int, seed: int) -> None:
        self.tokens, self.slot = tokens, slot
        self.found: list[Tensor] = []
        self._wrong, self._random, self.known = wrong, random.Random(seed), 0
        self.refused = 0

    def rows(self) -> Rows:
        """What is known next, with right and wrong drafts."""
        left = len(self.tokens.qkv) - self.known
        self._new = min(self._random.choice((1, 1, 1, 1, 2, 17)), left)
        self._right = min(self._random.choice((0, 0, 1, 3, 18)), left - self._new)
        wrong = self._random.choice((0, 1, 2, 2))
        end, after = self.known + self._new + self._right, self.known + self._new + self._right + wrong
        rows = self.tokens.part(self.known, end).then(self._wrong.part(end, after))
        self.refused += len(rows.qkv) - self._new - self._right
        return Rows(self.slot, self.known, rows, num_drafts=len(rows.qkv) - self._new)

    def take(self, outputs: Tensor) -> None:
        self.found.append(outputs[: self._new + self._right])
        self.known += self._new + self._right
