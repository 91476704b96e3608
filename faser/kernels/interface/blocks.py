"""Decoder layers, and their parts around the attention, as units that a backend may compute in few launches.

    layer i        feed_forward(i, following: i + 1)                                  layer i + 1
    attention  ->  output product, norm, gate · up, gate, down product, norm, qkv  ->  rotation, attention

A unit ends with the product before the next attention, so that the end of one product and the norm before the next
one can be a single launch, across layers too.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from faser.kernels.interface.shapes import AttentionPlan, AttentionShape, KvCache, PackedLinear


# Weights are equal where they are the same: backends keep what they derive from them as long as these live.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class NormedLinear:
    """A product of normalised rows. norm: [K], the weight of the RMS norm; eps: see Backend.rms_norm."""

    norm: Tensor
    eps: float
    linear: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class FeedForward:
    """What follows the attention of a layer: its output product, then the gated feed-forward network."""

    attention_out: PackedLinear
    gate_up: NormedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBuffers:
    """Room for R rows; arbitrary afterwards. normed: [R, H]; gate_up: [R, 2 F]; inner: [R, F]."""

    normed: Tensor
    gate_up: Tensor
    inner: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """A layer. angles, q_norm, k_norm, eps: see Backend.rope_append.

    qkv: None: its caller computes it, of something else than the layer's inputs.
    states: [max_rows, H], rows at any distance: room for the inputs of the layer, in a step that captures.
    """

    qkv: NormedLinear | None
    shape: AttentionShape
    angles: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    feed_forward: FeedForward
    states: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class DecoderStack:
    """All layers of a model, and the head that follows them. Only the first one's qkv may be None."""

    layers: tuple[DecoderLayer, ...]
    head: NormedLinear | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBuffers:
    """Room for R rows; arbitrary afterwards. qkv: [R, (Hq + 2 Hkv) * D]; mixed: [R, Hq * D]."""

    qkv: Tensor
    mixed: Tensor
    block: BlockBuffers


class Layers(Protocol):
    """Whole layers. Their results are those of Blocks and of the backend's attention."""

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
        """Layers first … last - 1 over hidden [R, H], in place; their keys and values enter the cache.

        buffers: qkv holds that of the first layer where this has no product of its own.
        captures: those layers that have room for states copy their inputs there first.
        """
        ...


class Blocks(Protocol):
    """Units of a layer. Their results are those of the backend's single operations, but for roundings between."""

    def normed_linear(self, hidden: Tensor, product: NormedLinear, out: Tensor, buffers: BlockBuffers) -> Tensor:
        """out = linear(rms_norm(hidden)). hidden: [R, K], unchanged. out: as in Backend.linear."""
        ...

    def feed_forward(
        self,
        mixed: Tensor,
        hidden: Tensor,
        block: FeedForward,
        following: NormedLinear | None,
        out: Tensor,
        buffers: BlockBuffers,
    ) -> None:
        """hidden += attention_out(mixed); hidden += down(silu_mul(gate_up(hidden))); out = following(hidden).

        mixed: [R, Hq * D]. hidden: [R, H], the residual stream, in place. following: the product of the next
        layer; None: out is not written.
        """
        ...
