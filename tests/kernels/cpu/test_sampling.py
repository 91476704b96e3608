"""Masks by the native kernel give the bits of the tensor operations.

The native choice of tokens: the same tokens and the same masses, bit for bit, as the tensor operations give.

Bugs these tests have been seen to catch: ties given to the higher id, a draw one token late, a NaN in the last
columns unseen, a cut too high without a second look. Of leads and guesses: a runner-up that is
forgotten when a lane or a part of the row finds a larger one, ties given to the higher id, the ends of a window
taken for whole blocks, the block that a window begins in left out, truncated tokens counted.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.edits import mask
from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.sampler import Sampler
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.sampling import SamplingMetadata, philox
from faser.types.arrays import NO_TOKEN, Floats, Ints, Words
from faser.types.sampling import SamplingParams
from tests.engine.execution.sampling.sampled import plain_rows, sample


@pytest.mark.parametrize("width", [1, 63, 64, 65, 1000, 4099])
@pytest.mark.parametrize("rows", [[0], [1, 2, 4], [0, 1, 2, 3, 4]])
def test_logits_are_masked_as_by_tensor_operations(width: int, rows: list[int], native: NativeBackend) -> None:
    """Rows of a wider tensor; other rows and what is next to them keep their bits."""
    rng = np.random.default_rng(width)
    words = rng.integers(-(2**63), 2**63, (len(rows), -(-width // 64) + 2), dtype=np.int64)
    words[0, 0], words[-1, -3] = -1, 0
    logits = torch.randn(5, width + 9, generator=torch.Generator().manual_seed(width))
    found, wanted = logits.clone(), logits.clone()
    native.mask_kernel(found[:, :width], np.array(rows), words)
    mask(wanted[:, :width], np.array(rows), words)
    assert torch.equal(found, wanted)
    for row, bits in zip(rows, words, strict=True):
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:width].astype(bool)
        assert torch.equal(found[row, :width].isfinite(), torch.from_numpy(allowed))
    assert torch.equal(found[:, width:], logits[:, width:])


REFERENCE = TorchSamplingKernels()
CUTS = [
    (0.0, 0, 1.0),
    (0.05, 0, 1.0),
    (0.0, 5, 1.0),
    (0.0, 0, 0.7),
    (0.02, 20, 0.95),
    (0.3, 0, 0.5),
    (1.0, 0, 1.0),
]
CUTS += [
    (0.0, 1, 1.0),
    (0.0, 0, 1e-9),
    (0.0, 10**9, 1.0),
    (0.0, 0, 0.999999),
    (0.0, 3000, 0.9),
    (0.0, 0, 1 - 1e-15),
]
TEMPERATURES = [float(np.finfo(np.float32).tiny), 0.1, 0.8, 1.0, 2.0, 1000.0]
WIDTHS = [1, 2, 15, 16, 17, 64, 255, 257, 1000, 4099]  # around the lanes of a vector and of a block


def shaping(cuts: list[tuple[float, int, float]], temperatures: NDArray[np.float32]) -> SamplingMetadata:
    return SamplingMetadata(
        temperature=temperatures,
        min_p=np.array([min_p for min_p, _, _ in cuts]),
        top_k=np.array([top_k for _, top_k, _ in cuts], dtype=np.int64),
        top_p=np.array([top_p for _, _, top_p in cuts]),
        seeds=np.zeros(len(cuts), dtype=np.uint64),  # words are given
        positions=np.zeros(len(cuts), dtype=np.int64),
    )


def some_logits(rng: np.random.Generator, num_rows: int, width: int, spread: float) -> Tensor:
    """With ties in every second row and tokens that cannot be chosen in every third."""
    logits = torch.from_numpy((rng.standard_normal((num_rows, width)) * spread).astype(np.float32))
    logits[::2] = logits[::2].round()
    forbidden = torch.from_numpy(rng.random((num_rows, width)) < 0.5)
    forbidden[:, -1] = False
    forbidden[torch.arange(num_rows) % 3 != 0] = False
    return logits.masked_fill(forbidden, -torch.inf)


def some_words(rng: np.random.Generator, num_rows: int) -> Words:
    """Both ends among them."""
    words = rng.integers(0, 2**64, num_rows, dtype=np.uint64)
    words[rng.integers(num_rows)] = 2**64 - 1
    words[rng.integers(num_rows)] = 0
    return words


def check_alike(native: NativeBackend, logits: Tensor, shape: SamplingMetadata, noise: Words, rows: Ints) -> None:
    best = REFERENCE.best(logits)
    assert native.sampling_kernels.best(logits).tolist() == best.tolist()
    assert_same(native.sampling_kernels.best_and_margin(logits), REFERENCE.best_and_margin(logits))
    arguments = (rows, best[rows], shape)
    drawn = native.sampling_kernels.draw(logits.clone(), *arguments, noise)
    assert drawn.tolist() == REFERENCE.draw(logits.clone(), *arguments, noise).tolist()
    found, wanted = logits.clone(), logits.clone()
    ids = np.sort(np.random.default_rng(0).permutation(3 * logits.shape[1])[: logits.shape[1]])
    for columns in (None, ids):
        guesses = [
            choice.predict(found, *arguments, noise, columns) for choice in (native.sampling_kernels, REFERENCE)
        ]
        assert_same(*guesses)
    assert torch.equal(found, logits)
    native.sampling_kernels.fixed_point_probs(found, *arguments)
    REFERENCE.fixed_point_probs(wanted, *arguments)
    assert torch.equal(found, wanted)


def assert_same(found: tuple[Ints, Floats], wanted: tuple[Ints, Floats]) -> None:
    """Tokens and their leads."""
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.sampled_from(WIDTHS),
    spread=st.sampled_from([0.0, 0.3, 2.0, 6.0, 40.0, 1e6]),
)
def test_tokens_and_masses_are_those_of_the_reference(
    native: NativeBackend, seed: int, width: int, spread: float
) -> None:
    """Ties, forbidden tokens, the coldest temperature and a hot one, and the ends of every cut are among them."""
    rng = np.random.default_rng(seed)
    temperatures = rng.choice(np.array(TEMPERATURES, dtype=np.float32), len(CUTS))
    logits = some_logits(rng, len(CUTS), width, spread)

    check_alike(native, logits, shaping(CUTS, temperatures), some_words(rng, len(CUTS)), np.arange(len(CUTS)))


@pytest.mark.parametrize("spread", [1.0, 3.0, 12.0])
@pytest.mark.full(but=("avx2-12.0",))
def test_a_full_vocabulary_is_treated_as_the_reference_does(native: NativeBackend, spread: float) -> None:
    rng = np.random.default_rng(int(spread))
    temperatures = np.full(len(CUTS), 0.8, dtype=np.float32)
    logits = some_logits(rng, len(CUTS), 49152, spread)

    check_alike(native, logits, shaping(CUTS, temperatures), some_words(rng, len(CUTS)), np.arange(len(CUTS)))


def test_only_the_named_rows_are_read_and_written(native: NativeBackend) -> None:
    """Rows of a wider tensor, in any order; the others keep their bits."""
    rng = np.random.default_rng(3)
    wide = some_logits(rng, 9, 700, 2.0)
    logits, rows = wide[:, 100:613], np.array([7, 0, 4])
    shape = shaping(CUTS[2:5], np.ones(3, dtype=np.float32))

    check_alike(native, logits, shape, some_words(rng, 3), rows)
    before = wide.clone()
    native.sampling_kernels.fixed_point_probs(logits, rows, REFERENCE.best(logits)[rows], shape)
    before[rows, 100:613] = logits[rows]

    assert torch.equal(wide, before)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("where", [0, 0.5, 1])
def test_rows_without_a_finite_maximum_have_no_token(native: NativeBackend, width: int, where: float) -> None:
    """A NaN or +inf anywhere, or -inf everywhere; the row next to them is sound."""
    column = int(where * (width - 1))
    logits = torch.zeros(4, width)
    logits[0, column] = torch.nan
    logits[1, column] = torch.inf
    logits[2] = -torch.inf
    logits[3, column] = 1.0

    assert native.sampling_kernels.best(logits).tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, column]
    assert REFERENCE.best(logits).tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, column]
    for choice in (native.sampling_kernels, REFERENCE):
        token_ids, margins = choice.best_and_margin(logits)
        assert token_ids.tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, column]
        assert margins.tolist() == [0.0, 0.0, 0.0, 1.0 if width > 1 else np.inf]


@pytest.mark.parametrize("width", [2, 3, 15, 16, 17, 64, 257, 513])
def test_a_lead_is_over_the_best_other_token_wherever_the_two_are(native: NativeBackend, width: int) -> None:
    """Oracle: sorting. Both are in every lane of a vector and in the last columns; a row of ties has no lead."""
    places = torch.arange(width)
    logits = torch.full((width, width), -3.0)
    logits[places, places] = 2.5
    logits[places, (7 * places + 1) % width] += 4.25
    logits[0] = -3.0
    tops = logits.sort(-1, descending=True).values

    for choice in (native.sampling_kernels, REFERENCE):
        assert choice.best_and_margin(logits)[1].tolist() == (tops[:, 0] - tops[:, 1]).tolist()


def test_a_guess_is_the_token_and_its_margin_is_over_the_best_other_one(native: NativeBackend) -> None:
    rng = np.random.default_rng(6)
    logits, rows, noise = some_logits(rng, 20, 700, 2.0), np.arange(20), some_words(rng, 20)
    arguments = (
        logits,
        rows,
        REFERENCE.best(logits),
        shaping([(0.0, 0, 1.0)] * 20, np.ones(20, dtype=np.float32)),
        noise,
    )

    tokens, margins = native.sampling_kernels.predict(*arguments)

    assert tokens.tolist() == native.sampling_kernels.draw(*arguments).tolist()
    for row, (token, margin) in enumerate(zip(tokens.tolist(), margins.tolist(), strict=True)):
        others = torch.cat((logits[row, :token], logits[row, token + 1 :]))
        assert margin == pytest.approx(float(logits[row, token] - others.max()), abs=1e-6)
    assert (margins < 0).any()


def test_threads_and_neighbours_change_nothing(native: NativeBackend, native_alone: NativeBackend) -> None:
    rng = np.random.default_rng(4)
    logits, noise = some_logits(rng, 3 * len(CUTS), 4099, 3.0), some_words(rng, 3 * len(CUTS))
    shape = shaping(CUTS * 3, np.full(3 * len(CUTS), 0.9, dtype=np.float32))
    rows = np.arange(len(logits))
    best = native.sampling_kernels.best(logits)

    together = native.sampling_kernels.draw(logits.clone(), rows, best, shape, noise)

    assert (
        native_alone.sampling_kernels.draw(logits.clone(), rows, best, shape, noise).tolist() == together.tolist()
    )
    for row in rows.tolist():
        one = slice(row, row + 1)
        cut = shaping([(CUTS * 3)[row]], shape.temperature[one])
        alone = native_alone.sampling_kernels.draw(logits[one].clone(), rows[:1], best[one], cut, noise[one])
        assert alone.tolist() == together[one].tolist()


def test_threads_and_neighbours_change_no_guess(native: NativeBackend, native_alone: NativeBackend) -> None:
    rng = np.random.default_rng(8)
    logits, noise = some_logits(rng, 3 * len(CUTS), 4099, 3.0), some_words(rng, 3 * len(CUTS))
    shape = shaping(CUTS * 3, np.full(3 * len(CUTS), 0.9, dtype=np.float32))
    rows = np.arange(len(logits))
    best = native.sampling_kernels.best(logits)

    together = native.sampling_kernels.predict(logits, rows, best, shape, noise)

    assert_same(native_alone.sampling_kernels.predict(logits, rows, best, shape, noise), together)
    for row in rows.tolist():
        one = slice(row, row + 1)
        cut = shaping([(CUTS * 3)[row]], shape.temperature[one])
        alone = native_alone.sampling_kernels.predict(logits[one], rows[:1], best[one], cut, noise[one])
        assert_same(alone, (together[0][one], together[1][one]))


def test_errors_of_rounding_hardly_ever_change_a_token(native: NativeBackend) -> None:
    """Oracle: one number in [0, 1) and the running sum, whose borders all move: 4 % of the tokens change."""
    rng, num, width = np.random.default_rng(2), 1500, 10_000
    logits = torch.from_numpy(rng.permutation(-1.1 * np.log(1 + np.arange(width)))).float().repeat(9, 1)
    logits[1:] += torch.from_numpy(1e-4 * rng.standard_normal((8, width))).float()
    ends, best = logits.double().softmax(-1).cumsum(-1).numpy(), native.sampling_kernels.best(logits)
    shape = shaping([(0.0, 0, 1.0)] * num, np.ones(num, dtype=np.float32))
    flips, by_sum = 0, 0
    for row in range(1, 9):
        noise = rng.integers(0, 2**64, num, dtype=np.uint64)
        same, other = (
            native.sampling_kernels.draw(logits, np.full(num, at), np.full(num, best[at]), shape, noise)
            for at in (0, row)
        )
        flips += int((same != other).sum())
        numbers = (noise >> np.uint64(11)) * 2.0**-53
        by_sum += int((np.searchsorted(ends[0], numbers) != np.searchsorted(ends[row], numbers)).sum())
    assert by_sum > 100
    assert 50 * flips < by_sum


def test_the_choice_goes_on_when_its_backend_is_gone(kernel_cache: Path) -> None:
    choice = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2).sampling_kernels

    assert choice.best(torch.eye(64)).tolist() == list(range(64))


def test_tokens_follow_the_distribution(native: NativeBackend) -> None:
    """Oracle: softmax in float64, top_p cut by hand; chi-square of 60,000 draws, 99.99 % quantile."""
    logits = torch.tensor([[2.0, 1.0, 0.0, 1.5, -1.0, 0.5, 0.2, -3.0, 0.9]])
    num, temperature = 60_000, 0.7
    distribution = (logits[0].double() / temperature).softmax(-1).numpy()
    order = np.argsort(-distribution)
    kept = order[: 1 + int((distribution[order].cumsum() < 0.95).sum())]
    expected = num * distribution[kept] / distribution[kept].sum()
    noise = np.random.default_rng(5).integers(0, 2**64, num, dtype=np.uint64)
    shape = shaping([(0.0, 0, 0.95)] * num, np.full(num, temperature, dtype=np.float32))
    zeros = np.zeros(num, dtype=np.int64)

    drawn = native.sampling_kernels.draw(logits, zeros, zeros, shape, noise)

    counts = np.bincount(drawn, minlength=len(distribution))
    assert counts[kept].sum() == num
    assert float(((counts[kept] - expected) ** 2 / expected).sum()) < 31.8  # 7 degrees of freedom or fewer


def test_random_words_are_those_of_the_reference(native: NativeBackend) -> None:
    rng = np.random.default_rng(6)
    counters, keys = (rng.integers(0, 2**32, (rows, 37), dtype=np.uint64) for rows in (4, 2))

    assert native.sampling_kernels.philox(counters, keys).tolist() == philox(counters, keys).tolist()


def test_a_sampler_chooses_the_same_tokens_with_either(native: NativeBackend) -> None:
    """Greedy and random requests side by side, penalties and masks, a row that is no numbers, several steps."""
    width, params = 513, [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=1.0),
        SamplingParams(temperature=1.3, top_k=7, allowed_token_ids=(3, 4, 500)),
        SamplingParams(temperature=0.0, logit_bias=((9, 50.0),)),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=0.9, min_tokens=4, stop_token_ids=(1,)),
    ]  # fmt: skip
    samplers = [Sampler(8, width, (0,)), Sampler(8, width, (0,), native.sampling_kernels)]
    for slot, sampling in enumerate(params):
        for sampler in samplers:
            start = SequenceStart(slot=slot, sampling=sampling, seed=slot, prompt_len=2, token_ids=(5, 6))
            sampler.start(start)
    rng = np.random.default_rng(7)
    for position in range(2, 12):
        logits = torch.from_numpy(rng.standard_normal((len(params), width)).astype(np.float32) * 2)
        logits[5, 100] = torch.nan if position == 6 else 0.0
        slots, positions = list(range(len(params))), [position] * len(params)
        plain, quick = (sample(sampler, logits.clone(), slots, positions) for sampler in samplers)
        assert plain == quick
        rows = plain_rows(slots, positions)
        assert torch.equal(*(sampler.rows(logits.clone(), rows).probabilities() for sampler in samplers))
        for sampler in samplers:
            sampler.accept(slots, [max(row.token_id, 0) for row in plain])
