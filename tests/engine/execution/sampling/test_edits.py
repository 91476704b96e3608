"""Bias, penalties and masks. Oracles: transformers' repetition penalty, and one token at a time in Python."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from faser.engine.execution.sampling.edits import (
    Entries,
    EntryPenalties,
    add_bias,
    allow_only,
    forbid,
    penalise,
)

VOCAB = 40


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def entries(pairs: list[tuple[int, int]]) -> Entries:
    rows = sorted({row for row, _ in pairs})
    return Entries.of(rows, [np.array([token_id for other, token_id in pairs if other == row]) for row in rows])


def penalties(counts: list[int], repetition: float, frequency: float, presence: float) -> EntryPenalties:
    ones = np.ones(len(counts))
    return EntryPenalties(
        output_counts=np.array(counts, dtype=np.float64),
        repetition=ones * repetition,
        frequency=ones * frequency,
        presence=ones * presence,
    )


@pytest.mark.parametrize("penalty", [0.5, 1.2, 2.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    seen = [[3, 5, 3, 7], [0, 39, 1, 1]]
    logits = random_logits(2)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(seen), logits.clone())

    pairs = [(row, token_id) for row, ids in enumerate(seen) for token_id in dict.fromkeys(ids)]
    penalise(logits, entries(pairs), penalties([0] * len(pairs), penalty, 0.0, 0.0))

    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("repetition", [1.0, 1.3])
def test_frequency_counts_and_presence_does_not(repetition: float) -> None:
    logits = random_logits(3)
    before = logits.tolist()
    outputs = [[1, 1, 1, 2], [], [2]]
    counts = [Counter(output) for output in outputs]
    prompt = [1, 9]
    pairs = [(row, token_id) for row in range(3) for token_id in sorted({*prompt, *outputs[row]})]

    penalise(logits, entries(pairs), penalties([counts[r][t] for r, t in pairs], repetition, 0.5, -0.25))

    for row in range(3):
        for token_id in range(VOCAB):
            expected = before[row][token_id]
            if token_id in {*prompt, *outputs[row]}:
                expected = expected / repetition if expected > 0 else expected * repetition
            if counts[row][token_id]:
                expected -= 0.5 * counts[row][token_id] - 0.25
            assert float(logits[row, token_id]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_no_penalty_turns_a_logit_into_infinity_or_nan(penalty: float) -> None:
    logits = torch.tensor([[5.0, -5.0, 0.0, 1.0]])

    penalise(logits, entries([(0, 0), (0, 1), (0, 2)]), penalties([1, 1, 1], penalty, 0.0, 0.0))

    assert logits.isfinite().all()


def test_bias_is_added_where_it_is_asked_for_and_nowhere_else() -> None:
    logits = random_logits(2)
    expected = logits.clone()
    expected[0, 4] += 100.0
    expected[1, 39] -= 2.5

    add_bias(logits, entries([(0, 4), (1, 39)]), np.array([100.0, -2.5], dtype=np.float32))

    assert torch.equal(logits, expected)


def test_allowed_tokens_keep_their_logits_and_other_rows_keep_all() -> None:
    logits = random_logits(3)
    before = logits.clone()

    allow_only(logits, entries([(0, 4), (0, 5), (2, 39)]))

    assert logits[0].isfinite().nonzero()[:, 0].tolist() == [4, 5]
    assert logits[2].isfinite().nonzero()[:, 0].tolist() == [39]
    assert torch.equal(logits[1], before[1])
    assert torch.equal(logits[0, 4:6], before[0, 4:6])


def test_forbidden_tokens_have_a_logit_of_minus_infinity() -> None:
    logits = random_logits(2)

    forbid(logits, entries([(1, 0), (1, 3)]))

    assert (logits == -math.inf).nonzero().tolist() == [[1, 0], [1, 3]]
