"""Speculation leaves the target's distribution alone; a wrong rule visibly does not. Oracle: enumeration.

The wrong rules stand next to the right ones, because an enumeration that cannot see a bias proves nothing.
"""

import pytest
import torch

from tests.engine.losslessness.enumeration import (
    GAMMA,
    Cut,
    Pair,
    Rule,
    Tokens,
    Verification,
    block_verification,
    by_coupling,
    by_rejection,
    distance,
    emitted_distribution,
    everything,
    random_pair,
    target_distribution,
)
from tests.engine.losslessness.rules import (
    BIASED_CUTS,
    BIASED_VERIFICATIONS,
    Memory,
    admit_until_the_first_decline,
    best_probs,
    budget_by_the_last_step,
    chunk_by_chunk,
    drop_before_a_low_best_probability,
    prune_by_shifting_rows,
    stop_after_a_low_own_probability,
)

EXACT = 1e-9
VISIBLE = 0.005
SEEDS = range(4)
EXACT_RULES: list[tuple[Verification, Rule]] = [
    (by_rejection, everything),
    (chunk_by_chunk, everything),
    (by_rejection, prune_by_shifting_rows),
    (by_rejection, stop_after_a_low_own_probability),
    (by_rejection, drop_before_a_low_best_probability),
    (by_rejection, budget_by_the_last_step),
    (by_rejection, admit_until_the_first_decline),
    (block_verification(), everything),
    (block_verification(), prune_by_shifting_rows),
    (block_verification(), stop_after_a_low_own_probability),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("verify, rule", EXACT_RULES)
def test_what_is_decided_before_a_token_is_drawn_leaves_the_distribution(
    verify: Verification, rule: Rule, seed: int
) -> None:
    pair = random_pair(seed)

    assert distance(emitted_distribution(pair, verify, rule), target_distribution(pair)) <= EXACT


@pytest.mark.parametrize("rule", BIASED_CUTS)
def test_a_cut_that_has_seen_the_token_is_biased(rule: Rule) -> None:
    pairs = [random_pair(seed) for seed in SEEDS]

    assert (
        max(distance(emitted_distribution(pair, by_rejection, rule), target_distribution(pair)) for pair in pairs)
        > VISIBLE
    )


@pytest.mark.parametrize("verify", BIASED_VERIFICATIONS)
def test_an_outcome_that_mixes_rules_is_biased(verify: Verification) -> None:
    pairs = [random_pair(seed) for seed in SEEDS]

    assert max(distance(emitted_distribution(pair, verify), target_distribution(pair)) for pair in pairs) > VISIBLE


@pytest.mark.parametrize("verify", [by_rejection, block_verification(), by_coupling])
@pytest.mark.parametrize("rule", [everything, prune_by_shifting_rows, budget_by_the_last_step, *BIASED_CUTS])
def test_a_point_mass_may_be_cut_by_any_rule(verify: Verification, rule: Rule) -> None:
    """The draft is a function of the tokens before it, so nothing that it shows is news."""
    pair = random_pair(11, greedy=True)

    assert distance(emitted_distribution(pair, verify, rule), target_distribution(pair)) <= EXACT


def test_coupling_and_rejection_agree_on_every_step_of_a_point_mass() -> None:
    pair = random_pair(5, greedy=True)
    for prefix in [(), (1,), (2, 0)]:
        ((_, draft),) = pair.drafts(prefix)
        for num in range(GAMMA + 1):
            one, other = (verify(pair, prefix, draft[:num], True) for verify in (by_coupling, by_rejection))
            assert distance(one, other) <= EXACT


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_yields_at_least_as_many_tokens_as_its_tokens_one_by_one(seed: int) -> None:
    pair = random_pair(seed)

    def expected_tokens(verify: Verification) -> float:
        return sum(
            weight * prob * len(tokens)
            for weight, draft in pair.drafts(())
            for tokens, prob in verify(pair, (), draft, True).items()
        )

    assert expected_tokens(block_verification()) > expected_tokens(by_rejection) + 1e-3


def test_the_block_example_of_the_paper_accepts_eleven_ninths() -> None:
    """arXiv:2403.10444, section 2: p = (1/3, 2/3), q = (2/3, 1/3), two drafted tokens: 10/9 against 11/9."""
    num = sum(2**n for n in range(GAMMA + 3))
    pair = Pair(
        torch.tensor([[1.0, 2.0]]).repeat(num, 1),
        torch.tensor([[2 / 3, 1 / 3]], dtype=torch.float64).repeat(num, 1),
    )

    def expected_accepted(verify: Verification) -> float:
        found = 0.0
        for weight, draft in pair.drafts(()):
            distribution = verify(pair, (), draft[:2], True)
            found += weight * sum(prob * (len(tokens) - 1) for tokens, prob in distribution.items())
        return found

    assert expected_accepted(by_rejection) == pytest.approx(10 / 9)
    assert expected_accepted(block_verification()) == pytest.approx(11 / 9)


def coin_drafter(draft_probs: torch.Tensor) -> Pair:
    """p = (0.7, 0.3); one token is asked for. draft_probs: [2] of the first token; after 0 the drafter is sure."""
    num = sum(2**n for n in range(GAMMA + 1))
    pair = Pair(torch.tensor([[7.0, 3.0]]).repeat(num, 1), draft_probs.repeat(num, 1), length=1)
    after_0 = torch.tensor([line for prefix, line in pair.line.items() if prefix[:1] == (0,)])
    pair.draft_probs[after_0] = torch.tensor([1.0, 0.0], dtype=torch.float64)
    return Pair(pair.masses, pair.draft_probs, length=1)


def dspark_rates(pair: Pair, prefix: Tokens, draft: Tokens) -> list[float]:
    """Expected tokens per cost of verifying 0, 1 and 2 of the drafted tokens; the second one is nearly free."""
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

    After token 0 the drafter is sure of what follows: 2 / 1.9 tokens per cost of verifying both, more than 1.
    After token 1 it tosses again: 1.75 / 1.9, less than 1, so nothing is verified. Whoever takes the best rate
    over these fresh confidences keeps a drafted 0 always, since 0.7 > 0.5, and draws anew instead of a drafted 1:
    P(0) is 0.5 + 0.5 * 0.7. Without a cut, and with one that does not look behind the first decline, it is 0.7.
    """
    coin = coin_drafter(torch.tensor([[0.5, 0.5]], dtype=torch.float64))
    wrong = emitted_distribution(coin, by_rejection, keep_what_pays)
    assert [wrong[0,], wrong[1,]] == pytest.approx([0.85, 0.15])
    for rule in (everything, keep_until_it_does_not_pay):
        right = emitted_distribution(coin, by_rejection, rule)
        assert [right[0,], right[1,]] == pytest.approx([0.7, 0.3])


@pytest.mark.parametrize("first", [(1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("verify", [by_coupling, by_rejection])
def test_the_cut_of_dsparks_counter_example_is_harmless_to_point_masses(
    first: tuple[float, float], verify: Verification
) -> None:
    """Whichever token the drafter is certain of: the draft says nothing that was not known before it."""
    pair = coin_drafter(torch.tensor([first], dtype=torch.float64))
    distribution = emitted_distribution(pair, verify, keep_what_pays)
    assert [distribution[0,], distribution[1,]] == pytest.approx([0.7, 0.3])
