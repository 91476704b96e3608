"""The reference backend: torch operators, on any device of torch. The oracle of every other backend.

Written to be read, not to be fast. A row may get other bits in another batch, as torch's matrix products do.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from faser.kernels.interface.blocks import Experts
from faser.kernels.interface.experts import experts_one_by_one
from faser.kernels.interface.forward import SeparateBlocks, SeparateLayers, SeparateMixtures
from faser.kernels.interface.fp8 import Fp8Linear, Fp8Rows, ReferenceFp8, pack_fp8
from faser.kernels.interface.kv_cache import SCALE_DTYPE, KvShape, as_bytes, dequantised, quantise_heads, stored
from faser.kernels.interface.low_bit.product import DecodedLowBit, decode_low_bit
from faser.kernels.interface.low_bit.rows import LowBitRows
from faser.kernels.interface.mixers import Mixer, MixerShape, StateShape, StateStep, TorchStates
from faser.kernels.interface.sampling import SamplingKernels
from faser.kernels.interface.shapes import AttentionPlan, AttentionShape, DeviceLane, Processors, RowLayout
from faser.types.activation import Activation

_GATES: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class _TorchLinear:
    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]


@dataclass(frozen=True, slots=True)
class _TorchCache:
    """keys, values: of each layer, [blocks, block_size, Hkv, D]; scales: of int8 keys and values, without D."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    scales: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None
    block_size: int

    def parts(self) -> list[Tensor]:
        """See KvParts."""
        scales = () if self.scales is None else (*self.scales[0], *self.scales[1])
        return [*self.keys, *self.values, *scales]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """slots: [R], block * block_size + offset. keys, values: [R, Hkv, D]."""
        for i, (part, heads) in enumerate(((self.keys, keys), (self.values, values))):
            if self.scales is None:
                as_bytes(part[layer]).flatten(0, 1)[slots] = as_bytes(stored(heads, part[layer].dtype))
            else:
                codes, scales = quantise_heads(heads)
                part[layer].flatten(0, 1)[slots] = codes
                self.scales[i][layer].flatten(0, 1)[slots] = scales

    def read(self, layer: int, blocks: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [length, Hkv, D] of these blocks' first positions, in dtype; int8 in float32."""
        keys, values = (_first(part[layer], blocks, length) for part in (self.keys, self.values))
        if self.scales is None:
            return keys.to(dtype), values.to(dtype)
        key_scales, value_scales = (_first(part[layer], blocks, length) for part in self.scales)
        return dequantised(keys, key_scales), dequantised(values, value_scales)


@dataclass(frozen=True, slots=True)
class _TorchPlan:
    positions: Tensor  # [R] int64
    slots: Tensor  # [R] int64: block * block_size + offset
    spans: tuple[tuple[int, int, int], ...]  # (first row, end row, seq_len) of each sequence
    block_tables: tuple[Tensor, ...]  # per sequence, the blocks that hold seq_len positions


class TorchBackend:
    """Backend of torch operators on any device."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.name = "torch"
        self.sampling_kernels: SamplingKernels | None = None
        self.mask_kernel = None
        self.mixtures = SeparateMixtures(self)
        self.blocks = SeparateBlocks(self)
        self.layers = SeparateLayers(self, self.blocks)
        self.head_drafting = None
        self.block_drafting = None
        self.graph_capture = None
        self.lane: DeviceLane | None = None
        self.has_fp8 = True
        self.has_low_bit = self.has_low_bit_experts = True
        self.has_experts = True
        self.experts_read = 0
        self.prefers_low_bit = False
        self._fp8 = ReferenceFp8()
        self._width = torch.get_num_threads()

    def row_edges(self, _most: int) -> tuple[int, ...]:
        """See Backend."""
        return ()

    def use(self, processors: Processors | None) -> None:
        """See Backend. On cores: sets torch's number of threads, and lets the caller run on all of these cores.

        torch keeps the number per calling thread, and its threads may run on the caller's cores. Results may
        differ
        in the last bits: torch cuts products differently for another number of threads. On a lane of a GPU the
        current stream decides, so there is nothing to set.
        """
        self.lane = processors if isinstance(processors, DeviceLane) else None
        cores = processors if isinstance(processors, tuple) else None
        torch.set_num_threads(self._width if cores is None else len(cores))
        if cores is not None:
            os.sched_setaffinity(0, cores)

    def concurrent_instance(self) -> "TorchBackend":
        return TorchBackend(self.device)

    def graph_capture_on(self, _lane: DeviceLane) -> None:
        """See Backend. None: this backend captures no graphs."""
        return

    def device_sampling_kernels(self, _max_rows: int, _width: int) -> None:
        """See Backend. None: this backend captures no graphs."""
        return

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def pack(
        self, weight: Tensor | Fp8Rows | LowBitRows, bias: Tensor | None = None
    ) -> _TorchLinear | Fp8Linear | DecodedLowBit:
        if isinstance(weight, LowBitRows):
            return decode_low_bit(weight, None if bias is None else bias.to(self.device))
        if isinstance(weight, Fp8Rows):
            return pack_fp8(weight, bias, self.device)
        return _TorchLinear(
            weight.to(self.device, copy=True).contiguous(),
            None if bias is None else bias.to(self.device, copy=True),
        )

    def linear(
        self,
        x: Tensor,
        packed: _TorchLinear | Fp8Linear | DecodedLowBit,
        out: Tensor,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        if isinstance(packed, DecodedLowBit):
            return packed.linear(x, out, residual)
        if isinstance(packed, Fp8Linear):
            return self._fp8.linear(x, packed, out, residual)
        weight, bias = packed.weight, packed.bias
        if out.dtype is torch.float32 is not x.dtype:  # how logits are rounded must not choose experts
            x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
        product = functional.linear(x, weight, bias)
        return out.copy_(product if residual is None else product.to(out.dtype) + residual)

    def embed(self, token_ids: Tensor, packed: _TorchLinear | DecodedLowBit, out: Tensor) -> Tensor:
        if isinstance(packed, DecodedLowBit):
            return packed.embed(token_ids, out)
        return torch.index_select(packed.weight, 0, token_ids.to(self.device), out=out)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, *, residual: Tensor | None = None
    ) -> Tensor:
        normed = _rms_norm(x, weight, eps)
        return out.copy_(normed if residual is None else normed + residual)

    def allocate_kv(self, shape: KvShape) -> _TorchCache:
        def zeros(dtype: torch.dtype, *, scales: bool = False) -> tuple[Tensor, ...]:
            sizes = ((count,) if scales else (count, head_dim) for count, head_dim in shape.heads)
            first = (shape.num_blocks, shape.block_size)
            return tuple(torch.zeros((*first, *each), dtype=dtype, device=self.device) for each in sizes)

        keys, values, scales = zeros(shape.dtype), zeros(shape.dtype), None
        if shape.dtype is torch.int8:
            scales = (zeros(SCALE_DTYPE, scales=True), zeros(SCALE_DTYPE, scales=True))
        return _TorchCache(keys, values, scales, shape.block_size)

    def plan(self, layout: RowLayout, block_size: int) -> _TorchPlan:
        positions = layout.positions.long()
        counts = layout.query_start.diff().long()
        owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
        blocks = layout.block_table[owners, positions // block_size].long()
        starts = layout.query_start.tolist()
        lengths = layout.seq_len.tolist()
        tables = tuple(
            layout.block_table[s, : -(-length // block_size)].long().to(self.device)
            for s, length in enumerate(lengths)
        )
        return _TorchPlan(
            positions.to(self.device),
            (blocks * block_size + positions % block_size).to(self.device),
            tuple(zip(starts, starts[1:], lengths, strict=False)),
            tables,
        )

    def rope_append(
        self,
        qkv: Tensor,
        angles: Tensor | None,
        cache: _TorchCache,
        layer: int,
        shape: AttentionShape,
        plan: _TorchPlan,
        *,
        query_angles: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        v_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        rows = qkv.shape[0]
        heads = qkv.view(rows, -1, shape.head_dim)
        q = heads[:, : shape.num_heads]
        k = heads[:, shape.num_heads : shape.num_heads + shape.num_kv_heads]
        v = heads[:, shape.num_heads + shape.num_kv_heads :]
        of_queries = angles if query_angles is None else query_angles
        for part, weight, turns in ((q, q_norm, of_queries), (k, k_norm, angles), (v, v_norm, None)):
            if weight is not None:
                part.copy_(_rms_norm(part, weight, eps))
            if turns is not None:
                part.copy_(_rotate(part, turns[plan.positions]))
        if not shape.reads_other:
            cache.write(layer, plan.slots, k, v)
        return qkv[:, : shape.num_heads * shape.head_dim]

    def attend(
        self,
        q: Tensor,
        cache: _TorchCache,
        layer: int,
        shape: AttentionShape,
        plan: _TorchPlan,
        out: Tensor,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        group = shape.num_heads // shape.num_kv_heads
        for (start, end, length), table in zip(plan.spans, plan.block_tables, strict=True):
            keys, values = (
                part.transpose(0, 1).repeat_interleave(group, 0)
                for part in cache.read(layer, table, length, q.dtype)
            )  # [Hq, length, D]
            queries = q[start:end].view(end - start, shape.num_heads, shape.head_dim).transpose(0, 1)
            queries = queries.to(keys.dtype)
            rows = torch.arange(length - (end - start), length, device=self.device)[:, None]
            columns = torch.arange(length, device=self.device)[None, :]
            seen = columns <= rows
            if shape.window is not None:
                seen &= columns > rows - shape.window
            mixed = _attention(queries, keys, values, seen, shape, sinks)
            if mixed.isnan().any():  # 0 times NaN is NaN, also for rows that do not see it
                sound = keys.isfinite().all(-1, keepdim=True) & values.isfinite().all(-1, keepdim=True)
                keys, values = keys.where(sound, 0.0), values.where(sound, 0.0)
                sees_unsound = (seen & ~sound.mT).any(-1, keepdim=True)
                mixed = _attention(queries, keys, values, seen, shape, sinks).masked_fill(sees_unsound, torch.nan)
            out[start:end] = mixed.transpose(0, 1).reshape(end - start, -1)
        return out

    def gate(self, gate_up: Tensor, out: Tensor, activation: Activation = Activation.SILU) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation is Activation.SWIGLU_OAI:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return torch.mul(gate * torch.sigmoid(1.702 * gate), up + 1, out=out)
        return torch.mul(_GATES[activation](gate), up, out=out)

    def count_experts(self) -> Callable[[], int]:
        count = self.experts_read
        return lambda: count

    def row_slots(self, _plan: AttentionPlan) -> None:
        """Return None: this backend pads no steps."""

    def experts(
        self,
        x: Tensor,
        block: Experts,
        hidden: Tensor,
        routed_by: Tensor | None = None,
        *,
        slots: Tensor | None = None,
    ) -> None:
        assert slots is None, "steps are not padded"
        self.experts_read += experts_one_by_one(self, x, block, hidden, routed_by, outputs=_num_outputs)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> None:
        x.mul_(gate.sigmoid())

    def allocate_states(self, shape: StateShape) -> TorchStates:
        return TorchStates(shape, self.device)

    def mixes(self, _shape: MixerShape) -> bool:
        return True

    def mix(self, x: Tensor, rates: Tensor | None, mixer: Mixer, layer: int, step: StateStep, out: Tensor) -> None:
        mixer.mix(x, rates, step.states.layers[layer], step, out)


def _num_outputs(packed: _TorchLinear | Fp8Linear | DecodedLowBit) -> int:
    if isinstance(packed, DecodedLowBit):
        return packed.shape[0]
    return len(packed.weight.values if isinstance(packed, Fp8Linear) else packed.weight)


def _first(part: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Return the first `length` positions of these blocks: [length, ...]. part: [blocks, block_size, ...]."""
    return as_bytes(part)[blocks].flatten(0, 1)[:length].view(part.dtype)


def _attention(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, shape: AttentionShape, sinks: Tensor | None
) -> Tensor:
    """Attend: [Hq, rows, D]. queries: [Hq, rows, D]. keys, values: [Hq, length, D]. seen: [rows, length]."""
    if shape.score_cap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=seen, scale=shape.scale
        )[0]
    scores = queries.float() @ keys.float().mT * shape.scale
    if shape.score_cap is not None:
        scores = shape.score_cap * torch.tanh(scores / shape.score_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, queries.shape[1], 1)), -1)
    return (scores.softmax(-1)[..., : keys.shape[1]] @ values.float()).to(values.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """heads: [R, H, D]; angles: [R, D] float32. Channels i and i + D/2 rotate as a pair (arXiv:2104.09864)."""
    cos, sin = angles[:, None].chunk(2, dim=-1)  # [R, 1, D/2]
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(heads.dtype)
