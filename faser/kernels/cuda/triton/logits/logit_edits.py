"""Edits of logits by Triton, for callers on the host: one copy for all, one launch for each kind of edit.

Nothing waits for the device: the copy is from pinned memory. Kernels are compiled, or read from Triton's cache,
when they are first called. Not yet run on a GPU.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.cuda.device import Accelerator
from faser.kernels.cuda.triton.common.host_arrays import upload_words
from faser.kernels.cuda.triton.logits.logit_rows import (
    RowEntries,
    RowPenalties,
    add_bias,
    allow_only,
    forbid,
    penalise,
)
from faser.kernels.interface.logits_processor_kernels import LogitPositions, LogitsEdits


class TritonLogitsProcessorKernels:
    """See LogitEdits, for logits on the accelerator's device."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @torch.inference_mode()
    def apply(self, logits: Tensor, edits: LogitsEdits) -> None:
        if not edits:
            return
        sent = iter(upload_words(self._accelerator, _words(edits)))
        if edits.bias is not None:
            add_bias(logits, _entries(edits.bias.at, sent), next(sent).view(torch.float64))
        if edits.penalties is not None:
            at = _entries(edits.penalties.at, sent)
            counts, repetition, frequency, presence = (next(sent).view(torch.float64) for _ in range(4))
            penalties = RowPenalties(
                output_counts=counts, repetition=repetition, frequency=frequency, presence=presence
            )
            penalise(logits, at, penalties)
        if edits.allowed is not None:
            allow_only(logits, _entries(edits.allowed, sent))
        if edits.forbidden is not None:
            forbid(logits, _entries(edits.forbidden, sent))


def _words(edits: LogitsEdits) -> list[NDArray[np.generic]]:
    """All arrays of 64 bits a number, in the order in which `apply` takes them."""
    found: list[NDArray[np.generic]] = []
    if (bias := edits.bias) is not None:
        found += [*_places(bias.at), bias.values.astype(np.float64)]
    if (asked := edits.penalties) is not None:
        found += [*_places(asked.at), asked.output_counts, asked.repetition, asked.frequency, asked.presence]
    for masked in (edits.allowed, edits.forbidden):
        found += [] if masked is None else _places(masked)
    return found


def _places(at: LogitPositions) -> list[NDArray[np.generic]]:
    starts = np.zeros(len(at.sizes) + 1, dtype=np.int64)
    np.cumsum(at.sizes, out=starts[1:])
    return [at.rows, starts, at.token_ids]


def _entries(at: LogitPositions, sent: Iterator[Tensor]) -> RowEntries:
    rows, row_start, token_ids = (next(sent) for _ in range(3))
    most = int(at.sizes.max(initial=0))
    return RowEntries(rows=rows, row_start=row_start, token_ids=token_ids, max_entries=most)
