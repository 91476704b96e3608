"""What is done to logits before temperature: bias, penalties, masks. Pure functions of entries, in place.

An entry is one (row, token id) pair; each pair occurs at most once per call. Rows may be of different
sequences or several of one, so the entries of a row say all that it needs to know of its sequence. Apply in
the order in which the functions stand here. TorchLogitsProcessors does so with what comes from the host; devices that have
kernels for it do the same with these (kernels/interface/logits_processor_kernels.py).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.interface.logits_processor_kernels import LogitPositions, LogitsEdits

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """N places in logits [R, V]. rows, token_ids: [N] int64 on the device of the logits."""

    rows: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Per entry, all [N] float64. output_counts: how often the row's sequence has generated the token so far."""

    output_counts: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def add_bias(logits: Tensor, at: Entries, bias: Tensor) -> None:
    """Add bias [N] float32 to the entries."""
    logits.index_put_((at.rows, at.token_ids), bias, accumulate=True)


def penalise(logits: Tensor, at: Entries, penalties: Penalties) -> None:
    """Make tokens that occurred less likely. The entries: every token of the row's prompt and output.

    Repetition (Keskar et al., arXiv:1909.05858, section 4.1): a positive logit is divided by it, a negative
    one multiplied. Then frequency * count and presence are subtracted where the count is not 0. What leaves
    the range of float32 stays at its end, so no penalty turns a logit into infinity.
    """
    values = logits[at.rows, at.token_ids].double()
    values = torch.where(values > 0, values / penalties.repetition, values * penalties.repetition)
    values -= penalties.frequency * penalties.output_counts
    values -= penalties.presence * (penalties.output_counts > 0)
    logits[at.rows, at.token_ids] = values.clamp_(-_LARGEST, _LARGEST).float()


def allow_only(logits: Tensor, rows: Tensor, allowed: Entries) -> None:
    """In `rows` [M] int64, forbid every token without an entry."""
    kept = logits[allowed.rows, allowed.token_ids]
    logits[rows] = -torch.inf
    logits[allowed.rows, allowed.token_ids] = kept


def forbid(logits: Tensor, at: Entries) -> None:
    """Give the entries a probability of exactly 0."""
    logits[at.rows, at.token_ids] = -torch.inf


class TorchLogitsProcessors:
    """See LogitEdits. By tensor operations where the logits are."""

    def apply(self, logits: Tensor, edits: LogitsEdits) -> None:
        device = logits.device
        if edits.bias is not None:
            add_bias(logits, _entries(edits.bias.at, device), _tensor(edits.bias.values, device))
        if (asked := edits.penalties) is not None:
            sizes = asked.at.sizes
            penalties = Penalties(
                output_counts=_tensor(asked.output_counts, device),
                repetition=_tensor(np.repeat(asked.repetition, sizes), device),
                frequency=_tensor(np.repeat(asked.frequency, sizes), device),
                presence=_tensor(np.repeat(asked.presence, sizes), device),
            )
            penalise(logits, _entries(asked.at, device), penalties)
        if edits.allowed is not None:
            allow_only(logits, _tensor(edits.allowed.rows, device), _entries(edits.allowed, device))
        if edits.forbidden is not None:
            forbid(logits, _entries(edits.forbidden, device))


def _entries(at: LogitPositions, device: torch.device) -> Entries:
    return Entries(rows=_tensor(np.repeat(at.rows, at.sizes), device), token_ids=_tensor(at.token_ids, device))


def _tensor(values: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
