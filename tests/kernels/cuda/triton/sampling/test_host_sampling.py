"""The choice of tokens for callers on the host: the arrays that the tensor operations give, bit for bit.

Bugs these tests have been seen to catch: a second wait, greedy rows drawn from, given words changed, named rows
sorted or taken for all in order, masses not put back, no room for more rows, arrays that begin elsewhere, a round
or a key step of the generator left out.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.sampler import Sampler
from faser.kernels.cuda.device import Accelerator, CudaDevice
from faser.kernels.cuda.triton.sampling.host_sampling import TritonSamplingKernels
from faser.kernels.interface.sampling import SamplingKernels, SamplingMetadata
from faser.types.arrays import NO_TOKEN, Floats, Ints, Words
from faser.types.sampling import SamplingParams
from tests.engine.execution.sampling.sampled import sample
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.triton.rows import DEVICE, NO_CUT, Cut, make_case

REFERENCE = TorchSamplingKernels()
CUTS: list[Cut] = [(0.0, 5, 0.9), (0.02, 0, 0.7)]


def accelerator() -> Accelerator:
    return CudaDevice(torch.device("cuda", 0)) if DEVICE == "cuda" else FakeAccelerator()


def host_choice() -> SamplingKernels:
    return TritonSamplingKernels(accelerator(), block=16)


def shaping(cuts: list[Cut], temperature: float = 0.8) -> SamplingMetadata:
    return make_case(0, 1, cuts, temperature=temperature).metadata


def some_words(seed: int, count: int) -> Words:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


def assert_same(found: tuple[Ints, Floats], wanted: tuple[Ints, Floats]) -> None:
    """Tokens and leads, and their types."""
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def check_draws(logits: Tensor, rows: Ints, shape: SamplingMetadata, noise: Words) -> None:
    """logits: on the CPU; of the choice they are on the device, with the same strides."""
    best, choice = REFERENCE.best(logits)[rows], host_choice()
    found = logits.to(DEVICE)
    drawn = choice.draw(found.clone(), rows, best, shape, noise)
    np.testing.assert_array_equal(drawn, REFERENCE.draw(logits.clone(), rows, best, shape, noise))
    guesses = choice.predict(found, rows, best, shape, noise)
    assert_same(guesses, REFERENCE.predict(logits, rows, best, shape, noise))
    assert torch.equal(found.cpu(), logits)


def check_masses(logits: Tensor, rows: Ints, shape: SamplingMetadata) -> None:
    best = REFERENCE.best(logits)[rows]
    found, wanted = logits.to(DEVICE, copy=True), logits.clone()
    host_choice().fixed_point_probs(found, rows, best, shape)
    REFERENCE.fixed_point_probs(wanted, rows, best, shape)
    assert torch.equal(found.cpu(), wanted)


def test_the_most_likely_tokens_and_their_leads_come_as_arrays() -> None:
    logits = make_case(1, 40, [NO_CUT] * 5).logits
    logits[1, 39], logits[2, 0], logits[3] = torch.nan, torch.inf, -torch.inf
    choice = host_choice()

    assert_same(choice.best_and_margin(logits.to(DEVICE)), REFERENCE.best_and_margin(logits))
    assert choice.best(logits.to(DEVICE)).tolist() == REFERENCE.best(logits).tolist()
    assert choice.best(logits.to(DEVICE)).tolist().count(NO_TOKEN) == 3


def test_words_are_the_callers_own_both_ends_among_them() -> None:
    case = make_case(2, 40, [NO_CUT] * 5, spread=1.0)
    noise = np.array([0, 2**64 - 1, 2**63, 1, 2**32], dtype=np.uint64)
    check_draws(case.logits, np.arange(5), shaping(case.cuts, 1.5), noise)


def test_columns_race_by_their_ids_in_the_larger_vocabulary() -> None:
    case = make_case(7, 20, [NO_CUT] * 3)
    rows, ids = np.arange(3), np.sort(np.random.default_rng(7).permutation(600)[:20])
    best, noise, shape = REFERENCE.best(case.logits), some_words(7, 3), shaping(case.cuts, 1.5)
    found = host_choice().predict(case.logits.to(DEVICE), rows, best, shape, noise, ids)
    wanted = REFERENCE.predict(case.logits, rows, best, shape, noise, ids)
    assert_same(found, wanted)
    assert wanted[0].tolist() != REFERENCE.predict(case.logits, rows, best, shape, noise)[0].tolist()


@pytest.mark.parametrize("rows", [[3, 0], [4, 3, 1, 0], [2], [0, 1, 2, 3, 4]])
def test_the_named_rows_are_chosen_from_in_the_order_they_are_named(rows: list[int]) -> None:
    case = make_case(3, 20, [NO_CUT] * 5)
    noise = some_words(3, len(rows))
    check_draws(
        case.logits, np.array(rows), shaping([NO_CUT, (0.3, 0, 1.0), NO_CUT, NO_CUT, NO_CUT][: len(rows)]), noise
    )


@pytest.mark.parametrize("rows", [[3, 0], [0, 1, 2, 3], [1, 0, 2, 3]])
def test_masses_are_put_into_the_named_rows_only(rows: list[int]) -> None:
    """Rows of a wider tensor, each with a cut of its own; what is next to them and between them keeps its bits."""
    wide = make_case(4, 30, [NO_CUT] * 4).logits
    logits, shape = wide[:, 5:25], shaping([NO_CUT, (0.3, 0, 1.0), NO_CUT, (0.1, 0, 1.0)][: len(rows)])
    check_masses(logits, np.array(rows), shape)
    on_device = wide.to(DEVICE, copy=True)
    host_choice().fixed_point_probs(on_device[:, 5:25], np.array(rows), REFERENCE.best(logits)[rows], shape)
    outside = torch.cat((on_device[:, :5], on_device[:, 25:]), -1).cpu()
    assert torch.equal(outside, torch.cat((wide[:, :5], wide[:, 25:]), -1))


@pytest.mark.parametrize("cut", [NO_CUT, pytest.param((0.02, 5, 0.9), marks=pytest.mark.slow)])
def test_rows_of_all_kinds_are_taken_in_one_go(cut: Cut) -> None:
    """Greedy ones, whose cuts are of no effect, random ones and such that are no numbers; the host waits once."""
    case = make_case(6, 20, [NO_CUT, (0.5, 3, 0.5), cut, NO_CUT, cut])
    logits, shape, noise = case.logits, case.metadata, some_words(6, 5)
    shape.temperature[:] = (1.1, 0.0, 0.7, 0.0, 0.9)
    logits[3, 4], logits[4, 19] = torch.nan, torch.inf
    device = FakeAccelerator()
    choice = TritonSamplingKernels(device, block=16) if DEVICE == "cpu" else host_choice()

    taken = choice.take(logits.to(DEVICE, copy=True), shape, noise)

    assert taken.tolist() == REFERENCE.take(logits.clone(), shape, noise).tolist()
    assert taken[3:].tolist() == [NO_TOKEN, NO_TOKEN]
    assert device.waits == (DEVICE == "cpu")


@pytest.mark.slow
@pytest.mark.full
def test_truncated_draws_and_masses_are_those_of_the_tensor_operations() -> None:
    case = make_case(5, 20, [NO_CUT] * 3)
    rows, noise = np.array([2, 0]), some_words(5, 2)
    check_draws(case.logits, rows, shaping(CUTS), noise)
    check_masses(case.logits, rows, shaping(CUTS))


def test_more_rows_and_another_vocabulary_find_room() -> None:
    choice = host_choice()
    for num_rows, width in [(1, 20), (3, 20), (2, 33), (2, 20)]:
        logits = make_case(num_rows, width, [NO_CUT] * num_rows).logits
        assert_same(choice.best_and_margin(logits.to(DEVICE)), REFERENCE.best_and_margin(logits))


def test_no_rows_are_no_work() -> None:
    logits, none = torch.zeros(2, 20, device=DEVICE), np.zeros(0, dtype=np.int64)
    choice, shape = host_choice(), shaping([])
    assert choice.draw(logits, none, none, shape, np.zeros(0, dtype=np.uint64)).tolist() == []
    choice.fixed_point_probs(logits, none, none, shape)
    assert not logits.any()
    assert choice.best(logits[:0]).tolist() == []


@pytest.mark.slow
@pytest.mark.full
def test_a_sampler_chooses_the_same_tokens_with_it() -> None:
    """Greedy and random requests side by side, penalties and masks, a row that is no numbers, several steps."""
    width, params = 40, [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, presence_penalty=1.0),
        SamplingParams(temperature=1.3, allowed_token_ids=(3, 4, 30)),
        SamplingParams(temperature=1.0, min_p=0.1),
    ]  # fmt: skip
    samplers = [Sampler(8, width, (0,)), Sampler(8, width, (0,), host_choice())]
    for slot, sampling in enumerate(params):
        for sampler in samplers:
            start = SequenceStart(slot=slot, sampling=sampling, seed=slot, prompt_len=2, token_ids=(5, 6))
            sampler.start(start)
    rng = np.random.default_rng(7)
    slots = list(range(len(params)))
    for position in range(2, 5):
        logits = torch.from_numpy(rng.standard_normal((len(params), width)).astype(np.float32) * 2)
        logits[1, 30] = torch.nan if position == 3 else 0.0
        positions = [position] * len(params)
        plain = sample(samplers[0], logits.clone(), slots, positions)
        assert sample(samplers[1], logits.to(DEVICE, copy=True), slots, positions) == plain
        for sampler in samplers:
            sampler.accept(slots, [max(row.token_id, 0) for row in plain])
