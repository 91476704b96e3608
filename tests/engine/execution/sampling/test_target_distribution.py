"""Verifiers, the sampler and its noise, and the drafting loop follow the target's joint distribution over steps.

Oracle: enumeration of the distribution, compared by chi-square over many seeds, which are fixed.
`python -m benchmarks exactness.losslessness` does the same with 200,000 sequences of far more combinations.
"""

import pytest

from benchmarks.exactness import cases
from benchmarks.exactness.cases import Case
from benchmarks.exactness.distributions import exact_distribution, joint_and_single
from benchmarks.exactness.table_models import play
from faser.engine.execution.sampling.rejection import Block, Rejection
from faser.engine.execution.sampling.verify import SampleAndMatch

pytestmark = pytest.mark.slow

NUM_SAMPLES = 4096
UNLIKELY = 1e-4


def case_p_value(case: Case, num_samples: int) -> float:
    scenario = case.scenario()
    played = play(scenario, num_samples, case.seed)
    assert played.accepted > 0, "nothing was drafted that could matter"
    return joint_and_single(
        played.answers, exact_distribution(scenario.tables, scenario.sampling), scenario.tables
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(verifier=SampleAndMatch, drafter=cases.text, pattern="stop rule", sampling="T 1"),
        Case(verifier=SampleAndMatch, drafter=cases.coupled, pattern="keep trimming", sampling="all"),
        Case(verifier=SampleAndMatch, drafter=cases.greedy, pattern="3", sampling="penalties"),
        Case(verifier=Rejection, drafter=cases.text, pattern="1", sampling="top_p 0.9"),
        Case(verifier=Rejection, drafter=cases.sampled, pattern="stop rule", sampling="logit_bias"),
        Case(verifier=Rejection, drafter=cases.sampled, pattern="ragged", sampling="penalties"),
        Case(verifier=Rejection, drafter=cases.mixed, pattern="changing by step", sampling="top_k"),
        Case(verifier=Block, drafter=cases.greedy, pattern="changing by step", sampling="min_p 0.1"),
        Case(verifier=Block, drafter=cases.sampled, pattern="7", sampling="T 1"),
        Case(verifier=Block, drafter=cases.sampled, pattern="3", sampling="all"),
        Case(verifier=Block, drafter=cases.mixed, pattern="changing by step", sampling="penalties"),
    ],
    ids=lambda case: case.title,
)
@pytest.mark.full(
    but=(
        "sampleandmatch, text, gamma stop rule, T 1",
        "sampleandmatch, coupled, gamma keep trimming, all",
        "rejection, sampled, gamma stop rule, logit_bias",
        "rejection, mixed, gamma changing by step, top_k",
        "block, greedy, gamma changing by step, min_p 0.1",
        "block, sampled, gamma 3, all",
    )
)
def test_the_joint_distribution_of_an_answer_is_the_targets(case: Case) -> None:
    assert case_p_value(case, NUM_SAMPLES) > UNLIKELY


@pytest.mark.parametrize(
    "case",
    [case for case in cases.WRONG if case.at_least < 100_000],
    ids=lambda case: f"{case.name}, {case.sampling}",
)
@pytest.mark.full(
    but=(
        "target instead of residual, all",
        "one number for the draft and its replacement, T 1",
        "dropped by own probability, T 1",
        "one number for all rows of a step, T 1",
    )
)
def test_a_planted_mistake_is_seen(case: Case) -> None:
    assert case_p_value(case, max(2 * NUM_SAMPLES, case.at_least)) < UNLIKELY
