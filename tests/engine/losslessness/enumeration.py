"""Exact distributions of what speculation emits, over a vocabulary of three tokens and three output tokens.

Nothing is drawn: every draft is weighed with the probability of drafting it, every outcome with the probability
that the production functions give it. A rule says, given a draft, how many of its tokens are verified and whether
the row behind them yields a bonus token; steps go on until three tokens are out.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from faser.engine.execution.sampling.distribution import PROB_ONE, draw, fixed_point_probs, scale
from faser.engine.execution.sampling.rejection import (
    accept_probs,
    longest_accepted,
    prefix_accept_probs,
    recovered_probs,
    residual_probs,
    survivals,
)
from faser.engine.execution.sampling.rows import DraftLayout
from faser.engine.execution.sampling.verify import accepted

VOCAB = 3
LENGTH = 3
GAMMA = 3

Tokens = tuple[int, ...]
Distribution = dict[Tokens, float]


class Pair:
    """A target and a drafter. target_probs, draft_probs: by prefix, [VOCAB] float64; masses: of the target.

    reach: how far behind the output tokens are drafted, at most.
    """

    def __init__(
        self, target_masses: Tensor, draft_probs: Tensor, *, length: int = LENGTH, reach: int = GAMMA
    ) -> None:
        self.length = length
        self.vocab = target_masses.shape[-1]
        depth = range(length + reach)
        self.line = {
            prefix: i
            for i, prefix in enumerate(
                itertools.chain(*(itertools.product(range(self.vocab), repeat=n) for n in depth))
            )
        }
        self.masses = target_masses[: len(self.line)]
        self.target_probs = self.masses.double() / self.masses.double().sum(-1, keepdim=True)
        self.draft_probs = draft_probs[: len(self.line)]
        self.accept = accept_probs(self.target_probs, self.draft_probs)
        self.replacement = shares(recovered_probs(self.target_probs, self.draft_probs))

    def p(self, prefix: Tokens) -> list[float]:
        return list(self.target_probs[self.line[prefix]].tolist())

    def q(self, prefix: Tokens) -> list[float]:
        return list(self.draft_probs[self.line[prefix]].tolist())

    def drafts(self, prefix: Tokens) -> Iterable[tuple[float, Tokens]]:
        """Every draft of GAMMA tokens with the probability of drafting it."""
        for draft in itertools.product(range(self.vocab), repeat=GAMMA):
            prob = 1.0
            for i, token_id in enumerate(draft):
                prob *= self.q(prefix + draft[:i])[token_id]
            if prob:
                yield prob, draft


def random_pair(seed: int, *, greedy: bool = False, reach: int = GAMMA) -> Pair:
    """Random distributions, peaked enough to differ. greedy: drafts are the drafter's most likely tokens."""
    rng = torch.Generator().manual_seed(seed)
    num = sum(VOCAB**n for n in range(LENGTH + reach))
    masses = fixed_point_probs(scale(torch.randn(num, VOCAB, generator=rng) * 1.5, torch.ones(num)))
    draft_logits = torch.randn(num, VOCAB, generator=rng, dtype=torch.float64) * 1.5
    if greedy:
        draft_probs = torch.nn.functional.one_hot(draft_logits.argmax(-1), VOCAB).double()
        return Pair(masses, draft_probs, reach=reach)
    return Pair(masses, draft_logits.softmax(-1), reach=reach)


def shares(masses: Tensor) -> Tensor:
    """Probabilities from whole masses."""
    wide = masses.double()
    return wide / wide.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Cut:
    """What a rule decided. num_verified: leading drafted tokens. bonus: the row behind them yields a token.

    memory: what the rule knows in the next step.
    """

    num_verified: int
    bonus: bool = True
    memory: tuple[float, ...] = ()


Rule = Callable[[Pair, Tokens, Tokens, tuple[float, ...]], Cut]
Verification = Callable[[Pair, Tokens, Tokens, bool], Distribution]


def everything(_pair: Pair, _prefix: Tokens, draft: Tokens, _memory: tuple[float, ...]) -> Cut:
    """Verify the whole draft."""
    return Cut(len(draft))


def target_distribution(pair: Pair) -> Distribution:
    """What the target alone says."""
    distribution: Distribution = {}
    for tokens in itertools.product(range(pair.vocab), repeat=pair.length):
        distribution[tokens] = 1.0
        for i, token_id in enumerate(tokens):
            distribution[tokens] *= pair.p(tokens[:i])[token_id]
    return distribution


def emitted_distribution(pair: Pair, verify: Verification, rule: Rule = everything) -> Distribution:
    """The distribution of the first tokens out, over as many steps as they take."""
    known: dict[tuple[Tokens, tuple[float, ...]], Distribution] = {}

    def onwards(prefix: Tokens, memory: tuple[float, ...]) -> Distribution:
        if len(prefix) >= pair.length:
            return {prefix[: pair.length]: 1.0}
        if (prefix, memory) not in known:
            found: Distribution = defaultdict(float)
            for draft_prob, draft in pair.drafts(prefix):
                cut = rule(pair, prefix, draft, memory)
                for emitted, prob in verify(pair, prefix, draft[: cut.num_verified], cut.bonus).items():
                    for tokens, share in onwards(prefix + emitted, cut.memory).items():
                        found[tokens] += draft_prob * prob * share
            known[prefix, memory] = found
        return known[prefix, memory]

    return onwards((), ())


def distance(distribution: Distribution, other: Distribution) -> float:
    """Total variation."""
    return (
        sum(abs(distribution.get(tokens, 0.0) - other.get(tokens, 0.0)) for tokens in {*distribution, *other}) / 2
    )


def by_rejection(pair: Pair, prefix: Tokens, draft: Tokens, bonus: bool) -> Distribution:
    """Token by token."""
    distribution: Distribution = defaultdict(float)
    reached = 1.0
    for i, token_id in enumerate(draft):
        line = pair.line[prefix + draft[:i]]
        passes = float(pair.accept[line, token_id])
        for other, share in enumerate(pair.replacement[line].tolist()):
            distribution[(*draft[:i], other)] += reached * (1 - passes) * share
        reached *= passes
    return finish(pair, prefix, draft, bonus, distribution, reached)


def finish(
    pair: Pair, prefix: Tokens, draft: Tokens, bonus: bool, distribution: Distribution, reached: float
) -> Distribution:
    """Add the case that the whole draft was accepted, of probability `reached`."""
    if not bonus:
        distribution[draft] += reached
    else:
        for token_id, share in enumerate(pair.p(prefix + draft)):
            distribution[(*draft, token_id)] += reached * share
    return {tokens: prob for tokens, prob in distribution.items() if prob}


def block_verification(*, tokenwise_residual: bool = False) -> Verification:
    """As a block. tokenwise_residual: the mistake of taking the replacement of rejection sampling."""

    def verify(pair: Pair, prefix: Tokens, draft: Tokens, bonus: bool) -> Distribution:
        lines = [pair.line[prefix + draft[:i]] for i in range(len(draft) + 1)]
        target_probs, draft_probs = pair.target_probs[lines], pair.draft_probs[lines].clone()
        draft_probs[-1] = 0.0  # the last row verifies nothing
        at = list(range(len(draft)))
        ratios = (target_probs[at, list(draft)] / draft_probs[at, list(draft)]).numpy()
        survival = survivals(ratios[None])[0]
        weighted = target_probs * torch.from_numpy(survival)[:, None]
        residual = residual_probs(weighted, draft_probs).sum(-1).numpy() / PROB_ONE
        passes = prefix_accept_probs(survival, residual)[1:]
        replacement = shares(recovered_probs(target_probs if tokenwise_residual else weighted, draft_probs))

        distribution: Distribution = defaultdict(float)
        whole = 0.0
        for outcome in itertools.product((0.0, 1.0), repeat=len(draft)):  # noise below or above every probability
            noise = np.array(outcome)
            prob = float(np.prod(np.where(noise == 0.0, passes, 1 - passes)))
            num = int(longest_accepted(passes[None], noise[None])[0])
            if prob and num == len(draft):
                whole += prob
            elif prob:
                for token_id, share in enumerate(replacement[num].tolist()):
                    distribution[(*draft[:num], token_id)] += prob * share
        return finish(pair, prefix, draft, bonus, distribution, whole)

    return verify


def by_coupling(pair: Pair, prefix: Tokens, draft: Tokens, bonus: bool) -> Distribution:
    """By the target's own choice: in each row every token wins the race, as often as its mass says."""
    lines = [pair.line[prefix + draft[:i]] for i in range(len(draft) + 1)]
    masses = pair.masses[lines]
    late = torch.ones(len(lines), pair.vocab + 1, dtype=torch.float64)  # of all tokens, and of their block
    zero = np.zeros(1, dtype=np.int64)
    rows = DraftLayout.of(zero, zero, np.array([len(draft)]), np.array(draft, dtype=np.int64))
    first = [late.index_fill(1, torch.tensor([v]), 1e-30) for v in range(pair.vocab)]
    chosen = torch.stack([draw(masses, each) for each in first], -1).tolist()
    distribution: Distribution = defaultdict(float)
    for cells in itertools.product(range(pair.vocab), repeat=len(lines)):
        prob = float(np.prod([pair.target_probs[line, cell] for line, cell in zip(lines, cells, strict=True)]))
        tokens = np.array([chosen[row][cell] for row, cell in enumerate(cells)])
        passes = accepted(tokens, rows.drafted)
        last = int(rows.last_reached(passes)[0])
        kept = draft[:last] if last == len(draft) and not bonus else (*draft[:last], int(tokens[last]))
        distribution[kept] += prob
    return dict(distribution)
