"""Verifiers with the sampler and its noise follow the target's joint law over three tokens, step after step.

Oracle: enumeration of the law, compared by chi-square over many seeds. The seeds are fixed, so luck is fixed too.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.noise import Purpose, uniforms
from faser.engine.sampler import Sampler
from faser.engine.spec.verifiers.block import Block
from faser.engine.spec.verifiers.coupled import Coupled
from faser.engine.spec.verifiers.rejection import Rejection
from faser.engine.spec.verify import DraftedRows, Verifier
from faser.types import SamplingParams
from tests.engine.test_sampler import EOS, PROMPT, exact_distribution, plain_logits, starting

NUM_SLOTS = 4096
NUM_ROUNDS = 4
VOCAB = 10
LENGTH = 3
ENOUGH = 20  # expected outcomes of a cell; with fewer, chi-square has a heavier tail than it should
UNLIKELY = 3.72  # standard deviations: beyond them lies a probability of 1e-4
_RNG = torch.Generator().manual_seed(8)
TARGET_LOGITS = torch.randn(VOCAB, VOCAB, generator=_RNG) * 1.5  # by the token before
DRAFT_PROBS = (TARGET_LOGITS + torch.randn(VOCAB, VOCAB, generator=_RNG)).double().softmax(-1)

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """make: the verifier. sampled: drafts are drawn from DRAFT_PROBS, else they are its most likely tokens.

    gamma: drafted tokens of a sequence in a step. fresh: a position drafted again gets noise of its own. claimed:
    what the verifier is told of DRAFT_PROBS.
    """

    make: Callable[[Sampler], Verifier]
    sampled: bool
    sampling: SamplingParams
    gamma: Callable[[int, int], int] = lambda sequence, step: (sequence + step) % 4
    fresh: bool = True
    claimed: Callable[[Tensor], Tensor] = lambda probs: probs


def three(_sequence: int, _step: int) -> int:
    return 3


def drafts(case: Case, last: Ints, positions: Ints, gammas: Ints) -> tuple[list[tuple[int, ...]], Tensor | None]:
    """Of sequences whose seed is their number, and what the tokens were drawn from."""
    widest = int(gammas.max())
    tokens, sources = np.zeros((len(last), widest), dtype=np.int64), np.zeros((len(last), widest), dtype=np.int64)
    seeds = np.arange(len(last), dtype=np.uint64) if len(last) == NUM_SLOTS else np.zeros(0, dtype=np.uint64)
    assert len(seeds), "every slot drafts, done or not"
    for i in range(widest):
        sources[:, i] = last
        if case.sampled:
            noise = uniforms(seeds, positions + i, Purpose.DRAFT, positions if case.fresh else None)
            last = (DRAFT_PROBS.cumsum(-1).numpy()[last] < noise[:, None]).sum(-1).clip(max=VOCAB - 1)
        else:
            last = DRAFT_PROBS.argmax(-1).numpy()[last]
        tokens[:, i] = last
    used = np.arange(widest) < gammas[:, None]
    chosen = [tuple(row[:gamma]) for row, gamma in zip(tokens.tolist(), gammas.tolist(), strict=True)]
    return chosen, case.claimed(DRAFT_PROBS[sources[used]]) if case.sampled else None


def play(case: Case, sampler: Sampler, position: int) -> Ints:
    """LENGTH tokens of every slot, [NUM_SLOTS, LENGTH]; all slots go on until the last one has them."""
    verifier = case.make(sampler)
    outputs: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
    for step in itertools.count():
        if all(len(output) >= LENGTH for output in outputs):
            return np.array([output[:LENGTH] for output in outputs])
        last = np.array([output[-1] if output else PROMPT[-1] for output in outputs])
        positions = np.array([position + len(output) for output in outputs])
        gammas = np.array([case.gamma(slot, step) for slot in range(NUM_SLOTS)])
        drafted, probs = drafts(case, last, positions, gammas)
        sequences = [
            DraftedRows(slot=slot, position=at, draft=draft)
            for slot, (at, draft) in enumerate(zip(positions.tolist(), drafted, strict=True))
        ]
        before = [
            token_id for one, draft in zip(last.tolist(), drafted, strict=True) for token_id in (one, *draft)
        ]
        for slot, verdict in enumerate(verifier.judge(TARGET_LOGITS[before], sequences, probs)):
            outputs[slot] += verdict.token_ids
            sampler.accept([slot] * len(verdict.token_ids), verdict.token_ids)
    raise AssertionError("a step brings a token")


def samples(case: Case) -> Ints:
    """Rounds use positions of their own, which gives them noise of their own."""
    found = []
    sampler = Sampler(NUM_SLOTS, VOCAB, EOS, "cpu")
    for turn in range(NUM_ROUNDS):
        for slot in range(NUM_SLOTS):
            if turn:
                sampler.release(slot)
            sampler.start(starting(case.sampling, slot=slot, seed=slot))
        found.append(play(case, sampler, len(PROMPT) + 64 * turn))
    return np.concatenate(found)


def exact_law(sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, prob in law.items():
            raw = TARGET_LOGITS[tokens[-1] if tokens else PROMPT[-1]].tolist()
            processed = plain_logits(sampling, raw, list(tokens), len(PROMPT) + len(tokens))
            for token_id, share in exact_distribution(sampling, processed).items():
                longer[*tokens, token_id] = prob * share
        law = longer
    return law


def surprise(found: Ints, law: dict[tuple[int, ...], float]) -> float:
    """Chi-square, in standard deviations (Wilson and Hilferty's cube root). Rare outcomes are counted as one."""
    outcomes, counts = np.unique(found, axis=0, return_counts=True)
    seen = {tuple(outcome): count for outcome, count in zip(outcomes.tolist(), counts.tolist(), strict=True)}
    assert seen.keys() <= law.keys(), "an outcome that cannot be"
    common = [tokens for tokens, prob in law.items() if prob * len(found) >= ENOUGH]
    expected = np.array([law[tokens] * len(found) for tokens in common])
    observed = np.array([seen.get(tokens, 0) for tokens in common])
    rest = len(found) - expected.sum()
    distance = float(((observed - expected) ** 2 / expected).sum())
    distance += (len(found) - int(observed.sum()) - rest) ** 2 / rest if rest >= ENOUGH else 0.0
    freedom = len(common) - (rest < ENOUGH)
    spread = 2 / (9 * freedom)
    return float((distance / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


WARM = SamplingParams(temperature=1.0)
SHARP = SamplingParams(temperature=0.7, top_p=0.85, min_p=0.02)
PENALISED = SamplingParams(temperature=1.2, top_k=6, repetition_penalty=1.4, frequency_penalty=0.6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(Coupled, False, WARM),
        Case(Coupled, False, PENALISED),
        Case(Rejection, False, SHARP),
        Case(Rejection, True, WARM),
        Case(Rejection, True, SHARP, three),
        Case(Rejection, True, PENALISED),
        Case(Block, False, PENALISED),
        Case(Block, True, WARM, three),
        Case(Block, True, SHARP),
    ],
)
def test_the_joint_law_of_three_tokens_is_the_target_law(case: Case) -> None:
    assert surprise(samples(case), exact_law(case.sampling)) < UNLIKELY


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(Rejection, True, WARM, claimed=lambda probs: torch.full_like(probs, 1 / VOCAB)),
        Case(Block, True, WARM, claimed=lambda probs: probs.roll(1, 0)),
        Case(Block, True, WARM, three, fresh=False),
    ],
)
def test_wrong_probabilities_and_used_noise_are_seen(case: Case) -> None:
    assert surprise(samples(case), exact_law(case.sampling)) > UNLIKELY
