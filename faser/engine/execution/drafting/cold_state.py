"""Compares what a drafter has computed with the same computed anew, and leaves the latter in its place.

A row of the native backend has the same bits in every batch, so keys and values that are computed again from the
same tokens at the same places must come out bit for bit. Elsewhere nothing is compared.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Rebuilds(Protocol):
    """A Drafter whose state follows from tokens alone."""

    def rebuild(self, method: str, slot: int | None, /) -> bool:
        """Compare the state of a slot with a cold one, and take the cold one where they differ.

        To be called between steps. slot: None: what slots share. Returns whether they differed: False as well
        where the drafter does not draft by this method, knows no such slot or cannot compute the state again.
        """
        ...


def differs_from_cold(
    memory: Sequence[Tensor] | None, blocks: Sequence[int], compute: Callable[[], object]
) -> bool:
    """Return whether computing the content of the blocks again changes a bit of it.

    memory: tensors whose row i belongs to block i; None: bits depend on the batch, and nothing is computed.
    compute: writes to no other block.
    """
    if memory is None or not blocks:
        return False
    at = torch.tensor(blocks)
    before = [part[at] for part in memory]
    compute()
    return any(not torch.equal(was, part[at]) for was, part in zip(before, memory, strict=True))
