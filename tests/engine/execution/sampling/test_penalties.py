"""The context of penalties. Oracle: collections.Counter."""

import random
from collections import Counter

import pytest

from faser.engine.execution.sampling.penalties import TokenCounts


def as_dict(counts: TokenCounts) -> dict[int, float]:
    return dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_counts_follow_a_growing_output(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(500) for _ in range(rng.randrange(200))]
    output: list[int] = []
    counts = TokenCounts(prompt, output)

    for _ in range(600):
        output.append(rng.randrange(500))
        counts.add(output[-1])

    expected = dict.fromkeys(prompt, 0) | Counter(output)
    assert as_dict(counts) == expected


def test_counts_started_in_the_middle_equal_counts_from_the_start() -> None:
    grown = TokenCounts([1, 2, 2], [])
    for token_id in (2, 7, 7, 1):
        grown.add(token_id)

    assert as_dict(TokenCounts([1, 2, 2], [2, 7, 7, 1])) == as_dict(grown)


@pytest.mark.parametrize("seed", range(5))
def test_looking_ahead_is_adding_without_keeping(seed: int) -> None:
    rng = random.Random(seed)
    prompt, output, ahead = ([rng.randrange(30) for _ in range(size)] for size in (20, 9, seed * 3))
    counts, grown = TokenCounts(prompt, output), TokenCounts(prompt, output)
    before = as_dict(counts)
    for token_id in ahead:
        grown.add(token_id)

    token_ids, output_counts = counts.followed_by(ahead)

    assert dict(zip(token_ids.tolist(), output_counts.tolist(), strict=True)) == as_dict(grown)
    assert as_dict(counts) == before
