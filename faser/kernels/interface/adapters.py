"""Low-rank additions to products, by row: LoRA (arXiv:2106.09685), with adapters of several requests in one step.

    out[r] = W x[r] + up[s] (down[s] x[r])        s: the adapter slot of row r; below 0: nothing is added

A step whose rows have no adapter runs the layers that know none, so adapters cost it nothing. Rows stand by
sequence, and all rows of a sequence have one adapter. The bits of a row do not depend on the adapters of other
rows.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from faser.kernels.interface.shapes import PackedLinear, RowLayout

# Opaque handles of a backend: room for the adapters of one product; one adapter packed for one product; the
# adapters of the rows of a step.
AdapterRoom = Any
PackedAdapter = Any
AdapterRows = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """What an adapter adds to one part of a product. down: [r, K]; up: [N, r], with the scale. Any float types."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class AdaptedLinear:
    """A product that adapters may change. base: the product of all rows. room: of the adapters in use."""

    base: PackedLinear
    room: AdapterRoom


class Adapters(Protocol):
    """Kernels of a backend for adapters."""

    def room(self, parts: tuple[int, ...], depth: int, *, slots: int, max_rank: int) -> AdapterRoom:
        """Make room for `slots` adapters of a product [N, depth], none of which is set.

        parts: columns of each part of the product, which add up to N: a product of queries, keys and values has
        three, and an adapter may leave some of them as they are. max_rank: the most rows of a LowRank.down.
        """
        ...

    def pack(self, room: AdapterRoom, parts: tuple[LowRank | None, ...]) -> PackedAdapter:
        """Pack an adapter of a product, in any thread, also while steps run. None: that part stays as it is.

        Raises ConfigError for a rank above max_rank.
        """
        ...

    def set(self, room: AdapterRoom, slot: int, packed: PackedAdapter | None) -> None:
        """Put a packed adapter into a slot, between steps; None: empty it."""
        ...

    def rows(self, layout: RowLayout) -> AdapterRows | None:
        """Digest whose rows have which adapter, once per step; None: no row has one. Copies what it keeps."""
        ...

    def add(self, x: Tensor, room: AdapterRoom, out: Tensor, rows: AdapterRows) -> None:
        """out[r] += up (down x[r]), with the adapter of row r. x: [R, K]; out: [R, N], in x's type or float32.

        Between the two products numbers are rounded to the type of x. A row whose slot is empty stays as it is.
        """
        ...
