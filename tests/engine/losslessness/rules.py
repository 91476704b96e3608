"""Decisions about drafts, right ones and wrong ones, for the distributions that enumeration finds.

The wrong ones are decisions that people do make: each looks harmless, and each lets a drafted token influence
whether it is verified.
"""

from collections import defaultdict

from tests.engine.losslessness.enumeration import (
    GAMMA,
    Cut,
    Distribution,
    Pair,
    Rule,
    Tokens,
    Verification,
    block_verification,
    by_rejection,
)

LOW = 0.4  # a probability that a rule calls low
RISING = (1.0, 1.1, 2.2, 2.3)  # costs of a step by γ
STAIRS = (1.0, 1.8, 1.85, 1.9)  # once the edge is crossed, more tokens cost next to nothing

Memory = tuple[float, ...]


def own_probs(pair: Pair, prefix: Tokens, draft: Tokens) -> list[float]:
    """What each token was drawn with."""
    return [pair.q(prefix + draft[:i])[token_id] for i, token_id in enumerate(draft)]


def best_probs(pair: Pair, prefix: Tokens, draft: Tokens) -> list[float]:
    """Of the most likely token at each place: known before the token is drawn."""
    return [max(pair.q(prefix + draft[:i])) for i in range(len(draft))]


def flags(pair: Pair, prefix: Tokens, draft: Tokens) -> list[bool]:
    """Tokens that look bad to the target itself, as early pruning sees them."""
    return [pair.p(prefix + draft[:i])[token_id] < LOW for i, token_id in enumerate(draft)]


def first_low(values: list[float]) -> int:
    return next((i for i, value in enumerate(values) if value < LOW), len(values))


def prune_by_shifting_rows(pair: Pair, prefix: Tokens, draft: Tokens, _memory: Memory) -> Cut:
    flagged = flags(pair, prefix, draft)
    return Cut(flagged.index(True) + 1, bonus=False) if True in flagged else Cut(len(draft))


def prune_before_the_flagged(pair: Pair, prefix: Tokens, draft: Tokens, _memory: Memory) -> Cut:
    """As the engine prunes point masses: the row before the flagged token stays, and says the target's own."""
    flagged = flags(pair, prefix, draft)
    return Cut(flagged.index(True) if True in flagged else len(draft))


def stop_after_a_low_own_probability(pair: Pair, prefix: Tokens, draft: Tokens, _memory: Memory) -> Cut:
    return Cut(min(first_low(own_probs(pair, prefix, draft)) + 1, len(draft)))


def drop_before_a_low_best_probability(pair: Pair, prefix: Tokens, draft: Tokens, _memory: Memory) -> Cut:
    return Cut(first_low([value - 0.2 for value in best_probs(pair, prefix, draft)]))


def budget_by_the_last_step(pair: Pair, prefix: Tokens, draft: Tokens, memory: Memory) -> Cut:
    budget = sum(value > LOW for value in memory) if memory else GAMMA
    return Cut(budget, memory=tuple(own_probs(pair, prefix, draft)))


def rates(confidences: list[float], costs: tuple[float, ...]) -> list[float]:
    """Expected tokens per cost of verifying 0, 1 … tokens."""
    expected, survival, found = 1.0, 1.0, []
    for k, cost in enumerate(costs):
        found.append(expected / cost)
        survival *= confidences[k] if k < len(confidences) else 0.0
        expected += survival
    return found


def admit_until_the_first_decline(pair: Pair, prefix: Tokens, draft: Tokens, _memory: Memory) -> Cut:
    found = rates(best_probs(pair, prefix, draft), RISING)
    return Cut(next((k for k in range(GAMMA) if found[k + 1] < found[k]), GAMMA))


def best_rate_over_fresh_confidences(pair: Pair, prefix: Tokens, draft: Tokens, _memory: Memory) -> Cut:
    found = rates(best_probs(pair, prefix, draft), STAIRS)
    return Cut(found.index(max(found)))


def drop_a_low_own_probability(pair: Pair, prefix: Tokens, draft: Tokens, _memory: Memory) -> Cut:
    return Cut(first_low(own_probs(pair, prefix, draft)))


def admit_by_own_probabilities(pair: Pair, prefix: Tokens, draft: Tokens, _memory: Memory) -> Cut:
    found = rates(own_probs(pair, prefix, draft), RISING)
    return Cut(next((k for k in range(GAMMA) if found[k + 1] < found[k]), GAMMA))


def prune_if_the_draft_is_long(pair: Pair, prefix: Tokens, draft: Tokens, memory: Memory) -> Cut:
    num_drafted = stop_after_a_low_own_probability(pair, prefix, draft, memory).num_verified
    pruned = prune_by_shifting_rows(pair, prefix, draft[:num_drafted], memory)
    return pruned if num_drafted == GAMMA else Cut(num_drafted)


def chunk_by_chunk(pair: Pair, prefix: Tokens, draft: Tokens, bonus: bool) -> Distribution:
    """One token, then the rest; the second chunk is not even run when the first ends in a refusal."""
    head, tail = draft[:1], draft[1:]
    if not tail:
        return by_rejection(pair, prefix, draft, bonus)
    distribution: Distribution = defaultdict(float, by_rejection(pair, prefix, head, False))
    reached = distribution.pop(head, 0.0)
    for tokens, prob in by_rejection(pair, prefix + head, tail, bonus).items():
        distribution[head + tokens] += reached * prob
    return distribution


def flagged_is_refused(*, residual: bool) -> Verification:
    """The mistake of taking a flag for a rejection; the replacement is drawn from (p-q)+, or from p."""

    def verify(pair: Pair, prefix: Tokens, draft: Tokens, bonus: bool) -> Distribution:
        flagged = flags(pair, prefix, draft)
        if True not in flagged:
            return by_rejection(pair, prefix, draft, bonus)
        num = flagged.index(True)
        distribution: Distribution = defaultdict(float, by_rejection(pair, prefix, draft[:num], False))
        reached = distribution.pop(draft[:num], 0.0)
        line = pair.line[prefix + draft[:num]]
        replacement = pair.replacement[line].tolist() if residual else pair.p(prefix + draft[:num])
        for token_id, share in enumerate(replacement):
            distribution[(*draft[:num], token_id)] += reached * share
        return {tokens: prob for tokens, prob in distribution.items() if prob}

    return verify


BIASED_CUTS: list[Rule] = [
    drop_a_low_own_probability,
    best_rate_over_fresh_confidences,
    admit_by_own_probabilities,
    prune_if_the_draft_is_long,
    prune_before_the_flagged,
]
BIASED_VERIFICATIONS = [
    flagged_is_refused(residual=False),
    flagged_is_refused(residual=True),
    block_verification(tokenwise_residual=True),
]
