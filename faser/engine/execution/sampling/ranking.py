"""The order of a vocabulary: larger value first, among equal values lower token id first.

Every choice that depends on an order uses this one, so that it does not depend on how the order was found.
Values must not be NaN. Rows are independent of each other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_FEWEST = (
    64  # entries that are taken at least, so that a tie at the edge of the result rarely reaches the last one
)
_BLOCK = 256  # columns of a block, where one entry is searched for
_SMALL_BLOCK = 64  # columns of a block, where several entries are searched for: each entry costs a block


@dataclass(frozen=True, slots=True, kw_only=True)
class Leading:
    """The first W entries of the order.

    values: [R, W]; token_ids: [R, W] int64; num_sure: [R] int64, how many leading entries are certain: the
    others are tied with the last one, and a tied token with a lower id may be missing.
    """

    values: Tensor
    token_ids: Tensor
    num_sure: Tensor


def best(values: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the order and its value: [R] int64, [R]. The value is NaN where the row has a NaN."""
    num_rows, width = values.shape
    if width % _BLOCK:
        token_ids = values.argmax(-1, keepdim=True)
        return token_ids[:, 0], values.gather(-1, token_ids)[:, 0]
    blocks = values.reshape(num_rows, width // _BLOCK, _BLOCK)
    largest, block = blocks.amax(-1).max(-1)
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, _BLOCK)).argmax(-1)
    return block * _BLOCK + inside[:, 0], largest


def first_and_margin(values: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the order, and its value minus the next largest one (0 in a tie): [R] int64, [R]. V >= 2."""
    num_rows, width = values.shape
    each = torch.arange(num_rows, device=values.device)
    if width % _BLOCK:
        token_ids = values.argmax(-1)
        rest = values.index_put((each, token_ids), values.new_tensor(-torch.inf))
        return token_ids, values[each, token_ids] - rest.amax(-1)
    blocks = values.reshape(num_rows, width // _BLOCK, _BLOCK)
    maxima = blocks.amax(-1)
    block = maxima.argmax(-1)
    inside = blocks[each, block]
    column = inside.argmax(-1)
    best = inside[each, column]
    inside[each, column] = -torch.inf
    maxima[each, block] = inside.amax(-1)
    return block * _BLOCK + column, best - maxima.amax(-1)


def leading(values: Tensor, width: int) -> Leading:
    """The first `width` entries of the order (all V if there are fewer). values: [R, V] float."""
    if width >= values.shape[-1]:
        ordered, token_ids = values.sort(dim=-1, descending=True, stable=True)
        return Leading(values=ordered, token_ids=token_ids, num_sure=_full(values))
    token_ids = _largest(values, width).sort(-1).values
    ordered, order = values.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    num_sure = (ordered > ordered[:, -1:]).sum(-1)
    return Leading(values=ordered, token_ids=token_ids.gather(-1, order), num_sure=num_sure)


def first(values: Tensor, width: int) -> Tensor:
    """Token ids [R, min(width, V)] of the first entries of the order, all of them certain."""
    found = leading(values, max(_FEWEST, 2 * width))
    token_ids = found.token_ids[:, :width]
    unsure = (found.num_sure < width).nonzero()[:, 0]
    if len(unsure) and found.token_ids.shape[-1] < values.shape[-1]:
        token_ids[unsure] = leading(values[unsure], values.shape[-1]).token_ids[:, :width]
    return token_ids


def _largest(values: Tensor, width: int) -> Tensor:
    """Token ids [R, width] of largest values; at the edge of a tie, any of those tied.

    The `width` blocks with the largest maxima hold `width` values that nothing outside them exceeds.
    """
    num_rows, num_columns = values.shape
    if num_columns % _SMALL_BLOCK or num_columns < 2 * width * _SMALL_BLOCK:
        return values.topk(width, -1, sorted=False).indices
    blocks = values.reshape(num_rows, -1, _SMALL_BLOCK)
    chosen = blocks.amax(-1).topk(width, -1, sorted=False).indices
    inside = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _SMALL_BLOCK)).flatten(1)
    found = inside.topk(width, -1, sorted=False).indices
    return chosen.gather(-1, found // _SMALL_BLOCK) * _SMALL_BLOCK + found % _SMALL_BLOCK


def _full(values: Tensor) -> Tensor:
    return torch.full(values.shape[:1], values.shape[-1], device=values.device)
