"""Bias, penalties and forbidden tokens are those of engine/processors.py, bit for bit.

Bugs these tests have been seen to catch: presence without output, entries behind the first
block lost, negative logits divided, float32 left at its end.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from faser.engine.processors import Entries, Penalties
from faser.engine.processors import add_bias as reference_bias
from faser.engine.processors import forbid as reference_forbid
from faser.engine.processors import penalise as reference_penalise
from faser.errors import EngineError
from faser.kernels.triton.logit_rows import RowEntries, RowPenalties, add_bias, forbid, penalise
from tests.kernels.triton.rows import DEVICE

SIZES = [3, 0, 300, 1, 0]  # entries of each row; one has more than a program
WIDTH = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """The same entries for kernels and for the reference. values: [N] float32."""

    logits: Tensor
    entries: Entries
    at: RowEntries
    values: Tensor


def ragged(seed: int) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.cat([torch.randperm(WIDTH, generator=generator)[:size] for size in SIZES])
    row_start = torch.tensor([0, *np.cumsum(SIZES)], dtype=torch.int32)
    return Ragged(
        logits=5 * torch.randn(len(SIZES), WIDTH, generator=generator),
        entries=Entries(rows=torch.repeat_interleave(torch.tensor(SIZES)), token_ids=token_ids),
        at=RowEntries(row_start=row_start.to(DEVICE), token_ids=token_ids.to(DEVICE), max_entries=max(SIZES)),
        values=torch.randn(len(token_ids), generator=generator),
    )


def agree(case: Ragged, kernel: Callable[[Tensor], None], reference: Callable[[Tensor], None]) -> bool:
    """Whether both leave the same logits, and not those that there were."""
    found, wanted = case.logits.clone().to(DEVICE), case.logits.clone()
    kernel(found)
    reference(wanted)
    assert not torch.equal(wanted, case.logits)
    return torch.equal(found.cpu(), wanted)


def test_bias_is_added_to_the_entries_only() -> None:
    case = ragged(0)
    assert agree(
        case,
        lambda logits: add_bias(logits, case.at, case.values.to(DEVICE)),
        lambda logits: reference_bias(logits, case.entries, case.values),
    )


def test_forbidden_tokens_lose_all_their_probability() -> None:
    case = ragged(1)
    assert agree(
        case, lambda logits: forbid(logits, case.at), lambda logits: reference_forbid(logits, case.entries)
    )


@pytest.mark.parametrize("extreme", [False, True])
def test_penalties_are_those_of_the_processors(extreme: bool) -> None:
    """Some tokens were generated, some stand in the prompt only. extreme: results leave float32's range."""
    case = ragged(2)
    if extreme:
        case.logits[2] *= 1e37
        case.logits[0, 0] = -torch.inf
    counts = (case.values * 3).round().clamp(min=0).double()
    repetition, frequency, presence = (torch.linspace(low, 2.0, len(SIZES)).double() for low in (0.4, -1.3, -0.7))
    each = case.entries.rows
    ours = RowPenalties(
        output_counts=counts.to(DEVICE),
        repetition=repetition.to(DEVICE),
        frequency=frequency.to(DEVICE),
        presence=presence.to(DEVICE),
    )
    theirs = Penalties(
        output_counts=counts, repetition=repetition[each], frequency=frequency[each], presence=presence[each]
    )
    assert agree(
        case,
        lambda logits: penalise(logits, case.at, ours),
        lambda logits: reference_penalise(logits, case.entries, theirs),
    )


def test_no_entries_are_no_work() -> None:
    logits = torch.zeros(1, 4, device=DEVICE)
    none = RowEntries(
        row_start=torch.zeros(2, dtype=torch.int32, device=DEVICE),
        token_ids=torch.zeros(0, dtype=torch.int64, device=DEVICE),
        max_entries=0,
    )
    forbid(logits, none)
    assert logits.tolist() == [[0.0] * 4]


def test_more_entries_than_tokens_are_refused() -> None:
    case = ragged(0)
    at = RowEntries(row_start=case.at.row_start, token_ids=case.at.token_ids, max_entries=401)
    with pytest.raises(EngineError, match="max_entries is 401; a row has from 0 to 400"):
        forbid(case.logits.to(DEVICE), at)
