"""Rows that stay, and what they carry along.

Bugs these tests have been seen to catch: a count one late, free places not marked,
free places written.
"""

import numpy as np
import pytest
import torch

from faser.errors import EngineError
from faser.kernels.triton.compaction import NO_ROW, gather_rows, list_staying
from tests.kernels.triton.rows import DEVICE, on_device, zeros


@pytest.mark.parametrize("seed", range(4))
def test_the_first_rows_of_each_sequence_stay_in_order(seed: int) -> None:
    """Oracle: the rows spelled out."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, rng.integers(1, 8))
    counts = rng.integers(1, sizes + 1)
    first = np.append(0, np.cumsum(sizes)).astype(np.int32)
    wanted = [int(begin) + i for begin, count in zip(first, counts, strict=False) for i in range(count)]
    staying, next_first = zeros(int(sizes.sum()), torch.int32), zeros(len(first), torch.int32)
    list_staying(on_device(first), on_device(counts.astype(np.int32)), staying, next_first)
    assert staying.tolist() == wanted + [NO_ROW] * (len(staying) - len(wanted))
    assert next_first.tolist() == [0, *np.cumsum(counts).tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("width", [1, 1300])
def test_what_stays_is_moved_whole_and_free_places_are_left_alone(dtype: torch.dtype, width: int) -> None:
    values = torch.arange(5 * width).reshape(5, width).to(dtype).to(DEVICE)
    out = torch.full((4, width), 7, dtype=dtype, device=DEVICE)
    gather_rows(values, on_device(np.array([0, 3, 4, NO_ROW], dtype=np.int32)), out)
    assert torch.equal(out[:3], values[[0, 3, 4]])
    assert (out[3] == 7).all()


def test_an_output_of_another_type_is_refused() -> None:
    with pytest.raises(EngineError, match=r"out is torch.float32; the kernel needs torch.bfloat16"):
        gather_rows(
            torch.zeros(2, 4, dtype=torch.bfloat16, device=DEVICE),
            on_device(np.array([1], dtype=np.int32)),
            torch.zeros(1, 4, device=DEVICE),
        )
