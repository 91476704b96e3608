"""The edits of logits by tensor operations; they define the arithmetic. Pure functions of entries, in place.

An entry is one (row, token id) pair; each pair occurs at most once per call. Rows may belong to different
sequences or to the same one, so the entries of a row contain all that the edit depends on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.interface.sampling.logits_processor_kernels import (
    AllowOnlyEdit,
    BiasEdit,
    ForbidEdit,
    LogitPositions,
    LogitsEdit,
    MaskEdit,
    MaskKernel,
    PenaltyEdit,
    RowsEdit,
)

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """N entries of logits [R, V]. rows, token_ids: [N] int64 on the device of the logits."""

    rows: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPenalties:
    """Per entry, all [N] float64. output_counts: how often the row's sequence has generated the token so far."""

    output_counts: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def add_bias(logits: Tensor, at: Entries, bias: Tensor) -> None:
    """Add bias [N] float32 to the entries."""
    logits.index_put_((at.rows, at.token_ids), bias, accumulate=True)


def penalise(logits: Tensor, at: Entries, penalties: EntryPenalties) -> None:
    """Make tokens that occurred less likely. The entries: every token of the row's prompt and output.

    Repetition (Keskar et al., arXiv:1909.05858, section 4.1): a positive logit is divided by it, a negative
    one multiplied. Then frequency * count and presence are subtracted where the count is not 0. A result outside
    the range of float32 becomes the nearest end of it, so no penalty turns a logit into infinity.
    """
    values = logits[at.rows, at.token_ids].double()
    values = torch.where(values > 0, values / penalties.repetition, values * penalties.repetition)
    values -= penalties.frequency * penalties.output_counts
    values -= penalties.presence * (penalties.output_counts > 0)
    logits[at.rows, at.token_ids] = values.clamp_(-_LARGEST, _LARGEST).float()


def allow_only(logits: Tensor, rows: Tensor, allowed: Entries) -> None:
    """In `rows` [M] int64, give every token without an entry a probability of exactly 0."""
    kept = logits[allowed.rows, allowed.token_ids]
    logits[rows] = -torch.inf
    logits[allowed.rows, allowed.token_ids] = kept


def forbid(logits: Tensor, at: Entries) -> None:
    """Give the entries a probability of exactly 0."""
    logits[at.rows, at.token_ids] = -torch.inf


def mask(logits: Tensor, edit: MaskEdit) -> None:
    """In the rows of the edit, give every token whose bit is 0 a probability of exactly 0."""
    rows, words = _tensor(edit.rows, logits.device), _tensor(edit.words, logits.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    bits = (words.view(torch.uint8)[:, :, None] >> shifts) & 1  # the machine's integers begin with the low byte
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill_(~allowed, -torch.inf)


class TorchLogitsProcessorKernels:
    """See LogitsProcessorKernels. By tensor operations where the logits are; masks by a kernel, if it is given."""

    def __init__(self, mask_kernel: MaskKernel | None = None) -> None:
        self._mask: MaskKernel = mask if mask_kernel is None else mask_kernel

    def apply(self, logits: Tensor, edits: Sequence[LogitsEdit]) -> None:
        device = logits.device
        for edit in edits:
            match edit:
                case BiasEdit():
                    add_bias(logits, _entries(edit.at, device), _tensor(edit.values, device))
                case PenaltyEdit():
                    sizes = edit.at.sizes
                    penalties = EntryPenalties(
                        output_counts=_tensor(edit.output_counts, device),
                        repetition=_tensor(np.repeat(edit.repetition, sizes), device),
                        frequency=_tensor(np.repeat(edit.frequency, sizes), device),
                        presence=_tensor(np.repeat(edit.presence, sizes), device),
                    )
                    penalise(logits, _entries(edit.at, device), penalties)
                case AllowOnlyEdit():
                    allow_only(logits, _tensor(edit.at.rows, device), _entries(edit.at, device))
                case ForbidEdit():
                    forbid(logits, _entries(edit.at, device))
                case MaskEdit():
                    self._mask(logits, edit)
                case RowsEdit():
                    edit.apply(logits)


def _entries(at: LogitPositions, device: torch.device) -> Entries:
    return Entries(rows=_tensor(np.repeat(at.rows, at.sizes), device), token_ids=_tensor(at.token_ids, device))


def _tensor(values: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
