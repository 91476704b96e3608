"""What policies see, and what becomes of their decisions: caps, budgets, blocks, targets, cached decisions.

A policy drafts all it may and notes what it saw, over the real scheduler and a scripted executor. Planted
bugs that these tests have caught: dropped tokens are not noted; a policy does not see the steps that its last
decision served.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.drafts import Drafts, empty_table
from faser.engine.contract.plan import DraftPlan, StepSpan, StopRule
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.sequence import Sequence
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.speculation.guard import Guard
from faser.engine.control.speculation.overlap import OverlapOptions
from faser.engine.control.speculation.policies import Off
from faser.engine.control.speculation.policy import Candidates, OtherRows, Policy
from faser.engine.control.speculation.step_drafts import StepDrafts
from faser.engine.control.step_cost import CostModel
from faser.engine.engine import Engine
from faser.errors import ConfigError
from faser.types.arrays import Ints
from faser.types.request import Request, Slo, SpeculationParams
from faser.types.statistics import SpeculationStats
from tests.engine.driving import DRAFT_CAP, Driver, request
from tests.native_acceptance import make_native


@dataclass
class Greedy(Policy):
    """A Policy: all sequences draft as much as they may, or none drafts.

    seen: the candidates it was shown. offered: tokens that came of it.
    """

    drafts: bool = True
    seen: list[Candidates] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    name: str = "greedy"
    never_drafts: bool = False
    is_guarded: bool = False

    def lengths(self, candidates: Candidates) -> Ints:
        self.seen.append(candidates)
        return candidates.limit if self.drafts else np.zeros_like(candidates.limit)

    def stop_rule(self, candidates: Candidates, lengths: Ints) -> StopRule | None:  # noqa: ARG002
        prices = tuple(0.1 * (i + 1) for i in range(len(lengths)))
        return StopRule(row_price=0.1, pass_prices=prices, intercept=0.0, slope=1.0)

    def keep(self, candidates: Candidates, lengths: Ints) -> Ints:  # noqa: ARG002
        self.offered.append(int(lengths.sum()))
        return lengths


def driver_with(
    policy: Greedy,
    *,
    num_blocks: int = 200,
    max_num_seqs: int = 40,
    max_num_batched_tokens: int = 400,
    max_logit_rows: int | None = None,
    looks: bool = True,
) -> Driver:
    return Driver(
        looks=looks,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_logit_rows=max_logit_rows,
        speculates=policy,
    )


def asking(
    name: str,
    *,
    prompt: int = 6,
    max_tokens: int = 30,
    enabled: bool = True,
    max_drafts: int | None = None,
    tpot_ms: float | None = None,
) -> Request:
    requests = SpeculationParams(enabled=enabled, max_tokens=max_drafts, slo=Slo(tpot_ms=tpot_ms))
    return replace(request(name, [100 + len(name)] * prompt, max_tokens=max_tokens), speculation=requests)


def speculated(driver: Driver) -> SpeculationStats:
    stats = driver.scheduler.stats().speculation
    assert stats is not None
    return stats


def test_a_request_drafts_no_more_than_it_says_and_off_is_off() -> None:
    policy = Greedy()
    driver = driver_with(policy)
    driver.add(asking("free"), asking("capped", max_drafts=2), asking("off", enabled=False))
    driver.step()
    driver.step()
    assert policy.seen[0].limit.tolist() == [DRAFT_CAP, 2, 0]
    assert dict(speculated(driver).bypasses)["request"] == 1


def test_no_draft_goes_beyond_the_end_of_a_request() -> None:
    """The last token needs no draft, and the last but one at most one: a step brings γ + 1."""
    policy = Greedy()
    driver = driver_with(policy)
    driver.add(asking("a", max_tokens=4))
    plans = driver.run()
    assert policy.seen[0].limit.tolist() == [2]
    assert all(len(rows.token_ids) <= 3 for plan in plans[1:] for rows in plan.rows)


def test_drafts_leave_every_sequence_its_row_and_prompts_half_of_the_rest() -> None:
    policy = Greedy()
    driver = driver_with(policy, max_num_batched_tokens=40, max_num_seqs=8)
    driver.add(*(asking(str(i), prompt=3) for i in range(4)))
    driver.step()
    driver.add(asking("long", prompt=35, max_tokens=9))
    plan = driver.plan()
    assert plan is not None
    assert policy.seen[-1].step.other_rows >= 35
    assert policy.seen[-1].limit.tolist() == [(40 - 4) // 2 // 4] * 4
    assert plan.num_rows == 40
    driver.commit(plan)


def test_drafts_end_where_a_step_has_no_room_for_their_logits() -> None:
    policy = Greedy()
    driver = driver_with(policy, max_num_batched_tokens=40, max_logit_rows=8 + 13, max_num_seqs=8)
    driver.add(*(asking(str(i), prompt=3) for i in range(4)))
    driver.run()
    assert policy.seen[0].limit.tolist() == [13 // 4] * 4


def test_a_policy_sees_the_other_rows_and_which_of_them_bring_a_token() -> None:
    policy = Greedy()
    driver = driver_with(policy, max_num_batched_tokens=12, max_num_seqs=4, looks=False)
    driver.add(asking("drafts", prompt=3), asking("ends", prompt=3, max_tokens=2))
    driver.step()
    driver.add(asking("long", prompt=30, max_tokens=9))
    first = driver.step()
    (prompt,) = (len(rows.token_ids) for rows in first.rows if rows.start == 0)
    seen = policy.seen[-1]
    found = seen.num_sequences, seen.step.other_sequences, seen.step.other_rows
    assert found == (1, 1, 11)  # the budget ends there
    driver.step()
    seen = policy.seen[-1]
    assert (seen.num_sequences, seen.step.other_sequences, seen.step.other_rows) == (1, 0, min(30 - prompt, 11))


def test_where_blocks_are_short_drafts_are_given_up_and_no_sequence_is_preempted_for_them() -> None:
    policy = Greedy()
    driver = driver_with(policy, num_blocks=9, max_num_seqs=2)
    requests = [asking("a", prompt=11, max_tokens=7), asking("b", prompt=11, max_tokens=7)]
    driver.add(*requests)
    driver.run()
    driver.check(*requests)
    assert driver.scheduler.stats().num_preemptions == 0
    assert dict(speculated(driver).bypasses)["memory"] > 0


def test_a_policy_hears_what_sequences_lack_to_keep_their_targets() -> None:
    policy = Greedy(drafts=False)
    driver = driver_with(policy)
    driver.add(
        asking("none"),
        asking("slow", tpot_ms=10.0),
        asking("faster", tpot_ms=1000.0),
    )
    driver.step()
    for _ in range(3):
        driver.clock.advance(0.02)
        driver.step()
    seen = policy.seen[-1].sequences
    assert seen.lacking == pytest.approx([-np.inf, 0.04 / 0.01 - 2, 0.04 - 2])
    assert seen.wanted_per_s.tolist() == pytest.approx([0.0, 100.0, 1.0])


def test_a_large_batch_keeps_a_decision_for_some_steps_until_many_start() -> None:
    """Of thirty-two sequences a decision serves three steps; a sequence that starts meanwhile drafts as usual."""
    policy = Greedy()
    driver = driver_with(policy, looks=False)
    driver.add(*(asking(str(i), prompt=2, max_tokens=50) for i in range(32)))
    for _ in range(4):
        driver.step()
    assert len(policy.seen) == 1
    control, running = driver.scheduler._speculation, driver.scheduler._running
    assert isinstance(control, SpeculationControl)

    def decide() -> StepDrafts:
        found = control.decide(
            running, OtherRows(rows=0, sequences=0), budget=400, room=lambda _, lengths: lengths
        )
        assert found is not None
        return found

    driver.add(asking("late", prompt=2, max_tokens=50))
    driver.step()
    assert len(policy.seen) == 2
    cached = decide()
    assert len(policy.seen) == 2
    assert len(cached.sequences) == 33
    assert cached.lengths[-1] == round(sum(cached.lengths[:-1]) / 32)

    driver.add(*(asking(f"later {i}", prompt=2, max_tokens=50) for i in range(4)))
    driver.step()
    assert len(policy.seen) == 2
    driver.step()
    assert len(policy.seen) == 3


def test_a_cached_stop_rule_has_a_price_for_every_sequence_that_drafts() -> None:
    """Blocks are short when the decision is made and plenty in the next step, which it serves as well."""
    driver = driver_with(Greedy())
    driver.add(*(asking(str(i), prompt=2, max_tokens=50) for i in range(32)))
    driver.step()
    control, running = driver.scheduler._speculation, driver.scheduler._running
    assert isinstance(control, SpeculationControl)
    for num_fitting in (3, 32):

        def room(_sequences: list[Sequence], lengths: list[int], most: int = num_fitting) -> list[int]:
            return [*lengths[:most], *[0] * len(lengths[most:])]

        step = control.decide(running, OtherRows(rows=0, sequences=0), budget=400, room=room)
        assert step is not None
        assert step.stop is not None
        assert len(step.stop.pass_prices) >= len(step.sequences) == num_fitting


def test_tokens_that_the_stop_rule_drops_lower_what_is_expected_before_drafting() -> None:
    """The model makes a pass for each draft, and no token is kept: each is worth a row, a tenth, at most."""
    driver = driver_with(Greedy(), looks=False)
    driver.add(asking("a", max_tokens=50))
    driver.step()
    control, running = driver.scheduler._speculation, driver.scheduler._running
    assert isinstance(control, SpeculationControl)
    slot = running[0].held_slot
    expected = []
    for _ in range(8):
        step = control.decide(running, OtherRows(rows=0, sequences=0), budget=400, room=lambda _, asked: asked)
        assert step is not None
        assert step.stop is not None
        dropped = empty_table([slot], "draft_model", DRAFT_CAP)
        assert control.drafted(step, Drafts(step=1, table=dropped, run_s=0.001, passes=1)) is None
        control.keep(step, lambda _, asked: asked)
        assert step.verified() == []
        expected.append(control._acceptance.survival(np.array([slot]), by_model=True).item(0, 1))
    assert expected[0] < 0.7
    assert all(after < before for before, after in pairwise(expected))
    assert 0.1 < expected[-1] < 0.4


def test_drafts_of_a_sequence_that_was_aborted_before_its_step_are_dropped() -> None:
    """Planted bug: the next step, of another sequence in the same slot, verifies and learns them."""
    policy = Greedy()
    driver = driver_with(policy, looks=False)
    driver.add(asking("a", max_tokens=40))
    driver.step()
    plan = driver.scheduler.drafts.propose()
    assert isinstance(plan, DraftPlan)
    driver.scheduler.drafts.drafted(driver.executor.draft(plan))
    driver.abort("a")
    assert driver.plan() is None
    driver.add(asking("bb", max_tokens=40))
    driver.step()
    assert not policy.offered
    assert not speculated(driver).num_drafts


def test_few_sequences_are_decided_anew_in_every_step() -> None:
    policy = Greedy()
    driver = driver_with(policy, looks=False)
    driver.add(asking("a", max_tokens=40), asking("bb", max_tokens=40))
    for _ in range(5):
        driver.step()
    assert len(policy.seen) == 4


def test_whether_to_look_drafts_up_is_decided_in_every_fourth_step() -> None:
    policy = Greedy()
    driver = driver_with(policy)
    driver.add(asking("a", max_tokens=50))
    for _ in range(6):
        driver.step()
    assert len(policy.seen) == 2
    assert len(policy.offered) == 5


def test_while_no_sequence_drafts_the_policy_pauses_and_then_sees_for_how_long() -> None:
    policy = Greedy(drafts=False)
    driver = driver_with(policy)
    driver.add(asking("a", max_tokens=55))
    driver.run()
    since = [each.step.since for each in policy.seen]
    assert since[:6] == [1, 2, 3, 4, 5, 9]
    assert since[6:] == [17]
    assert dict(speculated(driver).bypasses)["gain"] >= sum(since)


def test_a_policy_that_drafts_never_pauses() -> None:
    policy = Greedy()
    driver = driver_with(policy, looks=False)
    driver.add(asking("a"))
    driver.run()
    assert {each.step.since for each in policy.seen} == {1}


def test_a_policy_sees_how_many_steps_its_last_decision_has_served() -> None:
    """A decision to look drafts up serves four steps."""
    policy = Greedy()
    driver = driver_with(policy)
    driver.add(asking("a"))
    driver.run()
    assert policy.seen[0].step.since == 1
    assert {each.step.since for each in policy.seen[1:]} == {4}


def test_steps_without_a_draft_are_counted_by_reason() -> None:
    driver = driver_with(Greedy(drafts=False))
    driver.add(asking("a"))
    for _ in range(4):
        driver.step()
    stats = speculated(driver)
    assert dict(stats.bypasses)["gain"] == 3
    assert dict(stats.mode_steps) == {"plain": 4, "serial": 0}
    assert stats.num_drafts == 0


def test_a_policy_sees_drafts_that_are_empty() -> None:
    policy = Greedy()
    driver = driver_with(policy, looks=False)
    driver.add(asking("a", max_tokens=40))
    driver.run()
    assert len(policy.offered) == len(policy.seen)
    assert 0 in policy.offered


def test_a_step_for_which_nothing_was_found_has_no_drafts() -> None:
    policy = Greedy()
    driver = driver_with(policy)
    driver.add(asking("a", max_tokens=40))
    driver.run()
    modes = dict(speculated(driver).mode_steps)
    assert policy.offered.count(0) > 2
    assert modes["serial"] == sum(each > 0 for each in policy.offered)


def test_a_finished_sample_reports_what_speculation_did_for_it() -> None:
    driver = driver_with(Greedy())
    driver.add(asking("a", max_tokens=20))
    driver.run()
    last = driver.samples["a", 0].last
    assert last is not None
    assert last.speculation is not None
    summary, stats = last.speculation, speculated(driver)
    assert summary.drafted == summary.pruned + summary.verified
    assert summary.steps + summary.accepted == 20
    assert (summary.drafted, summary.accepted) == (
        sum(each.drafted for each in stats.methods),
        sum(each.accepted for each in stats.methods),
    )


def test_drafts_before_an_error_teach_nothing() -> None:
    """Tokens of the sequence are delivered, but what refused the next one was not the draft's fault."""
    num_delivered = 0
    for moment in range(2, 7):
        driver = driver_with(Greedy())
        driver.add(asking("a"))
        for _ in range(moment):
            driver.step()
        before = speculated(driver)
        driver.executor.fail_slots.add(0)
        driver.step()
        after = speculated(driver)
        assert [each.accepted for each in after.methods] == [each.accepted for each in before.methods]
        assert [each.verified for each in after.methods] == [each.verified for each in before.methods]
        last = driver.samples["a", 0].last
        assert last is not None
        num_delivered += len(last.token_ids)
    assert num_delivered > 0


def test_a_policy_that_was_refused_changes_nothing() -> None:
    policy = Greedy()
    driver = driver_with(policy, looks=False)
    driver.add(asking("a", max_tokens=40))
    driver.step()
    with pytest.raises(ConfigError):
        driver.scheduler.use_policy("clever", 1)
    driver.step()
    assert policy.seen[-1].limit.tolist() == [DRAFT_CAP]


@pytest.mark.parametrize(("name", "gamma"), [("fixed", 0), ("fixed", DRAFT_CAP + 1), ("clever", None)])
def test_a_policy_that_cannot_be_is_refused(name: str, gamma: int | None) -> None:
    driver = driver_with(Greedy())
    with pytest.raises(ConfigError, match=name if gamma is None else f"gamma is {gamma}; .* at most {DRAFT_CAP}"):
        driver.scheduler.use_policy(name, gamma)
    with pytest.raises(ConfigError, match="built without a drafter"):
        Driver().scheduler.use_policy("off")


def gap_driver(policy: Greedy) -> tuple[Driver, CostModel]:
    """An engine that schedules asynchronously, whose gaps the test makes up."""
    costs = CostModel(StepTimes.proportional(step_s=0.01, pass_s=0.001), schedules_async=True)
    control = SpeculationControl(
        SpeculationConfig(method="suffix", num_speculative_tokens=DRAFT_CAP),
        costs,
        make_native=make_native,
        num_slots=8,
        clock=SimulatedClock(),
        policy=policy,
    )
    return Driver(num_blocks=200, max_model_len=400, control=control), costs


def step_after(driver: Driver, last_gap_s: float | None) -> None:
    """A step. last_gap_s: of the one before it."""
    plan = driver.plan()
    assert plan is not None
    last = None if last_gap_s is None else StepSpan(1.0, last_gap_s)
    driver.scheduler.commit(plan, driver.executor.run(plan), last=last)


def test_gaps_of_steps_with_and_without_drafts_are_told_apart() -> None:
    policy = Greedy()
    driver, costs = gap_driver(policy)
    driver.add(asking("a", max_tokens=350))
    step_after(driver, None)  # its prompt
    step_after(driver, 9.0)
    for _ in range(40):
        step_after(driver, 0.002)
    assert costs.posterior.host_s(1) == pytest.approx(0.002, rel=0.1)
    policy.drafts = False
    step_after(driver, 0.002)
    for _ in range(150):
        step_after(driver, 0.0005)
    assert costs.posterior.host_s(1) == pytest.approx(0.0015, rel=0.1)


def test_prompts_newcomers_and_first_steps_teach_nothing_about_gaps() -> None:
    driver, costs = gap_driver(Greedy())
    usual_s = costs.posterior.host_s(1)
    driver.add(asking("a", prompt=200, max_tokens=100))
    for _ in range(7):  # of 32 rows each at most
        step_after(driver, 5.0)
    driver.add(asking("b"))
    step_after(driver, 5.0)
    step_after(driver, None)
    driver.add(asking("one token", prompt=1))
    step_after(driver, 5.0)
    assert costs.posterior.host_s(1) == usual_s


def test_steps_with_prompts_are_judged_by_themselves() -> None:
    """Chunks of other requests' prompts, while one request decodes; among them are steps in which these begin."""
    driver, _ = gap_driver(Greedy(is_guarded=True, name="faser"))
    driver.add(asking("a", max_tokens=350))
    for number in range(60):
        if number % 4 == 0:
            driver.add(asking(str(number), prompt=90, max_tokens=2))
        step_after(driver, 0.0)
    paid = {each.load: each for each in speculated(driver).paid}
    assert "prompts" in paid
    assert paid["prompts"].ratio > 1  # all steps take as long, and drafts bring tokens


def test_a_step_is_held_against_its_own_prediction_while_the_next_one_is_in_flight() -> None:
    """Each row takes 1 ms, as predicted; steps have between 1 and 64 rows."""
    costs = CostModel(StepTimes.proportional(step_s=0.0, row_s=0.001), schedules_async=True)
    driver = Driver(speculates=Off(), costs=costs, num_blocks=200, max_num_batched_tokens=64, max_model_len=200)
    engine = Engine(driver.scheduler, driver.executor, schedules_async=True)
    driver.add(request("a", [1], max_tokens=100))
    for number in range(8):
        driver.add(request(str(number), [number] * 60, max_tokens=3))
        for _ in range(4):
            engine.step()
    (step,) = [each for each in costs.stats() if each.role == "step"]
    assert step.errors[0] == sum(step.errors) >= 8


@pytest.mark.parametrize("num_resting", range(20, 28))
def test_pauses_of_the_policy_count_towards_the_next_decision_on_overlap(num_resting: int) -> None:
    """A decision is due every 3 steps, so with every answer of a policy that has paused for 32."""
    policy = Greedy(drafts=False)
    driver = Driver(speculates=policy, ahead=True, num_blocks=200, max_model_len=400)
    driver.add(asking("a", max_tokens=350))
    for _ in range(num_resting):
        driver.step()
    policy.drafts = True
    for _ in range(36):
        driver.step()
    modes = dict(speculated(driver).mode_steps)
    assert modes["serial"] == 0
    assert modes["lanes"] > 0


def with_lanes(policy: Greedy, *, mode: str, most_rows: int | None = None) -> SpeculationControl:
    """Drafts may be made during steps of at most most_rows rows, at no cost to either lane."""
    return SpeculationControl(
        SpeculationConfig(method="suffix", num_speculative_tokens=DRAFT_CAP),
        CostModel(StepTimes.proportional(step_s=0.01, text_s=0.0001, pass_s=0.001)),
        make_native=make_native,
        num_slots=8,
        clock=SimulatedClock(),
        policy=policy,
        overlap=OverlapOptions(name="lanes", share=0.5, mode=mode, every=3, most_rows=most_rows),
    )


def test_drafts_are_made_during_steps_that_lanes_have_graphs_for_and_no_others() -> None:
    """Graphs of up to 9 rows. Prompts of 6 come between; they and steps of more rows run without drafting."""
    control = with_lanes(Greedy(), mode="on", most_rows=9)
    driver = Driver(control=control, num_blocks=200, max_model_len=400)
    driver.add(asking("a", max_tokens=200))
    seen: Counter[tuple[bool, bool, bool]] = Counter()
    for number in range(80):
        if number in (30, 40, 50):
            driver.add(asking(str(number), max_tokens=60))
        plan = driver.plan()
        assert plan is not None
        if control.drafts_overlapped:
            has_prompts = plan.num_rows > len(plan.rows) + plan.num_drafts
            seen[has_prompts, plan.num_rows > 9, driver.overlaps] += 1
        driver.commit(plan)
    assert {what for what in seen if what[2]} == {(False, False, True)}
    assert seen[False, False, True] > 20
    assert seen[True, False, False]
    assert seen[False, True, False]


@pytest.mark.parametrize("mode, overlapped", [("on", True), ("auto", False)])
def test_only_forced_overlap_does_without_the_guard(
    mode: str, overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard allows nothing."""
    monkeypatch.setattr(Guard, "allows", lambda *_, **__: False)
    control = with_lanes(Greedy(is_guarded=True, name="faser"), mode=mode)
    driver = Driver(control=control, num_blocks=200, max_model_len=400)
    driver.add(asking("a", max_tokens=60))
    for _ in range(8):
        driver.step()
    assert control.drafts_overlapped == overlapped


@pytest.mark.parametrize(
    "name, is_guarded", [("faser", True), ("goodput", True), ("survival", True), ("fixed", False)]
)
def test_every_policy_that_decides_by_itself_is_guarded_and_remembered_by_itself(
    name: str, *, is_guarded: bool
) -> None:
    """Steps take as long whatever they verify, so drafts of the scripted answers pay."""
    driver, _ = gap_driver(Greedy())
    driver.add(asking("a", max_tokens=350))
    driver.scheduler.use_policy(name, 2 if name == "fixed" else None)
    assert not speculated(driver).paid
    for _ in range(60):
        step_after(driver, 0.0)
    learned = speculated(driver).paid
    assert bool(learned) == is_guarded
    driver.scheduler.use_policy("goodput" if name == "survival" else "survival", forget=False)
    assert not speculated(driver).paid
    driver.scheduler.use_policy(name, 2 if name == "fixed" else None, forget=False)
    assert speculated(driver).paid == learned
    driver.scheduler.use_policy(name, 2 if name == "fixed" else None)
    assert not speculated(driver).paid


@pytest.mark.parametrize("drafts", [True, False])
def test_the_predicted_time_of_steps_counts_the_context_of_every_row(drafts: bool) -> None:
    """Prompt chunks and drafts. Oracle: every row by itself; steps take what it says."""
    driver = Driver(
        speculates=Greedy(drafts=drafts),
        max_num_batched_tokens=9,
        costs=CostModel(StepTimes.proportional(step_s=0.1, row_s=0.01, kv_token_s=1e-3, kv_row_token_s=1e-4)),
    )
    driver.add(asking("a", prompt=15), asking("bb", prompt=4))
    total_s = 0.0
    while driver.scheduler.has_work():
        plan = driver.plan()
        assert plan is not None
        taken_s = 0.1
        for rows in plan.rows:
            taken_s += 1e-3 * rows.start
            taken_s += sum(0.01 + 1e-4 * (rows.start + row) * (row > 0) for row in range(len(rows.token_ids)))
        driver.scheduler.commit(plan, replace(driver.executor.run(plan), run_s=taken_s))
        total_s += taken_s
    step = next(each for each in speculated(driver).roles if each.role == "step")
    assert step.predicted_s == pytest.approx(total_s)
