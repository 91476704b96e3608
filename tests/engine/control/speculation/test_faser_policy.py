"""`faser` with drafts from text: when a model drafts instead.

Oracle: the objective. Planted bugs that these tests have caught: the model drafts whatever text has found; a probe
replaces a draft from text; drafts go on across a bend of the step time.
"""

import numpy as np

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.speculation.faser_policy import PROBE_TOKENS, Faser
from faser.engine.control.speculation.policies import make_policy
from faser.engine.control.speculation.policy import Candidates
from faser.engine.control.step_cost import CostModel
from faser.types.arrays import Floats, Ints
from tests.engine.control.speculation.building import candidates, constant, full, ints
from tests.engine.control.speculation.test_policies import FLAT
from tests.native_acceptance import native_acceptance

CAP = 8
STEP_S = 0.020


def costs_of(looking_s: float, *, pass_s: float | None = None, step: CostTable = FLAT) -> CostModel:
    tables = {Role.STEP: step, Role.TEXT: CostTable(rows=(1, 2), seconds=(looking_s, looking_s))}
    if pass_s is not None:
        tables[Role.PASS] = CostTable(rows=(1, 2), seconds=(pass_s, pass_s))
    return CostModel(StepTimes(tables=tables))


def faser(costs: CostModel, *, has_model: bool = False) -> Faser:
    config = SpeculationConfig(model="drafter" if has_model else None, num_speculative_tokens=CAP)
    found = make_policy(config, costs, native_acceptance(64, CAP))
    assert isinstance(found, Faser)
    return found


def nothing(each: Candidates) -> Candidates:
    """Every look-up came back empty."""
    survival = np.zeros_like(each.survival)
    survival[:, 0] = 1.0
    return each.drafted(np.zeros_like(each.limit), survival)


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


def test_no_draft_goes_on_across_a_bend_of_the_step_time() -> None:
    """The stop rule has one price for all rows. Up to 32 rows are nearly free, the next cost what they bring."""
    bend = CostTable(rows=(1, 16, 32, 64, 128), seconds=(0.020, 0.020, 0.022, 0.036, 0.070))
    config = SpeculationConfig(method="draft_model", num_speculative_tokens=CAP)
    lengths = []
    for step in (bend, FLAT):
        tables = {Role.STEP: step, Role.PASS: CostTable(rows=(1, 256), seconds=(0.002, 0.004))}
        costs = CostModel(StepTimes(tables=tables))
        policy = make_policy(config, costs, native_acceptance(64, CAP))
        lengths.append(policy.lengths(candidates(constant(0.8, 16, CAP))))
    assert lengths[0].tolist() == [1] * 16
    assert (lengths[1] > 3).all()
