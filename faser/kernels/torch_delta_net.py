"""The reference of delta nets: the recurrence of interface/delta_net.py, row by row, in float32.

A sequence's kept rows are computed again from its state in every step, then the new ones. Written to be read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from faser.kernels.interface.delta_net import DeltaNet, DeltaShape, MixerShape, StateShape, StateStep
from faser.kernels.interface.short_conv import ConvShape
from faser.optional import present

NORM_EPS = 1e-6  # of the squares of a key or a query


@dataclass(frozen=True, slots=True)
class LayerStates:
    """States of N slots in a layer, float32 but inputs. Rows of position p are at p modulo their number.

    state: [N, Hv, Dk, Dv]. inputs: of the convolution, [N, inputs, channels], all that short ones have. keys: [N,
    rows, Hk, Dk]; values: [N, rows, Hv, Dv]; rates: β and g, [N, rows, 2, Hv].
    """

    state: Tensor
    inputs: Tensor
    keys: Tensor
    values: Tensor
    rates: Tensor


class TorchStates:
    """layers: of each layer; None: it has no state."""

    def __init__(self, shape: StateShape, device: torch.device) -> None:
        self.layers = tuple(None if each is None else _allocate(shape, each, device) for each in shape.layers)

    def kept(self) -> list[tuple[Tensor, Tensor]]:
        """See KeptStates."""
        return [(each.state, each.inputs) for each in present(self.layers)]


def _allocate(shape: StateShape, layer: MixerShape, device: torch.device) -> LayerStates:
    def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros((shape.num_slots, *size), dtype=dtype, device=device)

    inputs = zeros(shape.kept_inputs(layer), layer.channels, dtype=shape.dtype)
    if isinstance(layer, ConvShape):
        nothing = zeros(0)
        return LayerStates(state=nothing, inputs=inputs, keys=nothing, values=nothing, rates=nothing)
    rows, k_heads, v_heads = shape.kept_rows, layer.num_k_heads, layer.num_v_heads
    return LayerStates(
        state=zeros(v_heads, layer.k_head_dim, layer.v_head_dim),
        inputs=inputs,
        keys=zeros(rows, k_heads, layer.k_head_dim),
        values=zeros(rows, v_heads, layer.v_head_dim),
        rates=zeros(rows, 2, v_heads),
    )


def delta_net(
    qkv: Tensor, rates: Tensor, shape: DeltaShape, net: DeltaNet, held: LayerStates, step: StateStep, out: Tensor
) -> None:
    """Compute a delta net row by row: see Backend.delta_net."""
    sequences = zip(step.slots, step.ends, step.starts, step.counts, step.new_ends, step.first_rows, strict=True)
    for slot, end, start, count, new_end, first in (tuple(map(int, each)) for each in sequences):
        rows = slice(first, first + count)
        if start == 0:
            held.state[slot].zero_()
        queries, keys, values = _convolved(qkv[rows, : shape.channels], shape, net, held.inputs[slot], start)
        b, a = rates[rows].chunk(2, -1)
        both = torch.stack((b.sigmoid(), net.decay * functional.softplus(a + net.dt_bias)), 1)
        rooms = (held.keys[slot], held.values[slot], held.rates[slot])
        whole = [
            torch.cat((before(room, end, start), new))
            for room, new in zip(rooms, (keys, values, both), strict=True)
        ]
        queries, whole[0] = (_for_values(each, shape) for each in (queries, whole[0]))
        mixed = _recurrence(queries, whole[0], whole[1], whole[2], held.state[slot], new_end - end)
        for room, new in zip(rooms, (keys, values, both), strict=True):
            keep(room, new, start)
        z = qkv[rows, shape.channels :].view(mixed.shape).float()
        normed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + net.eps) * net.norm
        out[rows] = (normed * functional.silu(z)).flatten(1).to(out.dtype)


def _convolved(
    x: Tensor, shape: DeltaShape, net: DeltaNet, kept: Tensor, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys [R, Hk, Dk] and values [R, Hv, Dv] of the rows x, [R, channels], which are kept."""
    past = shape.kernel - 1
    known = before(kept, max(start - past, 0), start)
    whole = functional.pad(torch.cat((known, x)).float(), (0, 0, past - len(known), 0))
    keep(kept, x, start)
    windows = torch.stack([whole[i : i + len(x)] for i in range(shape.kernel)], 1)
    mixed = functional.silu((windows * net.conv).sum(1))
    sizes = [shape.k_size, shape.k_size, shape.q_size]
    queries, keys, values = torch.split(mixed, sizes, -1)
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


def before(kept: Tensor, first: int, end: int) -> Tensor:
    """Return what is kept of the positions first … end - 1."""
    return kept[torch.arange(first, end, device=kept.device) % len(kept)]


def keep(kept: Tensor, new: Tensor, start: int) -> None:
    """Keep the last of the positions from start on, as many as there is room for."""
    last = new[-len(kept) :]
    end = start + len(new)
    kept[torch.arange(end - len(last), end, device=kept.device) % len(kept)] = last
