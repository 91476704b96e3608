"""Gated delta nets: the mixer of most layers of Qwen3.5, and what it computes row by row.

A value head has a state S, [Dk, Dv], that is zero before a sequence's first token. A row has a key k and a query
q, [Dk], of norm 1, a value v, [Dv], a rate β in (0, 1) and a decay g <= 0:

    S <- exp(g) S;    S <- S + k (β (v - Sᵀ k))ᵀ;    o = Sᵀ q / √Dk

Keys, queries and values are silu of a causal convolution, channel by channel, over the last `kernel` rows.
Source: Yang et al., arXiv:2412.06464, eq. 10.

DeltaNet.mix is the reference, in float32: a sequence's kept rows are computed again from its state in every step,
then the new ones (mixers.py). Written to be read.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from faser.kernels.interface.mixers import LayerStates, StateStep, before, convolved, keep

NORM_EPS = 1e-6  # of the squares of a key or a query


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Heads of a delta net: Hk of Dk channels, Hv of Dv.

    Value head h reads key head h // (Hv // Hk), or if they are tiled, h % Hk.
    """

    kind: ClassVar[str] = "gated delta nets"

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
    def rate_columns(self) -> int:
        """Return the columns of b and a."""
        return 2 * self.num_v_heads

    @property
    def state_size(self) -> tuple[int, ...]:
        return (self.num_v_heads, self.k_head_dim, self.v_head_dim)

    @property
    def row_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Return the sizes of a row's keys, values, β and g."""
        k_heads, v_heads = self.num_k_heads, self.num_v_heads
        return (k_heads, self.k_head_dim), (v_heads, self.v_head_dim), (2, v_heads)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class DeltaNet:
    """Weights but for those of the products. float32.

    conv: [kernel, channels], the row's own last. decay: [Hv], by which g = decay softplus(a + dt_bias); dt_bias:
    [Hv]. norm: [Dv], of what each head gives, with eps.
    """

    shape: DeltaShape
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float

    def mix(self, x: Tensor, rates: Tensor | None, held: LayerStates, step: StateStep, out: Tensor) -> None:
        """out = norm(o) silu(z). x: [R, columns], queries, keys, values, z. rates: b, then a."""
        assert rates is not None, "a delta net has rates"
        shape = self.shape
        for slot, end, start, new_end, rows in step.sequences():
            if start == 0:
                held.state[slot].zero_()
            queries, keys, values = self._convolved(x[rows, : shape.channels], held.inputs[slot], start)
            b, a = rates[rows].chunk(2, -1)
            both = torch.stack((b.sigmoid(), self.decay * functional.softplus(a + self.dt_bias)), 1)
            rooms, news = [each[slot] for each in held.rows], (keys, values, both)
            whole = [torch.cat((before(room, end, start), new)) for room, new in zip(rooms, news, strict=True)]
            queries, whole[0] = (_for_values(each, shape) for each in (queries, whole[0]))
            mixed = _recurrence(queries, whole[0], whole[1], whole[2], held.state[slot], new_end - end)
            for room, new in zip(rooms, news, strict=True):
                keep(room, new, start)
            z = x[rows, shape.channels :].view(mixed.shape).float()
            normed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + self.eps) * self.norm
            out[rows] = (normed * functional.silu(z)).flatten(1).to(out.dtype)

    def _convolved(self, x: Tensor, kept: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys [R, Hk, Dk] and values [R, Hv, Dv] of the rows x, [R, channels], which are kept."""
        shape = self.shape
        mixed = functional.silu(convolved(x, self.conv, kept, start))
        queries, keys, values = torch.split(mixed, [shape.k_size, shape.k_size, shape.q_size], -1)
        queries, keys = (_normed(each.view(len(x), -1, shape.k_head_dim)) for each in (queries, keys))
        return queries * shape.k_head_dim**-0.5, keys, values.view(len(x), -1, shape.v_head_dim)


def _for_values(heads: Tensor, shape: DeltaShape) -> Tensor:
    """Return for each value head the key head, or its queries, that it reads: [R, Hv, Dk]."""
    each = shape.num_v_heads // shape.num_k_heads
    return heads.repeat(1, each, 1) if shape.tiled else heads.repeat_interleave(each, 1)


def _recurrence(
    queries: Tensor, keys: Tensor, values: Tensor, rates: Tensor, state: Tensor, num_whole: int
) -> Tensor:
    """Return [R, Hv, Dv] of the queries' rows, the last of all rows. state: becomes that after num_whole rows."""
    now, known, found = state.clone(), len(keys) - len(queries), []
    for row, (key, value, (beta, decay)) in enumerate(zip(keys, values, rates, strict=True)):
        now = now * decay.exp()[:, None, None]
        change = (value - torch.einsum("hkv,hk->hv", now, key)) * beta[:, None]
        now = now + key[:, :, None] * change[:, None, :]
        if row + 1 == num_whole:
            state.copy_(now)
        if row >= known:
            found.append(torch.einsum("hkv,hk->hv", now, queries[row - known]))
    return torch.stack(found)


def _normed(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPS)
