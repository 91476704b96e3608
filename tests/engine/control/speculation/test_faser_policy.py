"""`faser` with drafts from text: when it looks up, and when a model drafts instead.

Oracles: the account of time of every step, the objective. Planted bugs that these tests have caught: look-ups that
probe are not paid for; their debt is forgiven; the gain of drafts from text is not followed; what was looked up is
followed twice; a probe counts no more than any other look; the model drafts whatever text has found; a probe
replaces a draft from text; drafts go on across a bend of the step time.
"""

import numpy as np
import pytest

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.drafts import Floats, Ints
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.speculation.acceptance import Acceptance
from faser.engine.control.speculation.faser_policy import PROBE_TOKENS, SHARE, Faser
from faser.engine.control.speculation.policies import make_policy
from faser.engine.control.speculation.policy import Candidates
from faser.engine.control.step_cost import CostModel
from tests.engine.control.speculation.building import candidates, constant, full, ints
from tests.engine.control.speculation.test_policies import FLAT

CAP = 8
STEP_S = 0.020


def costs_of(looking_s: float, *, pass_s: float | None = None, step: CostTable = FLAT) -> CostModel:
    tables = {Role.STEP: step, Role.TEXT: CostTable(rows=(1, 2), seconds=(looking_s, looking_s))}
    if pass_s is not None:
        tables[Role.PASS] = CostTable(rows=(1, 2), seconds=(pass_s, pass_s))
    return CostModel(StepTimes(tables=tables))


def faser(costs: CostModel, *, has_model: bool = False) -> Faser:
    config = SpeculationConfig(model="drafter" if has_model else None, num_speculative_tokens=CAP)
    found = make_policy(config, costs, Acceptance(64, CAP))
    assert isinstance(found, Faser)
    return found


def nothing(each: Candidates) -> Candidates:
    """Every look-up came back empty."""
    survival = np.zeros_like(each.survival)
    survival[:, 0] = 1.0
    return each.drafted(np.zeros_like(each.limit), survival)


def looked_up(policy: Faser, each: Candidates, alpha: float) -> bool:
    """One step, whose look-ups find CAP tokens of this acceptance each. Whether it looked up."""
    lengths = policy.lengths(each)
    if not lengths.any():
        return False
    survival = constant(alpha, each.num_sequences, CAP)
    policy.keep(each.drafted(each.limit, survival), each.limit) if alpha else policy.keep(each, 0 * each.limit)
    return True


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("since", [1, 4])
def test_where_nothing_is_found_looking_up_stops_and_costs_no_more_than_its_share(cost: float, since: int) -> None:
    """cost: of a look-up, in steps. A decision serves `since` steps."""
    policy, each = faser(costs_of(cost * STEP_S)), candidates(constant(0.3, 2, CAP), since=since)
    looks = []
    for _ in range(12_000 // since):
        looks.append(looked_up(policy, each, 0.0))
        for _ in range((since - 1) * looks[-1]):
            policy.keep(each, np.zeros_like(each.limit))
    assert looks[0]
    late = looks[400 // since :]
    assert 0 < sum(late) * cost <= 1.1 * SHARE * len(late) + cost


def test_a_look_up_that_costs_less_than_the_share_goes_on() -> None:
    policy, each = faser(costs_of(0.5 * SHARE * STEP_S)), candidates(constant(0.3, 2, CAP))
    assert all(looked_up(policy, each, 0.0) for _ in range(500))


@pytest.mark.parametrize("cost, bound", [(0.02, 20), (0.1, 150)])
def test_looking_up_comes_back_soon_after_drafts_have_become_good(cost: float, bound: int) -> None:
    """bound: steps. One look-up in cost / SHARE steps, and a few must have found something."""
    policy, each = faser(costs_of(cost * STEP_S)), candidates(constant(0.3, 2, CAP))
    for _ in range(1000):
        looked_up(policy, each, 0.0)
    looks = [looked_up(policy, each, 0.9) for _ in range(bound + 50)]
    assert not all(looks[: int(cost / SHARE) - 1])
    assert all(looks[bound:])


def test_a_few_probes_tell_that_drafts_pay_again_where_looking_up_is_dear() -> None:
    """Drafts gain twice what looking up takes, and a probe comes once in 50 steps."""
    policy, each = faser(costs_of(0.2 * STEP_S)), candidates(constant(0.3, 2, CAP))
    for _ in range(1000):
        looked_up(policy, each, 0.0)
    looks = [looked_up(policy, each, 0.3) for _ in range(400)]
    assert sum(looks[:100]) < 5
    assert all(looks[250:])


def test_drafts_that_gain_more_than_looking_takes_are_looked_up_in_every_step() -> None:
    policy, each = faser(costs_of(0.1 * STEP_S)), candidates(constant(0.3, 2, CAP))
    assert all(looked_up(policy, each, 0.3) for _ in range(500))  # they gain more than a third


def switched_on(policy: Faser, each: Candidates) -> None:
    for _ in range(4):
        assert policy.lengths(each).tolist() == each.limit.tolist()


def model_lengths(policy: Faser, each: Candidates, text: Floats, lengths: Ints) -> Ints:
    within = np.arange(CAP + 1) <= lengths[:, None]
    return policy.model_lengths(each, each.drafted(lengths, text * within))


def test_the_model_drafts_where_text_has_found_nothing_good() -> None:
    policy = faser(costs_of(3e-5, pass_s=0.001), has_model=True)
    each = candidates(constant(0.8, 3, CAP))
    switched_on(policy, each)
    text = np.concatenate((constant(0.95, 1, CAP), constant(0.1, 1, CAP), constant(0.5, 1, CAP)))
    found = model_lengths(policy, each, text, ints(CAP, CAP, 0))
    assert found[0] == 0
    assert (found[1:] > 2).all()
    assert (found <= each.limit).all()


def test_a_dear_model_leaves_fair_drafts_from_text_alone() -> None:
    """Every sequence gains by the model, but not what its passes take from all."""
    policy = faser(costs_of(3e-5, pass_s=0.004), has_model=True)
    each = candidates(constant(0.8, 3, CAP))
    switched_on(policy, each)
    fair = constant(0.75, 3, CAP)
    assert not model_lengths(policy, each, fair, full(3, 4)).any()
    assert model_lengths(policy, each, fair, full(3, 0)).all()


def test_the_model_drafts_no_further_than_its_own_limit() -> None:
    policy = faser(costs_of(3e-5, pass_s=0.0005), has_model=True)
    each = candidates(constant(0.9, 2, CAP))
    switched_on(policy, each)
    shorter = candidates(constant(0.9, 2, CAP), limit=ints(3, 1))
    found = model_lengths(policy, shorter, constant(0.1, 2, CAP), full(2, 0))
    assert found.tolist() == [3, 1]


def test_a_model_that_does_not_pay_drafts_probes_alone_and_none_in_place_of_text() -> None:
    policy = faser(costs_of(3e-5, pass_s=0.004), has_model=True)
    each = candidates(constant(0.02, 16, CAP))
    no_text, probes = full(16, 0), 0
    good = np.where(np.arange(16) < 8, CAP, 0)
    for step in range(3000):
        policy.lengths(each)
        found = model_lengths(policy, each, constant(0.9, 16, CAP), no_text if step % 2 else good)
        assert set(found.tolist()) <= {0, PROBE_TOKENS}
        assert step % 2 or not found[:8].any()
        probes += int(found.any())
    assert 3 < probes < 300


def test_model_and_text_look_up_less_once_text_finds_nothing() -> None:
    """The model is off. What text has found is followed where the model's turn is decided, and there alone."""
    policy = faser(costs_of(0.1 * STEP_S, pass_s=0.02), has_model=True)
    each = candidates(constant(0.02, 2, CAP))
    looks = []
    for _ in range(400):
        looks.append(bool(policy.lengths(each).any()))
        if looks[-1]:
            policy.model_lengths(each, nothing(each))
            policy.keep(each, np.zeros_like(each.limit))
    first_stop = looks.index(False)
    assert 30 < first_stop < 60  # one observation in each step: 1.05 ** -n reaches a tenth at 45
    assert sum(looks[first_stop:]) <= 0.2 * len(looks[first_stop:])


def test_no_draft_goes_on_across_a_bend_of_the_step_time() -> None:
    """The stop rule has one price for all rows. Up to 32 rows are nearly free, the next cost what they bring."""
    bend = CostTable(rows=(1, 16, 32, 64, 128), seconds=(0.020, 0.020, 0.022, 0.036, 0.070))
    config = SpeculationConfig(method="draft_model", num_speculative_tokens=CAP)
    lengths = []
    for step in (bend, FLAT):
        tables = {Role.STEP: step, Role.PASS: CostTable(rows=(1, 256), seconds=(0.002, 0.004))}
        costs = CostModel(StepTimes(tables=tables))
        policy = make_policy(config, costs, Acceptance(64, CAP))
        lengths.append(policy.lengths(candidates(constant(0.8, 16, CAP))))
    assert lengths[0].tolist() == [1] * 16
    assert (lengths[1] > 3).all()
