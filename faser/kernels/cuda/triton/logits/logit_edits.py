"""Logits processors by Triton, for callers on the host: one copy to the device for all edits, one launch for each.

Nothing waits for the device: the copy is from pinned memory. Kernels are compiled, or read from Triton's cache,
when they are first called. Not yet run on a GPU.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.cuda.device import Accelerator
from faser.kernels.cuda.triton.common import upload_words
from faser.kernels.cuda.triton.logits.logit_rows import (
    RowEntries,
    RowPenalties,
    add_bias,
    allow_only,
    forbid,
    mask,
    penalise,
)
from faser.kernels.interface.sampling.logits_processor_kernels import (
    AllowOnlyEdit,
    BiasEdit,
    ForbidEdit,
    LogitPositions,
    LogitsEdit,
    MaskEdit,
    PenaltyEdit,
    RowsEdit,
)


class TritonLogitsProcessorKernels:
    """See LogitsProcessorKernels, for logits on the accelerator's device."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @torch.inference_mode()
    def apply(self, logits: Tensor, edits: Sequence[LogitsEdit]) -> None:
        words = [array for edit in edits for array in _words(edit)]
        sent = iter(upload_words(self._accelerator, words) if words else ())
        for edit in edits:
            match edit:
                case BiasEdit():
                    add_bias(logits, _entries(edit.at, sent), next(sent).view(torch.float64))
                case PenaltyEdit():
                    at = _entries(edit.at, sent)
                    counts, repetition, frequency, presence = (next(sent).view(torch.float64) for _ in range(4))
                    penalties = RowPenalties(
                        output_counts=counts, repetition=repetition, frequency=frequency, presence=presence
                    )
                    penalise(logits, at, penalties)
                case AllowOnlyEdit():
                    allow_only(logits, _entries(edit.at, sent))
                case ForbidEdit():
                    forbid(logits, _entries(edit.at, sent))
                case MaskEdit():
                    masked, bits = next(sent), next(sent)
                    mask(logits, masked, bits.view(len(masked), -1))
                case RowsEdit():
                    edit.apply(logits)


def _words(edit: LogitsEdit) -> list[NDArray[np.generic]]:
    """The arrays of an edit, 64 bits a number, in the order in which `apply` takes them."""
    match edit:
        case BiasEdit():
            return [*_positions(edit.at), edit.values.astype(np.float64)]
        case PenaltyEdit():
            strengths = (edit.repetition, edit.frequency, edit.presence)
            return [*_positions(edit.at), edit.output_counts, *strengths]
        case AllowOnlyEdit() | ForbidEdit():
            return _positions(edit.at)
        case MaskEdit():
            return [edit.rows, edit.words.ravel()]
        case RowsEdit():
            return []


def _positions(at: LogitPositions) -> list[NDArray[np.generic]]:
    starts = np.zeros(len(at.sizes) + 1, dtype=np.int64)
    np.cumsum(at.sizes, out=starts[1:])
    return [at.rows, starts, at.token_ids]


def _entries(at: LogitPositions, sent: Iterator[Tensor]) -> RowEntries:
    rows, row_start, token_ids = (next(sent) for _ in range(3))
    most = int(at.sizes.max(initial=0))
    return RowEntries(rows=rows, row_start=row_start, token_ids=token_ids, max_entries=most)
