"""Tokens and guesses that are chosen on the device are those of the tensor operations, bit for bit.

Bugs these tests have been seen to catch: the rival in the best token's own chunk forgotten, ties excluded by
value, a lead of broken rows, a NaN unseen, ties of tokens or chunks given to the higher id, margins not divided by
the temperature or those of the best for all, greedy or padding rows drawn, the edge ignored, digits of another
level, results without random rows elsewhere or computed in full.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.parameters import Purpose, noise_words
from faser.errors import EngineError
from faser.kernels.cuda.triton.sampling.device_sampling import TritonDeviceSamplingKernels
from faser.kernels.interface.sampling import DeviceSamplingKernels, SamplingMetadata
from faser.types.arrays import NO_TOKEN, Ints
from tests.kernels.cuda.triton.rows import DEVICE, NO_CUT, Case, Cut, make_case, zeros

REFERENCE = TorchSamplingKernels()
COLDEST = float(np.finfo(np.float32).tiny)

Found = tuple[list[int], list[float]]


def device_sampling_kernels(num_rows: int, width: int) -> DeviceSamplingKernels:
    return TritonDeviceSamplingKernels(num_rows, width, DEVICE, block=16)


def guessed(case: Case, *, random: bool = True, choice: DeviceSamplingKernels | None = None) -> Found:
    """What the kernels say, having left the logits as they were."""
    num_rows, width = case.logits.shape
    choice = choice or device_sampling_kernels(num_rows, width)
    logits, chosen, margins = (
        case.logits.to(DEVICE, copy=True),
        zeros(num_rows, torch.int64),
        zeros(num_rows, torch.float32),
    )
    choice.draft(logits, case.rows, chosen, margins, random=random, **case.asks)
    assert torch.equal(logits.cpu().view(torch.int32), case.logits.view(torch.int32))
    return chosen.tolist(), margins.tolist()


def taken(case: Case, *, random: bool = True) -> list[int]:
    chosen = zeros(len(case.logits), torch.int64)
    choice = device_sampling_kernels(*case.logits.shape)
    choice.take(case.logits.to(DEVICE, copy=True), case.rows, chosen, random=random, **case.asks)
    found: list[int] = chosen.tolist()
    return found


def expected_guess(case: Case) -> Found:
    token_ids, margins = REFERENCE.best_and_margin(case.logits)
    if len(at := warm(case, token_ids)):
        noise = noise_words(case.seeds[at], case.positions[at], Purpose.TOKEN)
        asked = (case.logits.clone(), at, token_ids[at], metadata_of(case, at), noise)
        token_ids[at], margins[at] = REFERENCE.predict(*asked)
    return token_ids.tolist(), margins.tolist()


def expected_tokens(case: Case) -> list[int]:
    token_ids = REFERENCE.best(case.logits)
    if len(at := warm(case, token_ids)):
        noise = noise_words(case.seeds[at], case.positions[at], Purpose.TOKEN)
        token_ids[at] = REFERENCE.draw(case.logits.clone(), at, token_ids[at], metadata_of(case, at), noise)
    found: list[int] = token_ids.tolist()
    return found


def warm(case: Case, token_ids: Ints) -> Ints:
    """Rows that have a temperature and a token."""
    return np.flatnonzero((case.temperature > 0) & (token_ids != NO_TOKEN))


def metadata_of(case: Case, at: Ints) -> SamplingMetadata:
    return case.metadata.among(at)


def warmed(case: Case, *temperatures: float) -> Case:
    return replace(case, temperature=np.array(temperatures, dtype=np.float32))


@pytest.mark.parametrize("random", [True, False])
@pytest.mark.parametrize("width", [1, 2, 16, 40])
def test_rows_without_temperature_get_the_most_likely_token_and_its_lead(width: int, random: bool) -> None:
    """Oracle: the tensor operations. Ties within and across chunks, forbidden tokens, a row of nothing else."""
    case = make_case(width, width, [NO_CUT] * 6, temperature=0.0)
    case.logits[1].round_()
    case.logits[2, [0, width - 1]] = 50.0
    case.logits[3, width // 2 :] = -torch.inf
    case.logits[4, :-1] = -torch.inf
    case.logits[5] = 1.5

    assert guessed(case, random=random) == expected_guess(case)
    assert taken(case, random=random) == expected_tokens(case)


@pytest.mark.parametrize("width", [2, 20])
def test_a_lead_is_over_the_best_other_token_wherever_the_two_are(width: int) -> None:
    """Oracle: sorting. The best is in every column, the runner-up in some other one."""
    places = torch.arange(width)
    case = make_case(0, width, [NO_CUT] * width, temperature=0.0)
    case.logits.fill_(-3.0)
    case.logits[places, places] = 2.5
    case.logits[places, (7 * places + 1) % width] += 4.25
    tops = case.logits.sort(-1, descending=True).values

    assert guessed(case, random=False)[1] == (tops[:, 0] - tops[:, 1]).tolist()


@pytest.mark.parametrize("random", [True, False])
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_no_numbers_have_no_token_and_no_lead(fault: float, random: bool) -> None:
    """With and without a temperature, the fault in the first, a middle and the last chunk."""
    case = warmed(make_case(1, 40, [NO_CUT] * 4), 0.0, 0.8, 0.8, 0.0)
    for row, column in enumerate([3, 20, 39]):
        case.logits[row, slice(None) if fault == float("-inf") else column] = fault
    token_ids, margins = guessed(case, random=random)

    assert (token_ids[:3], margins[:3]) == ([NO_TOKEN] * 3, [0.0] * 3)
    assert (token_ids, margins) == expected_guess(case)
    assert taken(case, random=random) == token_ids


@pytest.mark.parametrize("width", [1, 40])
def test_guesses_are_those_of_the_tensor_operations(width: int) -> None:
    """The coldest temperature, hot ones, greedy rows between them, ties, forbidden tokens."""
    case = warmed(make_case(width, width, [NO_CUT] * 6), 0.8, 0.0, 1000.0, COLDEST, 2.0, 1.0)
    case.logits[4].round_()
    case.logits[5, : width // 2] = -torch.inf

    assert guessed(case) == expected_guess(case)


@pytest.mark.parametrize("block", [128, 256, 512])
def test_the_race_is_the_same_however_a_program_divides_the_row(block: int) -> None:
    """Programs that have half a block of the race, a block, and two; the last block is not full."""
    case = warmed(make_case(3, 530, [NO_CUT] * 3), 1.0, 3.0, 1000.0)
    case.logits[0, :512] -= 30.0  # the last block wins
    choice = TritonDeviceSamplingKernels(3, 530, DEVICE, block=block)

    found = guessed(case, choice=choice)

    assert found == expected_guess(case)
    assert len({token_id // 256 for token_id in found[0]}) > 1


@pytest.mark.slow
def test_guesses_are_among_what_the_truncation_keeps() -> None:
    cuts: list[Cut] = [(0.05, 0, 1.0), (0.0, 5, 1.0), (0.0, 0, 0.7), (0.02, 20, 0.95), NO_CUT]
    case = warmed(make_case(5, 36, cuts), 0.8, 2.0, 1.0, 1.5, 0.0)

    assert guessed(case) == expected_guess(case)


@pytest.mark.slow
def test_greedy_and_random_tokens_are_taken_side_by_side() -> None:
    cuts: list[Cut] = [NO_CUT, (0.0, 5, 1.0), (0.0, 0, 0.7), (0.3, 0, 1.0), NO_CUT]
    case = warmed(make_case(6, 36, cuts), 0.0, 2.0, 1.0, 1.5, 1000.0)

    assert taken(case) == expected_tokens(case)


def padded(case: Case, cuts: list[Cut]) -> Case:
    """With rows behind that have no temperature and no sound number anywhere."""
    num_more, width = len(cuts), case.logits.shape[1]
    faults = torch.full((num_more, width), torch.nan)
    faults[0, 1:] = torch.inf
    return Case(
        logits=torch.cat((case.logits, faults)),
        temperature=np.append(case.temperature, np.zeros(num_more, dtype=np.float32)),
        cuts=case.cuts + cuts,
        seeds=np.append(case.seeds, np.full(num_more, 2**64 - 1, dtype=np.uint64)),
        positions=np.append(case.positions, np.full(num_more, -(2**62))),
    )


@pytest.mark.slow
def test_padding_rows_do_no_harm() -> None:
    case = warmed(make_case(7, 36, [NO_CUT, (0.0, 5, 0.7)]), 0.0, 1.0)
    both = padded(case, [(0.0, -(2**40), float("nan")), (0.0, 2**62, -5.0)])
    tokens, margins = expected_guess(case)

    assert guessed(both) == (tokens + [NO_TOKEN] * 2, margins + [0.0] * 2)
    assert taken(both) == expected_tokens(case) + [NO_TOKEN] * 2


def test_what_a_step_leaves_behind_does_not_reach_the_next_one() -> None:
    """The same places again, with fewer rows, and other numbers, as recordings are replayed."""
    choice = device_sampling_kernels(5, 40)
    for seed, num_rows in [(1, 5), (2, 2), (3, 4), (4, 5)]:
        case = make_case(seed, 40, [NO_CUT] * num_rows, temperature=1.5)
        assert guessed(case, choice=choice) == expected_guess(case)


def test_without_random_rows_their_temperatures_are_not_looked_at() -> None:
    case = make_case(8, 40, [NO_CUT] * 3, temperature=1000.0)
    cold = warmed(case, 0.0, 0.0, 0.0)

    assert guessed(case, random=False) == expected_guess(cold)
    assert taken(case, random=False) == expected_tokens(cold)


def test_margins_of_another_type_are_refused() -> None:
    case = make_case(0, 20, [NO_CUT])
    with pytest.raises(EngineError, match=r"margins is torch.float64; the kernel needs torch.float32"):
        device_sampling_kernels(1, 20).draft(
            case.logits.to(DEVICE), case.rows, zeros(1, torch.int64), zeros(1, torch.float64), **case.asks
        )
