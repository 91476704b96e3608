"""Verifiers with the sampler, its noise and the drafting loop follow the target's joint law, step after step.

Oracle: enumeration of the law, compared by chi-square over many seeds. The seeds are fixed, so luck is fixed too.
`python -m benchmarks.exactness.losslessness` does the same with 200,000 sequences of far more combinations.
"""

import pytest

from benchmarks.exactness import cases
from benchmarks.exactness import cases as scenarios
from benchmarks.exactness.cases import Case
from benchmarks.exactness.distributions import exact_law, joint_and_single
from benchmarks.exactness.table_models import play
from faser.engine.execution.verifiers.block import Block
from faser.engine.execution.verifiers.rejection import Rejection
from faser.engine.execution.verifiers.sample_and_match import SampleAndMatch

pytestmark = pytest.mark.slow

NUM_SAMPLES = 4096
UNLIKELY = 1e-4


def case_p_value(case: Case, num_samples: int) -> float:
    scenario = case.scenario()
    played = play(scenario, num_samples, case.seed)
    assert played.accepted > 0, "nothing was drafted that could matter"
    return joint_and_single(played.answers, exact_law(scenario.world, scenario.sampling), scenario.world)


@pytest.mark.parametrize(
    "case",
    [
        Case(verifier=SampleAndMatch, drafter=scenarios.text, pattern="stop rule", sampling="T 1"),
        Case(verifier=SampleAndMatch, drafter=scenarios.coupled, pattern="keep trimming", sampling="all"),
        Case(verifier=SampleAndMatch, drafter=scenarios.greedy, pattern="3", sampling="penalties"),
        Case(verifier=Rejection, drafter=scenarios.text, pattern="1", sampling="top_p 0.9"),
        Case(verifier=Rejection, drafter=scenarios.sampled, pattern="stop rule", sampling="logit_bias"),
        Case(verifier=Rejection, drafter=scenarios.sampled, pattern="ragged", sampling="penalties"),
        Case(verifier=Rejection, drafter=scenarios.mixed, pattern="changing by step", sampling="top_k"),
        Case(verifier=Block, drafter=scenarios.greedy, pattern="changing by step", sampling="min_p 0.1"),
        Case(verifier=Block, drafter=scenarios.sampled, pattern="7", sampling="T 1"),
        Case(verifier=Block, drafter=scenarios.sampled, pattern="3", sampling="all"),
    ],
    ids=lambda case: case.title,
)
def test_the_joint_law_of_an_answer_is_the_target_law(case: Case) -> None:
    assert case_p_value(case, NUM_SAMPLES) > UNLIKELY


@pytest.mark.parametrize(
    "case",
    [case for case in cases.WRONG if case.at_least < 100_000],
    ids=lambda case: f"{case.name}, {case.sampling}",
)
def test_a_planted_mistake_is_seen(case: Case) -> None:
    assert case_p_value(case, max(2 * NUM_SAMPLES, case.at_least)) < UNLIKELY
