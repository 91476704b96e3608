"""Verdicts on point masses.

Bugs these tests have been seen to catch: matches behind a refusal accepted, the last row of a sequence judging.
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from faser.engine.spec.verifiers.coupled import accepted
from faser.engine.spec.verifiers.rows import lay_out
from faser.engine.spec.verify import DraftedRows
from faser.errors import EngineError
from faser.kernels.token_choice import NO_TOKEN
from faser.kernels.triton.acceptance import accept_drafts
from tests.kernels.triton.rows import on_device, zeros


def judged(
    chosen: NDArray[np.int64], drafts: list[tuple[int, ...]], *, max_draft: int
) -> tuple[list[int], list[int]]:
    """What the kernel says: drafted tokens accepted, and own tokens."""
    rows = lay_out([DraftedRows(slot=s, position=10, draft=draft) for s, draft in enumerate(drafts)])
    first_row = np.append(rows.first, len(rows.drafted)).astype(np.int32)
    num_accepted, own = zeros(len(drafts), torch.int32), zeros(len(drafts), torch.int64)
    accept_drafts(
        on_device(chosen), on_device(rows.drafted), on_device(first_row), num_accepted, own, max_draft=max_draft
    )
    return num_accepted.tolist(), own.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_ragged_drafts_are_accepted_as_far_as_they_are_the_chosen_tokens(seed: int) -> None:
    """Oracle: the rule of coupled.py. Two tokens only, so that all lengths occur; some rows can choose nothing."""
    rng = np.random.default_rng(seed)
    drafts = [tuple(rng.integers(0, 2, rng.integers(0, 6)).tolist()) for _ in range(12)]
    rows = lay_out([DraftedRows(slot=s, position=10, draft=draft) for s, draft in enumerate(drafts)])
    chosen = rng.integers(0, 2, len(rows.drafted))
    chosen[rng.random(len(chosen)) < 0.1] = NO_TOKEN
    last = rows.last_reached(accepted(chosen, rows.drafted, chosen != NO_TOKEN))
    assert judged(chosen, drafts, max_draft=5) == ((last - rows.first).tolist(), chosen[last].tolist())


def test_a_sequence_without_drafts_keeps_its_own_token() -> None:
    assert judged(np.array([7]), [()], max_draft=0) == ([0], [7])


def test_a_negative_longest_draft_is_refused() -> None:
    with pytest.raises(EngineError, match="max_draft is -1"):
        judged(np.array([7]), [()], max_draft=-1)
