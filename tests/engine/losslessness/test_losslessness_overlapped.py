"""Drafting during verification leaves the target's distribution alone, with rows pruned or not; faults are seen.

Oracle: enumeration, as in test_losslessness, with the same rules right and wrong, and those that only a draft made
meanwhile makes possible. The engine drafts ahead with point masses alone, which forgive every rule; drawn drafts
show here what they would not forgive.
"""

from collections.abc import Mapping

import pytest

from faser.engine.contract.drafts import DraftTable
from faser.engine.control.speculation.overlap import Frontiers
from faser.types.arrays import Bools
from tests.engine.losslessness.enumeration import (
    Cut,
    Distribution,
    Pair,
    Rule,
    Tokens,
    Verification,
    block_verification,
    by_coupling,
    by_rejection,
    distance,
    everything,
    random_pair,
    target_distribution,
)
from tests.engine.losslessness.enumeration_overlapped import (
    REACH,
    AheadRule,
    BonusRule,
    alike_or_residual,
    by_ratio,
    emitted_distribution_ahead,
    on_chunks,
    own_token,
    whole_chunk,
)
from tests.engine.losslessness.rules import (
    BIASED_CUTS,
    BIASED_VERIFICATIONS,
    LOW,
    admit_until_the_first_decline,
    chunk_by_chunk,
    drop_before_a_low_best_probability,
    prune_by_shifting_rows,
    prune_if_the_draft_is_long,
    stop_after_a_low_own_probability,
)

EXACT = 1e-9
VISIBLE = 0.003
SEEDS = range(2)

EXACT_RULES: list[tuple[Verification, Rule]] = [
    (by_rejection, everything),
    (chunk_by_chunk, everything),
    (by_rejection, prune_by_shifting_rows),
    (by_rejection, stop_after_a_low_own_probability),
    (by_rejection, drop_before_a_low_best_probability),
    (by_rejection, admit_until_the_first_decline),
    (block_verification(), everything),
    (block_verification(), prune_by_shifting_rows),
]


def shorten_if_the_next_looks_bad(pair: Pair, prefix: Tokens, chunk: Tokens, ahead: Tokens) -> Cut:
    """The chunk is not verified because of the token drafted behind it, which depends on the chunk."""
    return Cut(0 if pair.p(prefix + chunk)[ahead[0]] < LOW else len(chunk))


def prune_if_the_next_was_likely(pair: Pair, prefix: Tokens, chunk: Tokens, ahead: Tokens) -> Cut:
    """Whether flagged rows leave depends on the draft made meanwhile, and so on the flagged token itself."""
    if pair.q(prefix + chunk)[ahead[0]] < LOW:
        return Cut(len(chunk))
    return prune_by_shifting_rows(pair, prefix, chunk, ())


def flagged_bonus(pair: Pair, known: Tokens, first: int) -> list[float]:
    """A flag taken for a rejection at the bonus token: such a token is refused, others as by_ratio does."""
    if pair.p(known)[first] < LOW:
        return list(pair.replacement[pair.line[known]].tolist())
    return by_ratio(pair, known, first)


WRONG_RULES: list[AheadRule] = [
    *(on_chunks(rule) for rule in BIASED_CUTS if rule is not prune_if_the_draft_is_long),
    shorten_if_the_next_looks_bad,
    prune_if_the_next_was_likely,
]


BySlot = Mapping[int, tuple[int, ...]]


class Believing(Frontiers):
    """The draft stands whatever the last row said, as long as the chunk was accepted."""

    def learn(self, drafts: DraftTable, unverified: BySlot, sampled: BySlot) -> tuple[Bools, Bools]:
        given = dict(sampled)
        if sampled[0][:-1] == unverified[0]:
            given[0] = (*unverified[0], drafts.token_ids.item(0, 0))
        return super().learn(drafts, unverified, given)


class Unpunctual(Frontiers):
    """A refusal inside the chunk goes unnoticed, if the last token sampled happens to be the draft's first."""

    def learn(self, drafts: DraftTable, unverified: BySlot, sampled: BySlot) -> tuple[Bools, Bools]:  # noqa: ARG002
        return super().learn(drafts, {0: sampled[0][:-1]}, sampled)


WRONG_FRONTIERS = [Believing, Unpunctual]


def most_biased(verify: Verification, rule: AheadRule = whole_chunk, **given: object) -> float:
    """The largest distance over drawn drafts of several pairs."""
    pairs = [random_pair(seed, reach=REACH) for seed in SEEDS]
    found = [emitted_distribution_ahead(pair, verify, rule, **given) for pair in pairs]  # type: ignore[arg-type]
    return max(distance(each, target_distribution(pair)) for each, pair in zip(found, pairs, strict=True))


def point_masses() -> Pair:
    return random_pair(11, greedy=True, reach=REACH)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("verify, rule", EXACT_RULES)
@pytest.mark.full(but=("by_rejection-everything-0", "by_rejection-drop_before_a_low_best_probability-0"))
def test_chunks_whose_first_token_was_verified_a_step_earlier_leave_the_distribution(
    verify: Verification, rule: Rule, seed: int
) -> None:
    pair = random_pair(seed, reach=REACH)
    assert distance(emitted_distribution_ahead(pair, verify, on_chunks(rule)), target_distribution(pair)) <= EXACT


@pytest.mark.parametrize("rule", [everything, prune_by_shifting_rows])
def test_a_bonus_token_may_be_verified_by_rejection_as_well(rule: Rule) -> None:
    pair = random_pair(1, reach=REACH)
    distribution = emitted_distribution_ahead(pair, by_rejection, on_chunks(rule), bonus=by_ratio)
    assert distance(distribution, target_distribution(pair)) <= EXACT


@pytest.mark.parametrize("rule", WRONG_RULES)
@pytest.mark.full(but=("cut0",))
def test_a_cut_that_has_seen_the_token_is_biased_in_chunks_too(rule: AheadRule) -> None:
    assert most_biased(by_rejection, rule) > VISIBLE


@pytest.mark.parametrize("verify", BIASED_VERIFICATIONS)
@pytest.mark.full(but=("verify0",))
def test_an_outcome_that_mixes_rules_is_biased_in_chunks_too(verify: Verification) -> None:
    assert most_biased(verify) > VISIBLE


@pytest.mark.parametrize("bonus", [alike_or_residual, flagged_bonus])
def test_a_bonus_token_that_mixes_rules_is_biased(bonus: BonusRule) -> None:
    assert most_biased(by_rejection, bonus=bonus) > VISIBLE


@pytest.mark.parametrize("frontiers", WRONG_FRONTIERS)
def test_a_chunk_behind_other_tokens_than_it_was_drafted_for_is_biased(frontiers: type[Frontiers]) -> None:
    assert most_biased(by_rejection, frontiers=frontiers) > VISIBLE


@pytest.mark.parametrize("verify", [by_rejection, block_verification(), by_coupling])
@pytest.mark.parametrize("rule", [whole_chunk, on_chunks(prune_by_shifting_rows), *WRONG_RULES])
def test_a_chunk_of_point_masses_may_be_cut_by_any_rule(verify: Verification, rule: AheadRule) -> None:
    pair = point_masses()
    assert distance(emitted_distribution_ahead(pair, verify, rule), target_distribution(pair)) <= EXACT


@pytest.mark.parametrize("frontiers", WRONG_FRONTIERS)
def test_coupled_outcomes_do_not_depend_on_what_a_chunk_was_drafted_for(frontiers: type[Frontiers]) -> None:
    """The target says its own token at every row: what was drafted only decides how many rows are of use."""
    pair = point_masses()
    distribution: Distribution = emitted_distribution_ahead(pair, by_coupling, frontiers=frontiers)
    assert distance(distribution, target_distribution(pair)) <= EXACT


@pytest.mark.parametrize("bonus", [own_token, by_ratio])
def test_a_bonus_token_of_point_masses_is_the_same_by_equality_and_by_rejection(bonus: BonusRule) -> None:
    pair = point_masses()
    for known in [(), (1,), (2, 0)]:
        ((_, draft),) = pair.drafts(known)
        assert bonus(pair, known, draft[0]) == pytest.approx(pair.p(known), abs=EXACT)
