"""The products of a decoder that adapters may change, and what of the checkpoint is in each.

An adapter names tensors; a product has several of them stacked, with rows in another order, or one rank's part.
Products of experts, embeddings, the LM head and per-layer inputs are not adapted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from faser.kernels.interface.adapters import AdaptedLinear, AdapterRoom, LowRank
from faser.kernels.interface.blocks import DecoderLayer, FeedForward, NormedLinear
from faser.kernels.interface.shapes import PackedLinear
from faser.optional import maybe
from faser.types.arrays import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSizes:
    """Room of a decoder for adapters. slots: adapters in use at once. max_rank: of the largest of them."""

    slots: int
    max_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductPart:
    """Rows of a product that are those of one tensor of the checkpoint. Two parts may have one tensor.

    name: of the tensor, without `.weight`. shape: [N, K], of the whole tensor. rows: which of its rows the product
    has, in the product's order; None: all, as stored. columns: the first, and behind the last, of those that this
    rank has; None: all.
    """

    name: str
    shape: tuple[int, int]
    rows: Ints | None = None
    columns: tuple[int, int] | None = None

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.rows is None else len(self.rows)

    def low_rank(self, down: Tensor, up: Tensor) -> LowRank:
        """Cut what an adapter adds to the whole tensor. down: [r, K]; up: [N, r], with the scale."""
        if self.columns is not None:
            down = down[:, self.columns[0] : self.columns[1]]
        return LowRank(down=down, up=up if self.rows is None else up[torch.from_numpy(self.rows)])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedProduct:
    """A product of a layer, and the parts that it is stacked from, in its order."""

    linear: PackedLinear
    parts: tuple[ProductPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedProduct:
    """A product that adapters may change. room: see Adapters; an adapter packed for it has a LowRank or None for
    each of the parts.
    """

    parts: tuple[ProductPart, ...]
    room: AdapterRoom


def adapted_layer(layer: DecoderLayer, adapt: Callable[[PackedLinear], AdaptedLinear]) -> DecoderLayer:
    """Return the layer with adapted products: of its inputs, behind its attention, and of its dense network.

    Those of its inputs are two in a layer with a delta net, whose rates have a product of their own.
    """

    def normed(product: NormedLinear) -> NormedLinear:
        return NormedLinear(norm=product.norm, eps=product.eps, linear=adapt(product.linear))

    assert layer.qkv is not None, "a layer of a decoder has a product of its own"
    block = layer.feed_forward
    found = replace(block, attention_out=adapt(block.attention_out))
    if isinstance(found, FeedForward):
        found = replace(found, gate_up=normed(found.gate_up), down=adapt(found.down))
    return replace(layer, qkv=normed(layer.qkv), rates=maybe(normed, layer.rates), feed_forward=found)
