"""Triton's scaling by sinks against attention that has them among its scores, in float64.

Bugs these tests have been seen to catch: the logarithm to base 2 taken for a natural one, a sink that counts with
its sign turned, the sink of the next head, columns behind the first piece left as they were.
"""

import pytest
import torch
from torch.testing import assert_close

from faser.errors import EngineError
from faser.kernels.cuda.triton.sinks import scale_by_sinks
from tests.kernels.cuda.triton.rows import DEVICE

HEADS, HEAD_DIM, LENGTH = 20, 64, 9  # more columns than one program has, and no multiple of them
NEAR = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


@pytest.mark.parametrize("dtype", NEAR)
def test_mixed_values_are_those_of_scores_with_a_sink_among_them(dtype: torch.dtype) -> None:
    """Sinks from one that weighs nothing to one that weighs all."""
    random = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(3, HEADS, LENGTH, generator=random, dtype=torch.float64)
    values = torch.randn(3, HEADS, LENGTH, HEAD_DIM, generator=random, dtype=torch.float64)
    sinks = torch.linspace(-300.0, 300.0, HEADS)
    with_sinks = torch.cat((scores, sinks.double()[:, None].expand(3, -1, 1)), -1).softmax(-1)[..., :LENGTH]
    wanted = torch.einsum("rhl,rhld->rhd", with_sinks, values)

    mixed = torch.einsum("rhl,rhld->rhd", scores.softmax(-1), values).to(dtype).to(DEVICE)
    log2_sums = (scores.logsumexp(-1) / torch.tensor(2.0).log()).float().to(DEVICE)
    scale_by_sinks(mixed, log2_sums, sinks.to(DEVICE))
    assert_close(mixed.cpu().double(), wanted, rtol=2 * NEAR[dtype], atol=1e-5)


def test_rows_that_nothing_was_planned_for_harm_no_others() -> None:
    """They have numbers that are none, or a sum of nothing."""
    mixed = torch.ones(3, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    mixed[1] = torch.nan
    log2_sums = torch.zeros(3, 2, device=DEVICE)
    log2_sums[1, 0], log2_sums[2] = torch.nan, -torch.inf
    scale_by_sinks(mixed, log2_sums, torch.zeros(2, device=DEVICE))
    assert mixed[0].eq(0.5).all()
    assert mixed[2].eq(0.0).all()


def test_what_does_not_fit_is_refused_by_name() -> None:
    mixed, log2_sums = torch.ones(3, 2, 64, dtype=torch.bfloat16), torch.zeros(3, 2)
    with pytest.raises(EngineError, match=r"sinks has shape \(3,\); the kernel needs \(2,\)"):
        scale_by_sinks(mixed, log2_sums, torch.zeros(3))
    with pytest.raises(EngineError, match=r"log2_sums is torch\.float64"):
        scale_by_sinks(mixed, log2_sums.double(), torch.zeros(2))
