"""Structs that native drafts of all models share: rules, results, room for rows. See native/drafting.h."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from faser.kernels.cpu import library as native_library
from faser.kernels.cpu.blocks import DTYPES
from faser.kernels.interface.blocks import BlockBuffers, DraftedTokens, DraftRules
from faser.optional import maybe


def room_for_drafts(count: int, width: int) -> DraftedTokens:
    """Arrays that a call fills."""
    return DraftedTokens(
        token_ids=np.zeros((count, width), dtype=np.int64),
        margins=np.zeros((count, width)),
        counts=np.empty(count, dtype=np.int64),
        num_fed=np.empty(count, dtype=np.int64),
        passes=1,
    )


def drafts_struct(found: DraftedTokens) -> native_library.DraftsStruct:
    arrays = (found.token_ids, found.margins, found.counts, found.num_fed)
    return native_library.DraftsStruct(*(each.ctypes.data for each in arrays))


def room_of_rows(
    tensors: Sequence[Tensor], hidden: Tensor, block: BlockBuffers, logits: Tensor
) -> native_library.BlockRowsStruct:
    """The struct of the block. Checks that all have the rows and the type of hidden. logits: float32, any rows."""
    for each in (*tensors, block.normed, block.gate_up, block.inner):
        _check(each, len(hidden), hidden.dtype)
    _check(logits, len(logits), torch.float32)
    return native_library.BlockRowsStruct(
        len(hidden),
        DTYPES[hidden.dtype],
        block.normed.data_ptr(),
        block.gate_up.data_ptr(),
        block.inner.data_ptr(),
    )


def _check(tensor: Tensor, rows: int, dtype: torch.dtype) -> None:
    assert tensor.is_contiguous()
    assert len(tensor) == rows, (len(tensor), rows)
    assert tensor.dtype is dtype, (tensor.dtype, dtype)


def rules_struct(rules: DraftRules, count: int, width: int) -> tuple[object, native_library.DraftRulesStruct]:
    """Return the arrays that the struct points to, and the struct."""
    max_tokens = np.ascontiguousarray(rules.max_tokens)
    arrays: list[np.ndarray | None] = [max_tokens, None, None, None, None, None]
    metadata = rules.metadata
    if metadata is not None:
        assert rules.noise is not None
        assert rules.noise.shape == (count, width), rules.noise.shape
        arrays[1:] = [
            np.ascontiguousarray(metadata.temperature),
            # Rounded as engine/execution/sampling/distribution.py does.
            torch.from_numpy(metadata.min_p).log().float().numpy(),
            np.ascontiguousarray(metadata.top_k),
            np.ascontiguousarray(metadata.top_p),
            np.ascontiguousarray(rules.noise),
        ]
    stop = rules.stop
    prices = maybe(lambda rule: np.array(rule.pass_prices, dtype=np.float64), stop)
    assert prices is None or len(prices) >= count, "a price for each number of sequences"
    struct = native_library.DraftRulesStruct(
        count,
        width,
        *map(native_library.address_of, (*arrays, prices)),
        *((0.0, 0.0, 0.0) if stop is None else (stop.row_price, stop.intercept, stop.slope)),
    )
    return (arrays, prices), struct
