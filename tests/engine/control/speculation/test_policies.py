"""Policies, one decision at a time. Oracle of `faser` and `survival`: every vector of lengths, tried."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from faser.config.speculation import POLICIES, SpeculationConfig
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.speculation.draft_lengths import Objective, best_lengths
from faser.engine.control.speculation.faser_policy import SHARE
from faser.engine.control.speculation.policies import make_policy
from faser.engine.control.speculation.policy import Candidates, Policy
from faser.engine.control.step_cost import CostModel
from faser.engine.control.step_posterior import DRAFTED, KEPT, PLAIN
from faser.errors import ConfigError
from faser.types.arrays import Ints
from tests.engine.control.speculation.building import candidates, constant, ints
from tests.native_acceptance import native_acceptance

FLAT = CostTable(rows=(1, 512), seconds=(0.020, 0.021))
LINEAR = CostTable(rows=(1, 2), seconds=(0.020, 0.040))
PASS = CostTable(rows=(1, 64), seconds=(0.001, 0.002))


def policy(name: str, costs: CostModel, *, cap: int = 8, gamma: int | None = None) -> Policy:
    acceptance = native_acceptance(64, cap)
    config = SpeculationConfig(
        method="draft_model" if costs.has_passes else "suffix",
        policy=name,
        num_speculative_tokens=gamma or cap,
        table=((1, 4, 5), (5, 16, 2), (17, 64, 0)),
    )
    return make_policy(config, costs, acceptance)


def with_passes(step: CostTable) -> CostModel:
    return CostModel(StepTimes(tables={Role.STEP: step, Role.PASS: PASS}))


def from_text(step: CostTable) -> CostModel:
    return CostModel(StepTimes(tables={Role.STEP: step, Role.TEXT: CostTable(rows=(1, 2), seconds=(3e-5, 6e-5))}))


def staircase(rng: np.random.Generator) -> CostTable:
    rows = np.sort(rng.choice(np.arange(2, 24), size=6, replace=False))
    return CostTable.measured(
        dict(zip([1, *rows.tolist()], (0.01 + np.cumsum(rng.exponential(0.003, 7))).tolist(), strict=True))
    )


def rate(costs: CostModel, each: Candidates, lengths: Ints, *, drafting: bool = True) -> float:
    """G, spelt out token by token."""
    worth = float(each.step.other_sequences)
    for survival, length in zip(each.survival, lengths, strict=True):
        worth += float(survival[: int(length) + 1].sum())
    decodes = each.num_sequences + each.step.other_sequences
    rows = each.num_sequences + each.step.other_rows
    seconds = costs.step_s(decodes) + costs.step_s(rows + int(lengths.sum())) - costs.step_s(rows)
    return worth / (seconds + (costs.draft_s(lengths, each.sequences.missing_kv) if drafting else 0.0))


def best_rate(costs: CostModel, each: Candidates, *, drafting: bool) -> float:
    choices = product(*(range(int(limit) + 1) for limit in each.limit))
    return max(rate(costs, each, np.array(lengths), drafting=drafting) for lengths in choices)


def random_candidates(rng: np.random.Generator) -> Candidates:
    count, cap = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    chances = rng.uniform(0.05, 0.99, (count, cap))
    survival = np.concatenate((np.ones((count, 1)), chances.cumprod(axis=1)), axis=1)
    other_sequences = int(rng.integers(0, 4))
    return candidates(
        survival,
        limit=rng.integers(0, cap + 1, count),
        other_sequences=other_sequences,
        other_rows=other_sequences + int(rng.choice([0, 0, 7])),
    )


@pytest.mark.parametrize("seed", range(40))
def test_faser_verifies_what_brute_force_would(seed: int) -> None:
    rng = np.random.default_rng(seed)
    each, costs = random_candidates(rng), with_passes(staircase(rng))
    kept = policy("faser", costs, cap=each.survival.shape[1] - 1).keep(each, each.limit)
    assert (kept <= each.limit).all()
    assert rate(costs, each, kept, drafting=False) == pytest.approx(best_rate(costs, each, drafting=False))


@pytest.mark.parametrize("seed", range(20))
def test_one_sequence_gets_the_very_best_length(seed: int) -> None:
    rng = np.random.default_rng(seed)
    survival = np.concatenate(([1.0], rng.uniform(0.3, 0.99, 8).cumprod()))[None]
    each, costs = candidates(survival), with_passes(staircase(rng))
    choice = best_lengths(each, Objective(costs, each), costs)
    assert rate(costs, each, choice.lengths) == pytest.approx(best_rate(costs, each, drafting=True))


@pytest.mark.parametrize("step", [FLAT, CostTable(rows=(1, 64, 128, 1024), seconds=(0.02, 0.02, 0.04, 0.4))])
def test_many_candidates_lose_little_to_a_common_depth(step: CostTable) -> None:
    """Oracle: every number of tokens, one by one, at every depth; 32 sequences, 16 tokens each."""
    rng = np.random.default_rng(0)
    chances = rng.uniform(0.3, 0.98, (32, 1)) * np.ones((1, 16))
    each = candidates(np.concatenate((np.ones((32, 1)), chances.cumprod(axis=1)), axis=1))
    costs = with_passes(step)
    order = np.argsort(-each.survival[:, 1:], axis=None, kind="stable")
    best = 0.0
    for depth in range(1, 17):
        taken = order[order % 16 < depth]
        for count in range(0, len(taken) + 1, 3):
            lengths = np.bincount(taken[:count] // 16, minlength=32)
            best = max(best, rate(costs, each, lengths))
    assert best_lengths(each, Objective(costs, each), costs).rate >= 0.97 * best


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(10))
def test_no_policy_exceeds_a_limit(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    each = random_candidates(rng)
    for costs in (with_passes(staircase(rng)), from_text(staircase(rng))):
        chosen = policy(name, costs, cap=each.survival.shape[1] - 1)
        for _ in range(40):
            lengths = chosen.lengths(each)
            assert ((lengths >= 0) & (lengths <= each.limit)).all()
            stop = chosen.stop_rule(each, lengths) if lengths.any() else None
            assert stop is None or len(stop.pass_prices) == each.num_sequences
            kept = chosen.keep(each.drafted(lengths, each.survival), lengths)
            assert ((kept >= 0) & (kept <= lengths)).all()


def test_a_drafter_that_is_nearly_free_drafts_deep_while_steps_cost_the_same() -> None:
    lengths = policy("faser", with_passes(FLAT)).lengths(candidates(constant(0.95, 4, 8)))
    assert (lengths == 8).all()


def test_no_sequence_drafts_where_every_row_costs_what_it_can_bring() -> None:
    each = candidates(constant(0.99, 8, 8))
    assert not policy("faser", with_passes(LINEAR)).lengths(each).any()
    looked_up = policy("faser", from_text(LINEAR))
    assert not looked_up.keep(each, looked_up.lengths(each)).any()


def test_a_gain_within_the_margin_does_not_switch_on() -> None:
    """Passes are priced so that one drafted token gains 2 %: less than switching on takes."""
    step = CostTable(rows=(1, 100), seconds=(0.010, 0.010))
    costs = CostModel(
        StepTimes(tables={Role.STEP: step, Role.PASS: CostTable(rows=(1,), seconds=(0.010 * (1.5 / 1.02 - 1),))})
    )
    each = candidates(np.array([[1.0, 0.5]]))
    assert rate(costs, each, ints(1)) == pytest.approx(1.02 * rate(costs, each, ints(0)))
    assert not policy("faser", costs).lengths(each).any()


def test_once_on_a_small_gain_is_enough_and_switches_are_a_few_steps_apart() -> None:
    step = CostTable(rows=(1, 100), seconds=(0.010, 0.010))
    costs = CostModel(
        StepTimes(tables={Role.STEP: step, Role.PASS: CostTable(rows=(1,), seconds=(0.010 * (1.5 / 1.02 - 1),))})
    )
    good, fair, bad = (candidates(np.array([[1.0, each]])) for each in (0.9, 0.5, 0.1))
    chosen = policy("faser", costs)
    assert chosen.lengths(good).any()
    assert all(chosen.lengths(fair).any() for _ in range(10))
    assert not chosen.lengths(bad).any()
    assert [bool(chosen.lengths(good).any()) for _ in range(3)] == [False, True, True]


def test_a_sequence_that_accepts_nothing_is_left_out_while_others_draft() -> None:
    survival = np.concatenate((constant(0.9, 3, 4), constant(0.02, 1, 4)))
    sloping = CostTable(rows=(1, 64), seconds=(0.020, 0.060))
    lengths = policy("faser", with_passes(sloping), cap=4).lengths(candidates(survival))
    assert (lengths[:3] > 0).all()
    assert lengths[3] == 0


def test_tokens_that_a_target_needs_are_verified_before_those_that_pay() -> None:
    """A target of 10.1 ms: after a step of 20 ms a sequence that lacked nothing wants 1.98 tokens."""
    bend = CostTable(rows=(1, 6, 7, 64), seconds=(0.020, 0.020, 0.040, 2.0))
    each = candidates(np.array([[1.0, 0.9, 0.8, 0.7, 0.6], [1.0, 0.5, 0.5, 0.2, 0.1]]))
    targets = each.sequences._replace(lacking=np.array([-np.inf, 0.0]), wanted_per_s=np.array([0.0, 99.0]))
    chosen = policy("faser", with_passes(bend), cap=4)
    assert chosen.keep(each, each.limit).tolist() == [4, 0]
    assert chosen.keep(replace(each, sequences=targets), each.limit).tolist() == [2, 2]


def test_a_sequence_with_much_missing_draft_kv_waits_for_better_prospects() -> None:
    survival = constant(0.5, 1, 4)
    costs = CostModel(StepTimes.proportional(step_s=0.02, pass_s=0.005, pass_row_s=0.001))
    assert policy("faser", costs, cap=4).lengths(candidates(survival)).any()
    far = candidates(survival, missing_kv=ints(2000))
    assert not policy("faser", costs, cap=4).lengths(far).any()


@pytest.mark.parametrize("count", [1, 3])
def test_an_answer_that_ends_soon_is_not_worth_a_long_prompt_in_the_draft_models_cache(count: int) -> None:
    costs = CostModel(StepTimes.proportional(step_s=0.02, pass_s=0.005, pass_row_s=0.001))
    for remaining, drafts in ((200, True), (10, False)):
        each = candidates(
            constant(0.8, count, 4), missing_kv=np.full(count, 100), remaining=np.full(count, remaining)
        )
        assert policy("faser", costs, cap=4).lengths(each).any() == drafts
    caught_up = candidates(constant(0.8, count, 4), remaining=np.full(count, 10))
    assert policy("faser", costs, cap=4).lengths(caught_up).any()


def test_a_long_prompt_in_the_step_does_not_make_drafts_look_cheap() -> None:
    costs = with_passes(LINEAR)
    each = candidates(constant(0.9, 4, 4), other_rows=500)
    assert not policy("faser", costs, cap=4).lengths(each).any()
    assert not policy("faser", costs, cap=4).keep(each, each.limit).any()


@pytest.mark.parametrize("count", [1, 8])
def test_drafts_that_bring_less_than_deciding_takes_are_not_asked_for(count: int) -> None:
    few = candidates(constant(0.3, count, 4))
    assert policy("faser", with_passes(FLAT)).lengths(few).any()
    costs = with_passes(FLAT)
    host_takes(costs, 0.020, count)  # as long as a step
    assert not policy("faser", costs).lengths(few).any()


def host_takes(costs: CostModel, drafting_s: float, count: int = 1, *, plain_s: float = 0.0) -> None:
    """Steps with drafts leave the device without work for drafting_s, others for plain_s."""
    for _ in range(200):
        costs.posterior.observe_gap(count, drafting_s, KEPT)
        costs.posterior.observe_gap(count, plain_s, PLAIN)


GPU_STEP = CostTable(rows=(1, 2), seconds=(0.005, 0.005 + 1e-5))


def test_drafts_that_bring_less_than_the_gap_they_leave_are_not_made() -> None:
    """Steps of 5 ms whose drafts bring a quarter more tokens, and a gap of 2 ms that plain steps do not have."""

    def drafts(acceptance: float) -> bool:
        each = candidates(constant(acceptance, 1, 1))
        chosen = policy("faser", costs, cap=1)
        return bool([chosen.lengths(each).any() for _ in range(3)][-1])  # the first one may be a probe

    table = CostTable(rows=(1,), seconds=(0.0005,))
    costs = CostModel(StepTimes(tables={Role.STEP: GPU_STEP, Role.PASS: table}))
    assert drafts(0.25)
    host_takes(costs, 0.002)
    assert not drafts(0.25)
    assert drafts(0.9)


def test_rows_that_bring_less_than_keeping_them_takes_on_the_host_are_cut() -> None:
    """A row is nearly free on the device, but a step that keeps any takes a tenth longer on the host."""
    costs = CostModel(StepTimes(tables={Role.STEP: GPU_STEP, Role.TEXT: CostTable(rows=(1,), seconds=(1e-5,))}))
    for _ in range(200):
        costs.posterior.observe_gap(1, 0.0001, DRAFTED)
        costs.posterior.observe_gap(1, 0.0006, KEPT)
    config = SpeculationConfig(method="ngram", num_speculative_tokens=4)
    acceptance = native_acceptance(1, 4)
    faser = make_policy(config, costs, acceptance)
    barely, well = candidates(constant(0.08, 1, 4)), candidates(constant(0.3, 1, 4))
    assert faser.row_price(barely) < 0.08
    assert not faser.keep(barely, barely.limit).any()
    assert faser.keep(well, well.limit).any()


def test_where_plain_steps_wait_as_well_only_the_longer_gap_counts() -> None:
    each = candidates(constant(0.25, 1, 1))
    for plain_s, drafts in ((0.0019, True), (0.0, False)):
        table = CostTable(rows=(1,), seconds=(0.0005,))
        costs = CostModel(StepTimes(tables={Role.STEP: GPU_STEP, Role.PASS: table}))
        host_takes(costs, 0.002, plain_s=plain_s)
        assert policy("faser", costs, cap=1).lengths(each).any() is np.bool_(drafts)


def test_a_probe_is_charged_the_gap_that_it_leaves() -> None:
    """Oracle: the account holds a share of 400 steps; a probe that costs more is never taken."""
    each = candidates(constant(0.02, 1, 8))
    for gap_s, probes in ((0.001, True), (0.030, False)):
        costs = CostModel(StepTimes(tables={Role.STEP: FLAT, Role.PASS: CostTable(rows=(1,), seconds=(0.001,))}))
        host_takes(costs, gap_s)
        chosen = policy("faser", costs)
        assert any(chosen.lengths(each).any() for _ in range(1000)) == probes


def test_sequences_that_wait_for_a_draft_count() -> None:
    """A pass that pays for one sequence alone delays fifteen others that bring a token each."""
    costs = CostModel(StepTimes(tables={Role.STEP: FLAT, Role.PASS: CostTable(rows=(1,), seconds=(0.005,))}))
    alone = candidates(constant(0.6, 1, 4))
    among = candidates(constant(0.6, 1, 4), other_rows=15, other_sequences=15)
    assert policy("faser", costs, cap=4).lengths(alone).any()
    assert not policy("faser", costs, cap=4).lengths(among).any()


def test_probes_are_taken_and_cost_at_most_their_share_of_the_time() -> None:
    costs = CostModel(
        StepTimes(tables={Role.STEP: FLAT, Role.PASS: CostTable(rows=(1, 64), seconds=(0.004, 0.006))})
    )
    each = candidates(constant(0.02, 16, 8))
    chosen = policy("faser", costs)
    plain_s, extra_s, probes = 0.0, 0.0, 0
    for _ in range(2000):
        lengths = chosen.lengths(each)
        plain_s += costs.step_s(16)
        extra_s += (
            costs.draft_s(lengths, each.sequences.missing_kv)
            + costs.step_s(16 + int(lengths.sum()))
            - costs.step_s(16)
        )
        probes += int(lengths.any())
    assert probes >= 5
    assert extra_s <= 1.1 * SHARE * plain_s


def test_a_probe_that_would_have_to_refill_a_long_cache_is_not_taken() -> None:
    costs = CostModel(StepTimes.proportional(step_s=0.02, pass_s=0.005, pass_row_s=0.001))
    each = candidates(constant(0.02, 1, 4), missing_kv=ints(5000))
    chosen = policy("faser", costs, cap=4)
    assert not any(chosen.lengths(each).any() for _ in range(500))


def test_the_stop_rule_lets_a_certain_draft_go_on_and_stops_a_hopeless_one() -> None:
    costs = with_passes(FLAT)
    chosen = policy("faser", costs)
    each = candidates(constant(0.7, 2, 8))
    lengths = chosen.lengths(each)
    stop = chosen.stop_rule(each, lengths)
    assert stop is not None
    assert len(stop.pass_prices) == 2
    assert 2 * (1.0 - stop.row_price) > stop.pass_prices[1]
    assert 2 * (0.05 - stop.row_price) < stop.pass_prices[1]
    assert stop.slope > 0


def test_drafts_from_text_have_no_stop_rule() -> None:
    chosen = policy("faser", from_text(FLAT))
    each = candidates(constant(0.7, 2, 8))
    assert chosen.stop_rule(each, chosen.lengths(each)) is None


def test_text_drafts_are_looked_up_in_full_and_cut_by_what_they_turn_out_to_be() -> None:
    bend = CostTable(rows=(1, 8, 64), seconds=(0.020, 0.020, 0.20))
    each = candidates(constant(0.5, 2, 8))
    chosen = policy("faser", from_text(bend))
    lengths = chosen.lengths(each)
    assert (lengths == 8).all()
    kept = chosen.keep(each.drafted(lengths, np.concatenate((constant(0.9, 1, 8), constant(0.1, 1, 8)))), lengths)
    assert kept[0] > kept[1]
    assert kept.sum() < 16


def test_fixed_drafts_gamma_and_keeps_it() -> None:
    each = candidates(constant(0.1, 3, 8), limit=ints(8, 2, 0))
    chosen = policy("fixed", with_passes(LINEAR), gamma=3)
    assert chosen.lengths(each).tolist() == [3, 2, 0]
    assert chosen.keep(each, ints(3, 2, 0)).tolist() == [3, 2, 0]


@pytest.mark.parametrize(
    "count, others, gamma", [(1, 0, 5), (4, 0, 5), (5, 0, 2), (4, 12, 2), (17, 0, 0), (60, 40, 0)]
)
def test_the_table_goes_by_the_number_of_sequences(count: int, others: int, gamma: int) -> None:
    each = candidates(constant(0.9, count, 8), other_rows=others, other_sequences=others)
    assert (policy("table", with_passes(FLAT)).lengths(each) == gamma).all()


class TwoBelowFour(Policy):
    """As small as a policy can be: its name and its lengths."""

    name = "two-below-four"

    def lengths(self, candidates: Candidates) -> Ints:
        return np.minimum(candidates.limit, 2 if candidates.num_sequences < 4 else 0)


def test_a_policy_needs_no_more_than_lengths_and_then_verifies_all_it_drafts() -> None:
    few, many = (candidates(constant(0.9, count, 8)) for count in (3, 4))
    chosen = TwoBelowFour()
    assert chosen.lengths(few).tolist() == [2, 2, 2]
    assert not chosen.lengths(many).any()
    assert chosen.stop_rule(few, chosen.lengths(few)) is None
    assert chosen.keep(few, ints(2, 1, 0)).tolist() == [2, 1, 0]


def test_a_table_must_be_given() -> None:
    acceptance = native_acceptance(1, 1)
    with pytest.raises(ConfigError, match="table"):
        make_policy(SpeculationConfig(policy="table"), from_text(FLAT), acceptance)


def test_an_unknown_policy_is_refused_by_name() -> None:
    acceptance = native_acceptance(1, 1)
    with pytest.raises(ConfigError, match="greedy"):
        make_policy(SpeculationConfig(policy="greedy"), from_text(FLAT), acceptance)


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("step", [FLAT, LINEAR])
def test_goodput_finds_the_best_common_length(alpha: float, step: CostTable) -> None:
    costs = with_passes(step)
    each = candidates(constant(alpha, 4, 8))
    rates = [rate(costs, each, np.full(4, gamma)) for gamma in range(9)]
    assert (policy("goodput", costs).lengths(each) == int(np.argmax(rates))).all()


def test_goodput_needs_a_tenth_more_to_switch_on_again() -> None:
    step = CostTable(rows=(1, 100), seconds=(0.010, 0.010))
    costs = CostModel(
        StepTimes(tables={Role.STEP: step, Role.PASS: CostTable(rows=(1,), seconds=(0.010 * (1.5 / 1.08 - 1),))})
    )
    fair, bad = candidates(np.array([[1.0, 0.5]])), candidates(np.array([[1.0, 0.1]]))
    chosen = policy("goodput", costs)
    assert chosen.lengths(fair).any()
    assert not chosen.lengths(bad).any()
    assert not chosen.lengths(fair).any()
    assert chosen.lengths(candidates(np.array([[1.0, 0.9]]))).any()


@pytest.mark.parametrize("seed", range(20))
def test_survival_drafts_the_cap_and_cuts_where_tokens_a_second_peak(seed: int) -> None:
    rng = np.random.default_rng(seed)
    each, costs = random_candidates(rng), with_passes(staircase(rng))
    chosen = policy("survival", costs)
    lengths = chosen.lengths(each)
    assert lengths.tolist() == each.limit.tolist()
    kept = chosen.keep(each, lengths)
    sunk_s = costs.draft_s(lengths, each.sequences.missing_kv)

    def value(some: Ints) -> float:
        undrafted = rate(costs, each, some, drafting=False)
        worth = each.step.other_sequences + sum(
            float(row[: int(n) + 1].sum()) for row, n in zip(each.survival, some, strict=True)
        )
        return worth / (worth / undrafted + sunk_s)

    choices = product(*(range(int(limit) + 1) for limit in each.limit))
    assert value(kept) == pytest.approx(max(value(np.array(some)) for some in choices))
