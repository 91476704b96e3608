"""Speculation leaves the target's law alone, or, where a rule is wrong, visibly does not. Oracle: enumeration.

The wrong rules stand beside the right ones, because an enumeration that cannot see a bias proves nothing. They are
decisions that people do make: each looks harmless, and each lets a drafted token influence whether it is judged.
"""

from collections import defaultdict

import pytest
import torch

from tests.engine.spec.enumeration import (
    GAMMA,
    Cut,
    Judge,
    Law,
    Pair,
    Rule,
    Tokens,
    block_judge,
    by_coupling,
    by_rejection,
    distance,
    emitted_law,
    everything,
    random_pair,
    target_law,
)

EXACT = 1e-9
VISIBLE = 0.005
SEEDS = range(4)
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


def stop_after_a_low_own_probability(pair: Pair, prefix: Tokens, draft: Tokens, _memory: Memory) -> Cut:
    return Cut(min(first_low(own_probs(pair, prefix, draft)) + 1, len(draft)))


def drop_before_a_low_best_probability(pair: Pair, prefix: Tokens, draft: Tokens, _memory: Memory) -> Cut:
    return Cut(first_low([value - 0.2 for value in best_probs(pair, prefix, draft)]))


def budget_by_the_last_step(pair: Pair, prefix: Tokens, draft: Tokens, memory: Memory) -> Cut:
    budget = sum(value > LOW for value in memory) if memory else GAMMA
    return Cut(budget, memory=tuple(own_probs(pair, prefix, draft)))


def rates(confidences: list[float], costs: tuple[float, ...]) -> list[float]:
    """Expected tokens per cost of judging 0, 1 … tokens."""
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
    num_drafted = stop_after_a_low_own_probability(pair, prefix, draft, memory).num_judged
    pruned = prune_by_shifting_rows(pair, prefix, draft[:num_drafted], memory)
    return pruned if num_drafted == GAMMA else Cut(num_drafted)


def chunk_by_chunk(pair: Pair, prefix: Tokens, draft: Tokens, bonus: bool) -> Law:
    """One token, then the rest; the second chunk is not even run when the first ends in a refusal."""
    head, tail = draft[:1], draft[1:]
    if not tail:
        return by_rejection(pair, prefix, draft, bonus)
    law: Law = defaultdict(float, by_rejection(pair, prefix, head, False))
    reached = law.pop(head, 0.0)
    for tokens, prob in by_rejection(pair, prefix + head, tail, bonus).items():
        law[head + tokens] += reached * prob
    return law


def flagged_is_refused(*, residual: bool) -> Judge:
    """The mistake of taking a flag for a verdict; the replacement is drawn from (p-q)+, or from p."""

    def judge(pair: Pair, prefix: Tokens, draft: Tokens, bonus: bool) -> Law:
        flagged = flags(pair, prefix, draft)
        if True not in flagged:
            return by_rejection(pair, prefix, draft, bonus)
        num = flagged.index(True)
        law: Law = defaultdict(float, by_rejection(pair, prefix, draft[:num], False))
        reached = law.pop(draft[:num], 0.0)
        line = pair.line[prefix + draft[:num]]
        replacement = pair.replacement[line].tolist() if residual else pair.p(prefix + draft[:num])
        for token_id, share in enumerate(replacement):
            law[(*draft[:num], token_id)] += reached * share
        return {tokens: prob for tokens, prob in law.items() if prob}

    return judge


EXACT_RULES: list[tuple[Judge, Rule]] = [
    (by_rejection, everything),
    (chunk_by_chunk, everything),
    (by_rejection, prune_by_shifting_rows),
    (by_rejection, stop_after_a_low_own_probability),
    (by_rejection, drop_before_a_low_best_probability),
    (by_rejection, budget_by_the_last_step),
    (by_rejection, admit_until_the_first_decline),
    (block_judge(), everything),
    (block_judge(), prune_by_shifting_rows),
    (block_judge(), stop_after_a_low_own_probability),
]
BIASED_CUTS: list[Rule] = [
    drop_a_low_own_probability,
    best_rate_over_fresh_confidences,
    admit_by_own_probabilities,
    prune_if_the_draft_is_long,
]
BIASED_JUDGES = [
    flagged_is_refused(residual=False),
    flagged_is_refused(residual=True),
    block_judge(tokenwise_residual=True),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("judge, rule", EXACT_RULES)
def test_what_is_decided_before_a_token_is_drawn_leaves_the_law(judge: Judge, rule: Rule, seed: int) -> None:
    pair = random_pair(seed)

    assert distance(emitted_law(pair, judge, rule), target_law(pair)) <= EXACT


@pytest.mark.parametrize("rule", BIASED_CUTS)
def test_a_cut_that_has_seen_the_token_is_biased(rule: Rule) -> None:
    pairs = [random_pair(seed) for seed in SEEDS]

    assert max(distance(emitted_law(pair, by_rejection, rule), target_law(pair)) for pair in pairs) > VISIBLE


@pytest.mark.parametrize("judge", BIASED_JUDGES)
def test_a_verdict_that_mixes_rules_is_biased(judge: Judge) -> None:
    pairs = [random_pair(seed) for seed in SEEDS]

    assert max(distance(emitted_law(pair, judge), target_law(pair)) for pair in pairs) > VISIBLE


@pytest.mark.parametrize("judge", [by_rejection, block_judge(), by_coupling])
@pytest.mark.parametrize("rule", [everything, prune_by_shifting_rows, budget_by_the_last_step, *BIASED_CUTS])
def test_a_point_mass_may_be_cut_by_any_rule(judge: Judge, rule: Rule) -> None:
    """The draft is a function of the tokens before it, so nothing that it shows is news."""
    pair = random_pair(11, greedy=True)

    assert distance(emitted_law(pair, judge, rule), target_law(pair)) <= EXACT


def test_coupling_and_rejection_agree_on_every_step_of_a_point_mass() -> None:
    pair = random_pair(5, greedy=True)
    for prefix in [(), (1,), (2, 0)]:
        ((_, draft),) = pair.drafts(prefix)
        for num in range(GAMMA + 1):
            one, other = (judge(pair, prefix, draft[:num], True) for judge in (by_coupling, by_rejection))
            assert distance(one, other) <= EXACT


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_yields_at_least_as_many_tokens_as_its_tokens_one_by_one(seed: int) -> None:
    pair = random_pair(seed)

    def expected_tokens(judge: Judge) -> float:
        return sum(
            weight * prob * len(tokens)
            for weight, draft in pair.drafts(())
            for tokens, prob in judge(pair, (), draft, True).items()
        )

    assert expected_tokens(block_judge()) > expected_tokens(by_rejection) + 1e-3


def test_the_block_example_of_the_paper_accepts_eleven_ninths() -> None:
    """arXiv:2403.10444, section 2: p = (1/3, 2/3), q = (2/3, 1/3), two drafted tokens: 10/9 against 11/9."""
    num = sum(2**n for n in range(GAMMA + 3))
    pair = Pair(
        torch.tensor([[1.0, 2.0]]).repeat(num, 1),
        torch.tensor([[2 / 3, 1 / 3]], dtype=torch.float64).repeat(num, 1),
    )

    def expected_accepted(judge: Judge) -> float:
        found = 0.0
        for weight, draft in pair.drafts(()):
            law = judge(pair, (), draft[:2], True)
            found += weight * sum(prob * (len(tokens) - 1) for tokens, prob in law.items())
        return found

    assert expected_accepted(by_rejection) == pytest.approx(10 / 9)
    assert expected_accepted(block_judge()) == pytest.approx(11 / 9)


def coin_drafter(draft_probs: torch.Tensor) -> Pair:
    """p = (0.7, 0.3); one token is asked for. draft_probs: [2] of the first token; after 0 the drafter is sure."""
    num = sum(2**n for n in range(GAMMA + 1))
    pair = Pair(torch.tensor([[7.0, 3.0]]).repeat(num, 1), draft_probs.repeat(num, 1), length=1)
    after_0 = torch.tensor([line for prefix, line in pair.line.items() if prefix[:1] == (0,)])
    pair.draft_probs[after_0] = torch.tensor([1.0, 0.0], dtype=torch.float64)
    return Pair(pair.masses, pair.draft_probs, length=1)


def dspark_rates(pair: Pair, prefix: Tokens, draft: Tokens) -> list[float]:
    """Expected tokens per cost of judging 0, 1 and 2 of the drafted tokens; the second one is nearly free."""
    confidences = best_probs(pair, prefix, draft)
    expected = [1.0, 1.0 + confidences[0], 1.0 + confidences[0] * (1 + confidences[1])]
    return [tokens / cost for tokens, cost in zip(expected, (1.0, 1.8, 1.9), strict=True)]


def keep_what_pays(pair: Pair, prefix: Tokens, draft: Tokens, _memory: Memory) -> Cut:
    found = dspark_rates(pair, prefix, draft)
    return Cut(found.index(max(found)))


def keep_until_it_does_not_pay(pair: Pair, prefix: Tokens, draft: Tokens, _memory: Memory) -> Cut:
    found = dspark_rates(pair, prefix, draft)
    return Cut(next((k for k in range(2) if found[k + 1] < found[k]), 2))


def test_the_counter_example_of_dspark_comes_out_right_and_wrong() -> None:
    """arXiv:2607.05147, appendix A, in kind: p = (0.7, 0.3), a drafter that tosses a coin.

    After token 0 the drafter is sure of what follows: 2 / 1.9 tokens per cost of judging both, more than 1. After
    token 1 it tosses again: 1.75 / 1.9, less than 1, so nothing is judged. Whoever takes the best rate over these
    fresh confidences keeps a drafted 0 always, since 0.7 > 0.5, and draws anew instead of a drafted 1: P(0) is
    0.5 + 0.5 * 0.7. Without a cut, and with one that does not look behind the first decline, it is 0.7.
    """
    coin = coin_drafter(torch.tensor([[0.5, 0.5]], dtype=torch.float64))
    wrong = emitted_law(coin, by_rejection, keep_what_pays)
    assert [wrong[0,], wrong[1,]] == pytest.approx([0.85, 0.15])
    for rule in (everything, keep_until_it_does_not_pay):
        right = emitted_law(coin, by_rejection, rule)
        assert [right[0,], right[1,]] == pytest.approx([0.7, 0.3])


@pytest.mark.parametrize("first", [(1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("judge", [by_coupling, by_rejection])
def test_the_cut_of_dsparks_counter_example_is_harmless_to_point_masses(
    first: tuple[float, float], judge: Judge
) -> None:
    """Whichever token the drafter is certain of: the draft says nothing that was not known before it."""
    pair = coin_drafter(torch.tensor([first], dtype=torch.float64))
    law = emitted_law(pair, judge, keep_what_pays)
    assert [law[0,], law[1,]] == pytest.approx([0.7, 0.3])
