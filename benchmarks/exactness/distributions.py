"""Small targets whose answers have a distribution that can be written down, and how far samples are from it.

Tables are a target and a draft model that are tables, and the length of their answers. Owns the tables, the
requests' parameters, the exact distribution and chi-square. The distribution is computed from the documented
meaning of the parameters in float64, without any of the engine's code.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.types.sampling import SamplingParams

ENOUGH = 10.0  # expected outcomes of a cell; rarer cells are counted as one

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """V tokens, answers of `length` of them. prompt: at least two tokens, never all of the vocabulary.

    target_logits: [V * V, V] float32, by the last two tokens: row V * (last but one) + last. draft_logits: [V, V]
    float32, by the last token.
    """

    vocab: int
    length: int
    prompt: tuple[int, ...]
    target_logits: Tensor
    draft_logits: Tensor

    @property
    def num_outcomes(self) -> int:
        return int(self.vocab**self.length)

    def outcomes(self, tokens: Ints) -> Ints:
        """Return the number of each answer: [N]. tokens: [N, length]."""
        return np.asarray(tokens @ self.vocab ** np.arange(self.length - 1, -1, -1), dtype=np.int64)


def make_tables(vocab: int, length: int, prompt: tuple[int, ...], seed: int, distance: float) -> Tables:
    """Random tables. The draft model knows what the last token means, but not the one before it.

    distance: of the draft model's logits from the target's, about; theirs have a standard deviation of 1.3.
    """
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(vocab, vocab, generator=generator) * 1.3
    own = torch.randn(vocab, vocab, vocab, generator=generator) * distance
    noise = torch.randn(vocab, vocab, generator=generator) * distance
    return Tables(
        vocab=vocab,
        length=length,
        prompt=prompt,
        target_logits=(shared + own).view(vocab * vocab, vocab),
        draft_logits=shared + noise,
    )


WIDE = make_tables(10, 3, (0, 1, 2, 3, 1, 4, 5, 2, 0, 3), 20260427, 0.7)
DEEP = make_tables(3, 8, (0, 1, 0, 0, 1, 1, 0), 20260428, 0.3)


def samplings(vocab: int) -> Mapping[str, SamplingParams]:
    """Return sampling parameters by name."""
    bias = ((0, 1.2), (1, -0.8))
    few = 5 if vocab > 5 else 2
    return {
        "T 0.7": SamplingParams(temperature=0.7),
        "T 1": SamplingParams(),
        "top_p 0.9": SamplingParams(top_p=0.9),
        "min_p 0.1": SamplingParams(min_p=0.1),
        "top_k": SamplingParams(top_k=few),
        "penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3),
        "logit_bias": SamplingParams(logit_bias=bias),
        "all": SamplingParams(
            temperature=0.8,
            top_p=0.95,
            min_p=0.02,
            top_k=few + 1,
            repetition_penalty=1.2,
            frequency_penalty=0.3,
            presence_penalty=0.2,
            logit_bias=bias,
        ),
    }


def exact_distribution(tables: Tables, sampling: SamplingParams) -> Floats:
    """Return the probability [V ** length] of each answer of the target alone, in the order of Tables.outcomes."""
    table = tables.target_logits.double().numpy()
    last = np.array([tables.prompt[-2:]])  # [N, 2], of all beginnings
    counts = np.zeros((1, tables.vocab))
    distribution = np.ones(1)
    for _ in range(tables.length):
        logits = table[last[:, 0] * tables.vocab + last[:, 1]]
        probs = _final_probs(_processed(logits, counts, tables, sampling), sampling)
        distribution = (distribution[:, None] * probs).ravel()
        number = len(last)
        said = np.tile(np.arange(tables.vocab), number)
        last = np.stack((np.repeat(last[:, 1], tables.vocab), said), -1)
        counts = np.repeat(counts, tables.vocab, 0)
        counts[np.arange(len(said)), said] += 1
    return distribution


def _processed(logits: Floats, counts: Floats, tables: Tables, sampling: SamplingParams) -> Floats:
    """Bias, then penalties. logits, counts: [N, V], of the output so far."""
    found = logits.copy()
    for token_id, value in sampling.logit_bias:
        found[:, token_id] += value
    seen = counts > 0
    seen[:, list(tables.prompt)] = True
    by = sampling.repetition_penalty
    found = np.where(seen, np.where(found > 0, found / by, found * by), found)
    return found - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def _final_probs(logits: Floats, sampling: SamplingParams) -> Floats:
    """Temperature, min_p, top_k, top_p, each on what the one before has left. logits: [N, V]."""
    order = np.argsort(-logits, axis=-1, kind="stable")
    ordered = np.take_along_axis(logits, order, -1)
    weights = np.exp((ordered - ordered[:, :1]) / sampling.temperature)
    weights[weights < sampling.min_p] = 0.0
    if sampling.top_k:
        weights[:, sampling.top_k :] = 0.0
    before = weights.cumsum(-1) - weights
    if sampling.top_p < 1:
        weights[before >= sampling.top_p * weights.sum(-1, keepdims=True)] = 0.0
    found = np.empty_like(weights)
    np.put_along_axis(found, order, weights / weights.sum(-1, keepdims=True), -1)
    return found


def joint_and_single(answers: Ints, distribution: Floats, tables: Tables) -> float:
    """p-value of the worst of: the whole answers, and each place's token alone; times the number of them.

    answers: [N, length]. One place has few cells, which sees a small bias better than thousands of cells do.
    """
    values = [p_value(tables.outcomes(answers), distribution)]
    by_place = distribution.reshape((tables.vocab,) * tables.length)
    for place in range(tables.length):
        others = tuple(axis for axis in range(tables.length) if axis != place)
        values.append(p_value(answers[:, place], by_place.sum(others)))
    return min(1.0, len(values) * min(values))


def p_value(outcomes: Ints, distribution: Floats) -> float:
    """Return chi-square's probability of being at least that far off by chance; 0 for what cannot be.

    Cells that expect fewer than ENOUGH become one, with as many more of the rarest as lift it to ENOUGH.
    """
    observed = np.bincount(outcomes, minlength=len(distribution)).astype(np.float64)
    if observed[distribution == 0].any():
        return 0.0
    expected = distribution * len(outcomes)
    order = np.argsort(expected, kind="stable")
    observed, expected = observed[order], expected[order]
    rare = int(np.searchsorted(expected, ENOUGH))
    if rare:
        rare = max(rare, int(np.searchsorted(expected.cumsum(), ENOUGH)) + 1)
        observed = np.append(observed[rare:], observed[:rare].sum())
        expected = np.append(expected[rare:], expected[:rare].sum())
    distance = float(((observed - expected) ** 2 / expected).sum())
    return chi_square_tail(distance, len(expected) - 1)


def chi_square_tail(distance: float, freedom: int) -> float:
    """P(χ² ≥ distance) with `freedom` degrees."""
    if freedom < 1:
        return 1.0
    halves = torch.tensor([freedom / 2, distance / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def holm(p_values: list[float]) -> list[float]:
    """Adjusted so that one of them lies below α with a probability of at most α, were all distributions right."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    found, worst = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, p_values[i] * (len(p_values) - rank)))
        found[i] = worst
    return found


def uniform_p_value(values: list[float]) -> float:
    """Kolmogorov and Smirnov's: how likely uniform numbers are to be this uneven. Asymptotic, from 35 on."""
    ordered, number = np.sort(values), len(values)
    steps = np.arange(number + 1) / number
    gap = float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))
    reach = (math.sqrt(number) + 0.12 + 0.11 / math.sqrt(number)) * gap  # Stephens, 1970
    tail = 2 * sum((-1.0) ** (k - 1) * math.exp(-2 * k * k * reach * reach) for k in range(1, 101))
    return min(1.0, max(0.0, tail))
