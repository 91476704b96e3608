"""The order of a vocabulary, truncation and the draw.

Oracles: Python's sort by (-value, id) on values with many ties, Python integers one token at a time, transformers'
warpers, enumeration.
"""

import math
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from faser.engine.execution.sampling.distribution import (
    Truncation,
    best,
    choose,
    draw,
    final_probs,
    first_and_margin,
    fixed_point_probs,
    kept_probs,
    leading,
    scale,
)
from faser.engine.execution.sampling.kernels import race
from faser.kernels.interface.sampling import RACE_BLOCK

CPU = torch.device("cpu")


def tied_values(num_rows: int, width: int, num_levels: int) -> Tensor:
    rng = torch.Generator().manual_seed(width * num_levels)
    return torch.randint(num_levels, (num_rows, width), generator=rng).float() - num_levels / 2


def ordered_ids(row: Tensor) -> list[int]:
    values = row.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@pytest.mark.parametrize("width", [1, 7, 256, 300, 1024])
def test_the_best_is_the_lowest_id_of_the_largest_value(width: int) -> None:
    values = tied_values(20, width, 5)

    token_ids, largest = best(values)
    assert token_ids.tolist() == [ordered_ids(row)[0] for row in values]
    assert torch.equal(largest, values.amax(-1))


@pytest.mark.parametrize("num_levels", [1, 5, 1000])
@pytest.mark.parametrize("width", [2, 7, 256, 300, 1024])
def test_the_lead_is_what_the_first_has_more_than_the_second(width: int, num_levels: int) -> None:
    values = tied_values(20, width, num_levels)
    before = values.clone()

    token_ids, margins = first_and_margin(values)

    assert torch.equal(values, before)
    assert token_ids.tolist() == [ordered_ids(row)[0] for row in values]
    ordered = values.sort(-1, descending=True).values
    assert torch.equal(margins, ordered[:, 0] - ordered[:, 1])


@pytest.mark.parametrize("num_levels", [1, 3, 30, 100_000])
@pytest.mark.parametrize("num_columns", [300, 1024])
@pytest.mark.parametrize("width", [1, 5, 64, 300])
def test_the_certain_part_of_leading_is_the_order(width: int, num_columns: int, num_levels: int) -> None:
    values = tied_values(10, num_columns, num_levels)

    found = leading(values, width)

    assert found.token_ids.shape == (10, width)
    for row in range(10):
        sure = int(found.num_sure[row])
        assert found.token_ids[row, :sure].tolist() == ordered_ids(values[row])[:sure]
        assert torch.equal(found.values[row], values[row].sort(descending=True).values[:width])


def test_leading_is_certain_of_all_but_ties_with_its_last_entry() -> None:
    values = torch.tensor([[5.0, 1.0, 4.0, 3.0, 3.0, 2.0]])

    assert leading(values, 3).num_sure.tolist() == [2]
    assert leading(values, 5).num_sure.tolist() == [4]
    assert leading(values, 6).num_sure.tolist() == [6]


OFF = (0.0, 0, 1.0)
CUTS = [OFF, (0.05, 0, 1.0), (0.0, 5, 1.0), (0.0, 0, 0.7), (0.02, 20, 0.95), (0.3, 0, 0.5), (0.0, 200, 0.99)]
CUTS += [(1.0, 0, 1.0), (0.0, 1, 1.0), (0.0, 0, 1e-9), (0.0, 10**9, 1.0), (0.0, 0, 0.999999)]


def truncation(cuts: list[tuple[float, int, float]]) -> Truncation:
    """cuts: (min_p, top_k, top_p) per row."""
    return Truncation(
        min_p=torch.tensor([min_p for min_p, _, _ in cuts], dtype=torch.float64),
        top_k=torch.tensor([top_k for _, top_k, _ in cuts], dtype=torch.int64),
        top_p=torch.tensor([top_p for _, _, top_p in cuts], dtype=torch.float64),
    )


def random_scaled(num_rows: int, width: int, *, seed: int, spread: float = 3.0, tied: bool = False) -> Tensor:
    logits = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * spread
    logits = logits.round() if tied else logits
    return scale(logits, torch.ones(num_rows))


def random_race(num_rows: int, width: int, seed: int = 0) -> Tensor:
    return race(np.random.default_rng(seed).integers(0, 2**64, num_rows, dtype=np.uint64), width, CPU)


def plainly_kept(scaled: list[float], fixed_probs: list[int], cut: tuple[float, int, float]) -> set[int]:
    """Token ids that the truncation keeps: the definition, step by step."""
    min_p, top_k, top_p = cut
    kept = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    kept = [i for i in kept if math.exp(scaled[i]) >= min_p * (1 - 1e-7)]
    if top_k:
        kept = kept[:top_k]
    if top_p < 1:
        target = Fraction(top_p) * sum(fixed_probs[i] for i in kept)
        sums = accumulate(fixed_probs[i] for i in kept)
        kept = kept[: 1 + sum(total < target for total in sums)]
    return set(kept)


def test_scaling_leaves_the_most_likely_token_at_zero_however_cold() -> None:
    logits = torch.tensor([[1.0, 3.0, -2.0], [500.0, -500.0, 499.0], [7.0, 7.0, 6.999]])

    scaled = scale(logits, torch.tensor([0.5, 2.0, torch.finfo(torch.float32).tiny]))

    assert scaled[:2].tolist() == [[-4.0, 0.0, -10.0], [0.0, -500.0, -0.5]]
    assert scaled[2, :2].tolist() == [0.0, 0.0]
    assert float(scaled[2, 2]) < -1e30
    assert fixed_point_probs(scaled[2:]).tolist() == [[2.0**51, 2.0**51, 0.0]]


def test_masses_are_whole_numbers_proportional_to_probabilities() -> None:
    scaled = random_scaled(4, 5000, seed=1)

    fixed_probs = fixed_point_probs(scaled).double()

    assert torch.equal(fixed_probs, fixed_probs.floor())
    assert (fixed_probs.sum(-1) < 2**53).all()
    torch.testing.assert_close(fixed_probs / 2.0**52, scaled.double().softmax(-1), rtol=1e-5, atol=1e-15)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("width", [1, 3, 60, 64, 65, 700])
def test_truncation_keeps_what_its_definition_keeps(width: int, tied: bool) -> None:
    for spread in (0.3, 3.0):
        scaled = random_scaled(len(CUTS), width, seed=width, spread=spread, tied=tied)
        fixed_probs = fixed_point_probs(scaled)

        found = kept_probs(scaled, truncation(CUTS))

        for row, cut in enumerate(CUTS):
            whole = [int(mass) for mass in fixed_probs[row].tolist()]
            kept = plainly_kept(scaled[row].tolist(), whole, cut)
            assert found[row].tolist() == [mass if i in kept else 0 for i, mass in enumerate(whole)], cut


@pytest.mark.parametrize(
    "warper, cut",
    [
        (TopKLogitsWarper(7), (0.0, 7, 1.0)),
        (TopKLogitsWarper(150), (0.0, 150, 1.0)),
        (TopPLogitsWarper(0.6), (0.0, 0, 0.6)),
        (TopPLogitsWarper(0.99), (0.0, 0, 0.99)),
        (MinPLogitsWarper(0.1), (0.1, 0, 1.0)),
    ],
)
def test_truncation_keeps_what_transformers_keeps(
    warper: TopKLogitsWarper | TopPLogitsWarper | MinPLogitsWarper, cut: tuple[float, int, float]
) -> None:
    logits = torch.randn(20, 1000, generator=torch.Generator().manual_seed(3)) * 3
    cooled = TemperatureLogitsWarper(0.8)(torch.empty(0), logits)
    expected = warper(torch.empty(0), cooled).softmax(-1)

    fixed_probs = kept_probs(scale(logits, torch.full((20,), 0.8)), truncation([cut] * 20)).double()

    assert torch.equal(fixed_probs > 0, expected > 0)
    torch.testing.assert_close(
        (fixed_probs / fixed_probs.sum(-1, keepdim=True)).float(), expected, rtol=1e-4, atol=1e-9
    )


def test_ties_at_the_edge_go_to_the_lower_ids() -> None:
    scaled = scale(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]] * 3), torch.ones(3))

    kept = kept_probs(scaled, truncation([(0.0, 2, 1.0), (0.0, 0, 0.5), (1.0, 0, 1.0)])) > 0

    assert kept.long().tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 0]]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.sampled_from([5, 64, 65, 130, 900]),
    spread=st.sampled_from([0.0, 0.5, 2.0, 6.0, 40.0]),
    tied=st.booleans(),
    cuts=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.001, 0.2, 1.0]),
            st.sampled_from([0, 1, 40, 63, 64, 65, 500]),
            st.floats(0.001, 1.0),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_the_quick_choice_is_the_plain_one(
    seed: int, width: int, spread: float, tied: bool, cuts: list[tuple[float, int, float]]
) -> None:
    """Oracle: the draw from the whole final distribution, in 16 races.

    Wide nuclei and ties at every edge are among the examples.
    """
    scaled = random_scaled(len(cuts), width, seed=seed, spread=spread, tied=tied).repeat(16, 1)
    cut = truncation(cuts * 16)
    noise = random_race(16 * len(cuts), width, seed)

    assert choose(scaled, cut, noise).tolist() == draw(kept_probs(scaled, cut), noise).tolist()
    assert torch.equal(final_probs(scaled, cut), kept_probs(scaled, cut))


@pytest.mark.parametrize("width", [1, 2, 255, 256, 257, 1000])
@pytest.mark.parametrize("share_of_zeros", [0.0, 0.9])
def test_the_draw_is_won_by_the_first_block_and_its_first_column(width: int, share_of_zeros: float) -> None:
    """Oracle: fractions of Python. Two races in each row are of equal numbers, so that the most likely wins."""
    rng = torch.Generator().manual_seed(width)
    fixed_probs = torch.randint(1, 2**40, (40, width), generator=rng).double()
    fixed_probs *= torch.rand(40, width, generator=rng) >= share_of_zeros
    fixed_probs[:, int(torch.randint(width, (1,), generator=rng))] += 1
    numbers = random_race(40, width)
    numbers[:2] = 1.0

    found = draw(fixed_probs, numbers).tolist()

    def first(times: list[float], probs: list[int]) -> int:
        runs = [Fraction(time) / prob if prob else math.inf for time, prob in zip(times, probs, strict=True)]
        return runs.index(min(runs))

    for row in range(40):
        whole, times = [int(mass) for mass in fixed_probs[row].tolist()], numbers[row].tolist()
        blocks = [whole[at : at + RACE_BLOCK] for at in range(0, width, RACE_BLOCK)]
        won = first(times[min(width, RACE_BLOCK) :], [sum(each) for each in blocks])
        inside = blocks[won]
        assert found[row] == won * RACE_BLOCK + first(times[: len(inside)], inside)
        assert whole[found[row]] > 0


def test_a_token_of_mass_zero_is_never_drawn() -> None:
    fixed_probs = torch.zeros(400, 600)
    fixed_probs[:, 299] = 1.0
    fixed_probs[200:, 300] = 2.0**52

    found = draw(fixed_probs, random_race(400, 600)).tolist()

    assert found == [299] * 200 + [300] * 200


def test_tokens_of_many_blocks_follow_their_probabilities() -> None:
    """Chi-square over 60,000 races of 700 tokens, three blocks: 699 degrees of freedom, standard deviation 37."""
    num, width = 60_000, 700
    probs = fixed_point_probs(random_scaled(1, width, seed=4, spread=1.0))
    counts = torch.zeros(width)
    for seed in range(10):
        counts += draw(probs.expand(num // 10, -1), random_race(num // 10, width, seed)).bincount(minlength=width)
    expected = num * probs[0].double() / probs.double().sum()
    assert abs(float(((counts - expected) ** 2 / expected).sum()) - 699) < 4 * 37.4


def test_columns_race_by_their_ids() -> None:
    """Oracle: the draw in the whole vocabulary, in which the other tokens have no probability."""
    ids = torch.from_numpy(np.random.default_rng(1).permutation(900)[:50]).sort().values
    probs, numbers = fixed_point_probs(random_scaled(30, 50, seed=3)), random_race(30, 900)
    whole = torch.zeros(30, 900).index_copy_(1, ids, probs)
    assert ids[draw(probs, numbers, ids)].tolist() == draw(whole, numbers).tolist()


def test_top_k_of_one_is_greedy_even_in_a_tie() -> None:
    scaled = scale(torch.tensor([[0.0, 4.0, 1.0, 4.0]] * 50), torch.ones(50))

    assert choose(scaled, truncation([(0.0, 1, 1.0)] * 50), random_race(50, 4)).tolist() == [1] * 50


@pytest.mark.parametrize("width", [1000, 49152])
def test_a_row_gets_the_same_bits_alone_and_among_others(width: int) -> None:
    num_rows = 9
    logits = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(5)) * 2
    temperature = torch.linspace(0.3, 2.0, num_rows)
    cuts = (CUTS * 2)[:num_rows]
    noise = random_race(num_rows, width)
    together = scale(logits.clone(), temperature)
    tokens = choose(together.clone(), truncation(cuts), noise)

    for row in range(num_rows):
        one = slice(row, row + 1)
        alone = scale(logits[one].clone(), temperature[one])
        assert torch.equal(fixed_point_probs(alone), fixed_point_probs(together)[one])
        assert torch.equal(choose(alone, truncation(cuts[one]), noise[one]), tokens[one])


@pytest.mark.parametrize("spread", [1.5, 4.0, 20.0])
def test_the_quick_choice_is_the_plain_one_over_a_full_vocabulary(spread: float) -> None:
    scaled = random_scaled(len(CUTS), 49152, seed=8, spread=spread)
    cut, noise = truncation(CUTS), random_race(len(CUTS), 49152)

    assert choose(scaled, cut, noise).tolist() == draw(kept_probs(scaled, cut), noise).tolist()
    assert torch.equal(final_probs(scaled, cut), kept_probs(scaled, cut))


def test_a_full_vocabulary_with_a_wide_nucleus_is_cut_exactly() -> None:
    """Oracle: a full sort. More than a thousand tokens are kept, so no short list of candidates can do."""
    scaled = random_scaled(3, 49152, seed=2, spread=1.5)
    fixed_probs = fixed_point_probs(scaled).double()

    found = kept_probs(scaled, truncation([(0.0, 0, 0.8), (0.0, 5000, 1.0), (0.0, 20000, 0.9)])) > 0

    order = scaled.sort(dim=-1, descending=True, stable=True).indices
    sums = fixed_probs.gather(-1, order).cumsum(-1)
    limits = [49152, 5000, 20000]
    for row, top_p in enumerate((0.8, 1.0, 0.9)):
        target = top_p * float(sums[row, limits[row] - 1])
        num_kept = min(limits[row], 1 + int((sums[row] < target).sum()))
        assert num_kept > 1000
        assert torch.equal(found[row].nonzero()[:, 0], order[row, :num_kept].sort().values)
