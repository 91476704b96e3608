"""Tokens and masses from Triton are those of the tensor operations, bit for bit.

Bugs these tests have been seen to catch: ties given to the higher id or chunk, a draw one early, a NaN unseen,
weights rounded to nearest, an exponential of a library, an edge left out, ties of one chunk only counted, masses
of ties not divided, a nucleus of all tokens.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.parameters import Purpose, noise_words
from faser.errors import EngineError
from faser.kernels.cuda.triton.sampling.workspace import SamplingInputs, SamplingWorkspace
from faser.types.arrays import NO_TOKEN
from tests.kernels.cuda.triton.rows import DEVICE, NO_CUT, Case, Cut, make_case, zeros

REFERENCE = TorchSamplingKernels()
CUTS: list[Cut] = [(0.05, 0, 1.0), (0.0, 5, 1.0), (0.0, 0, 0.7), (0.02, 20, 0.95), (0.3, 9, 0.5)]
EDGES: list[Cut] = [(1.0, 0, 1.0), (0.0, 1, 1.0), (0.0, 0, 1e-9), (0.0, 10**9, 0.9), (0.0, 32, 1 - 1e-15)]


def chosen(case: Case) -> list[int]:
    found: list[int] = (
        case.kernels().choose(case.shaped(), zeros(len(case.cuts), torch.int64), **case.asks).tolist()
    )
    return found


def expected(case: Case) -> list[int]:
    """What the tensor operations draw from rows that all have a temperature."""
    rows, noise = np.arange(len(case.cuts)), noise_words(case.seeds, case.positions, Purpose.TOKEN)
    best = REFERENCE.best(case.logits)
    found: list[int] = REFERENCE.draw(case.logits.clone(), rows, best, case.metadata, noise).tolist()
    return found


def fixed_probs(case: Case) -> Tensor:
    shaped = case.shaped()
    case.kernels().fixed_point_probs(shaped, **case.asks)
    return shaped.logits.cpu()


def expected_probs(case: Case) -> Tensor:
    logits = case.logits.clone()
    REFERENCE.fixed_point_probs(logits, np.arange(len(case.cuts)), REFERENCE.best(logits), case.metadata)
    return logits


@pytest.mark.parametrize(
    "width, temperature", [(1, 0.8), (15, 1000.0), (16, 0.8), (40, float(np.finfo(np.float32).tiny)), (40, 1.0)]
)
def test_tokens_are_those_of_the_tensor_operations(width: int, temperature: float) -> None:
    case = make_case(width, width, [NO_CUT, (0.05, 0, 1.0)] * 2, temperature=temperature)
    assert chosen(case) == expected(case)


@pytest.mark.parametrize("cuts", [CUTS, EDGES])
@pytest.mark.slow
@pytest.mark.full(but=("cuts1",))
def test_truncated_masses_are_those_of_the_tensor_operations(cuts: list[Cut]) -> None:
    case = make_case(len(cuts), 32, cuts)
    assert torch.equal(fixed_probs(case), expected_probs(case))


@pytest.mark.slow
@pytest.mark.full
def test_of_tied_tokens_those_with_lower_ids_are_kept_across_chunks() -> None:
    """Whole logits from -2 to 1: the edges of all cuts lie within ties, and the ties within several chunks."""
    case = make_case(1, 40, [(0.0, 7, 1.0), (0.0, 0, 0.6), (0.0, 20, 0.9)], temperature=1.0)
    case.logits.clamp_(-2, 1).round_()
    assert torch.equal(fixed_probs(case), expected_probs(case))


@pytest.mark.slow
def test_tokens_drawn_from_truncated_masses_are_those_of_the_tensor_operations() -> None:
    case = make_case(3, 20, [(0.0, 5, 1.0), (0.01, 12, 0.9)], temperature=2.0)
    assert chosen(case) == expected(case)


def test_weights_are_the_same_bits_over_their_whole_range() -> None:
    """Oracle: the tensor operations, at 512 logits from 0 to 70 nats below the most likely one."""
    case = make_case(0, 512, [NO_CUT])
    case.logits[0] = -torch.linspace(0, 70, 512)
    shaped = case.shaped()
    case.kernels(block=512).fixed_point_probs(shaped, top_k=False, top_p=False)
    assert torch.equal(shaped.logits.cpu(), expected_probs(case))


def test_a_row_without_temperature_gets_the_first_of_its_most_likely_tokens() -> None:
    case = make_case(5, 40, [NO_CUT, NO_CUT], temperature=0.0)
    case.logits[0, [17, 33]] = 50.0
    assert chosen(case) == [17, int(case.logits[1].argmax())]


def test_a_row_without_temperature_has_all_its_mass_at_one_token() -> None:
    case = make_case(6, 20, [NO_CUT], temperature=0.0)
    found = fixed_probs(case)[0]
    assert found.nonzero()[:, 0].tolist() == [int(case.logits[0].argmax())]
    assert found.sum() == 2.0**52


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_a_finite_maximum_is_no_token_and_its_neighbour_is_unharmed(fault: float) -> None:
    case = make_case(7, 40, [NO_CUT, NO_CUT])
    wanted = expected(case)
    case.logits[0, slice(None) if fault == float("-inf") else 35] = fault
    assert chosen(case) == [NO_TOKEN, wanted[1]]


def test_forbidden_tokens_are_never_chosen() -> None:
    case = make_case(8, 33, [NO_CUT] * 4, temperature=1000.0)
    case.logits[:, 1:] = float("-inf")
    assert chosen(case) == [0] * 4


def test_rows_that_lie_apart_are_read_where_they_are() -> None:
    case = make_case(9, 20, [NO_CUT] * 3)
    apart = torch.full((3, 27), 100.0, device=DEVICE)[:, :20]
    apart.copy_(case.logits)
    out = zeros(3, torch.int64)
    case.kernels().choose(SamplingInputs(logits=apart, rows=case.rows), out, top_k=False, top_p=False)
    assert out.tolist() == expected(case)


def test_no_rows_are_no_work() -> None:
    case = make_case(0, 20, [])
    kernels = make_case(0, 20, [NO_CUT]).kernels()
    assert kernels.choose(case.shaped(), zeros(0, torch.int64), top_k=True, top_p=True).tolist() == []


@pytest.mark.parametrize(
    "width, out, message",
    [
        (21, zeros(1, torch.int64), "the vocabulary has 21 tokens; the workspace was made for 20"),
        (20, zeros(2, torch.int64), r"chosen has shape \(2,\); the kernel needs \(1,\)"),
        (20, zeros(1, torch.int32), "chosen is torch.int32; the kernel needs torch.int64"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(width: int, out: Tensor, message: str) -> None:
    kernels = make_case(0, 20, [NO_CUT]).kernels()
    with pytest.raises(EngineError, match=message):
        kernels.choose(make_case(0, width, [NO_CUT]).shaped(), out, top_k=False, top_p=False)


def test_more_rows_than_the_workspace_has_are_refused() -> None:
    kernels = make_case(0, 20, [NO_CUT]).kernels()
    with pytest.raises(EngineError, match="2 rows; the workspace holds 1"):
        kernels.choose(make_case(0, 20, [NO_CUT] * 2).shaped(), zeros(2, torch.int64), top_k=False, top_p=False)


def test_a_block_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(EngineError, match="block is 48; it must be a power of 2"):
        SamplingWorkspace(1, 20, DEVICE, block=48)
