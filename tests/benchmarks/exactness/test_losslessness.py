"""What compares distributions, compared with the sampler tests' plain computation and tables of chi-square."""

import numpy as np
import pytest

from benchmarks.exactness import cases
from benchmarks.exactness.cases import PATTERNS, SAMPLINGS
from benchmarks.exactness.distributions import (
    DEEP,
    WIDE,
    Tables,
    chi_square_tail,
    exact_distribution,
    holm,
    joint_and_single,
    make_tables,
    p_value,
    samplings,
    uniform_p_value,
)
from benchmarks.exactness.losslessness import DRAFTERS, plan
from faser.config.speculation import DRAFT_SAMPLE_METHODS, HEAD_METHODS, METHODS, POLICIES
from faser.types.sampling import SamplingParams
from tests.engine.execution.sampling.test_sampler import PROMPT, plain_logits
from tests.engine.execution.sampling.test_sampler import exact_distribution as of_one_token

TABLES = make_tables(10, 2, PROMPT, 3, 0.7)


def plain_distribution(tables: Tables, sampling: SamplingParams) -> list[float]:
    """Token by token, answer by answer."""
    found = []
    for outcome in range(tables.num_outcomes):
        answer = list(divmod(outcome, tables.vocab))
        prob = 1.0
        for i, token_id in enumerate(answer):
            before = [*tables.prompt, *answer[:i]][-2:]
            raw = tables.target_logits[before[0] * tables.vocab + before[1]].tolist()
            processed = plain_logits(sampling, raw, answer[:i], len(PROMPT) + i)
            prob *= of_one_token(sampling, processed).get(token_id, 0.0)
        found.append(prob)
    return found


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_exact_distribution_is_that_of_the_plain_computation(name: str) -> None:
    sampling = samplings(TABLES.vocab)[name]
    assert exact_distribution(TABLES, sampling) == pytest.approx(plain_distribution(TABLES, sampling), abs=1e-12)


@pytest.mark.parametrize("tables", [WIDE, DEEP])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_distribution_sums_to_1_over_all_answers(tables: Tables, name: str) -> None:
    distribution = exact_distribution(tables, samplings(tables.vocab)[name])
    assert len(distribution) == tables.num_outcomes
    assert distribution.sum() == pytest.approx(1.0)


def test_answers_are_numbered_in_the_order_of_the_distribution() -> None:
    answers = np.array([[0, 0, 0], [0, 0, 9], [1, 2, 3], [9, 9, 9]])
    assert WIDE.outcomes(answers).tolist() == [0, 9, 123, 999]


@pytest.mark.parametrize(
    "distance, freedom, tail", [(3.841, 1, 0.05), (18.307, 10, 0.05), (149.449, 100, 0.001), (0.0, 5, 1.0)]
)
def test_the_tail_of_chi_square_is_that_of_the_tables(distance: float, freedom: int, tail: float) -> None:
    assert chi_square_tail(distance, freedom) == pytest.approx(tail, rel=1e-3)


def test_p_values_of_a_right_distribution_are_uniform_and_of_a_wrong_one_are_not() -> None:
    rng = np.random.default_rng(2)
    distribution = rng.dirichlet(np.full(60, 0.5))  # many rare cells, which become one
    distribution[7] = 0.0
    distribution /= distribution.sum()
    other = 0.9 * distribution + 0.1 * np.roll(distribution, 1) * (distribution > 0)
    other /= other.sum()
    right, wrong = (
        [p_value(rng.choice(60, 2000, p=probs), distribution) for _ in range(600)]
        for probs in (distribution, other)
    )
    assert uniform_p_value(right) > 1e-3
    assert uniform_p_value(wrong) < 1e-12


def test_an_answer_that_cannot_be_has_no_p_value_above_0() -> None:
    assert p_value(np.array([0] * 500 + [1] * 499 + [2]), np.array([0.5, 0.5, 0.0])) == 0.0


def test_a_small_bias_of_one_place_is_seen_among_thousands_of_answers() -> None:
    rng = np.random.default_rng(1)
    distribution = np.full(1000, 1e-3)
    answers = rng.integers(0, 10, (100_000, 3))
    answers[:1200, 1] = 0  # one in a hundred
    assert p_value(WIDE.outcomes(answers), distribution) > 1e-6
    assert joint_and_single(answers, distribution, WIDE) < 1e-6


def test_holms_values_are_those_worked_out_by_hand() -> None:
    assert holm([0.04, 0.01, 0.5, 0.02]) == pytest.approx([0.08, 0.04, 0.5, 0.06])


def test_every_verifier_meets_every_drafter_gamma_and_sampling_that_the_product_has() -> None:
    met = frozenset[tuple[str, str]]().union(*map(cases.meetings, cases.RIGHT))
    assert met >= frozenset[tuple[str, str]]().union(*map(cases.meetings, cases.product()))
    for verifier in ("sampleandmatch", "rejection", "block"):
        assert {(f"{verifier} by", pattern) for pattern in PATTERNS} <= met
        assert {(f"{verifier} by", sampling) for sampling in SAMPLINGS} <= met


def test_every_case_has_a_seed_of_its_own() -> None:
    every = (*cases.RIGHT, *cases.WRONG)
    assert len({case.seed for case in every}) == len(every)


def test_tokens_are_compared_for_every_method_way_of_drafting_and_policy() -> None:
    """The grammar drafts for structured answers alone: benchmarks/exactness/structured_validity.py compares those.

    Answers with a head are compared by tests/engine/test_head_engine.py.
    """
    assert {options["method"] for options in DRAFTERS.values()} == set(METHODS) - {"grammar", *HEAD_METHODS}
    assert {options.get("draft_sample_method", "greedy") for options in DRAFTERS.values()} == {
        *DRAFT_SAMPLE_METHODS
    }
    asked = plan(tuple(DRAFTERS))
    assert {(drafter, policy) for drafter, policy, _ in asked} == {
        (drafter, policy) for drafter in DRAFTERS for policy in POLICIES
    }
