"""All arms of a repeat serve the same arrivals, in the order drawn for it; what is counted is the arm's own."""

import pytest

from benchmarks.ablation.campaign import Bearing, Campaign, Wanted
from benchmarks.ablation.drive import ARMS, orders
from benchmarks.ablation.report import Run
from tests.benchmarks.ablation.loaded_engine import STEP_S, LoadedEngine

TRACE = [(0.7 * i + 0.3 * (i % 5), 10, 3 + 7 * i % 11) for i in range(400)]
PROMPTS = [(1, 2), (3,), (4, 5, 6)]
BEARING = Bearing(tokens_per_s=20.0, tpot_s=STEP_S)
COUNT = round(20.0 * 10 / (sum(min(length, 9) for _, _, length in TRACE) / len(TRACE)))


def campaign_of(engine: LoadedEngine, *, repeats: int = 2, loads: tuple[float, ...] = (1.0,)) -> Campaign:
    wanted = Wanted(arms=ARMS, seconds=10.0, repeats=repeats, loads=loads, max_tokens=9, clients=4, warm_s=3.0)
    return Campaign(
        engine=engine,
        wanted=wanted,
        trace=TRACE,
        prompts=PROMPTS,
        clock=engine.clock,
    )


def runs_of(campaign: Campaign) -> list[Run]:
    return list(campaign.runs(BEARING, lambda _stage: None))


def test_arms_take_turns_as_drawn_and_every_run_is_there() -> None:
    campaign = campaign_of(LoadedEngine(), repeats=3, loads=(0.5, 1.0))
    found = runs_of(campaign)
    assert len(found) == campaign.wanted.num_runs == 24
    drawn = [arm.name for order in orders(ARMS, 3, seed=1) for arm in order]
    assert [run.arm for run in found] == drawn * 2
    assert [run.repeat for run in found] == [repeat for repeat in range(3) for _ in ARMS] * 2


def test_every_arm_has_its_turn_once_in_every_repeat_and_none_always_comes_first() -> None:
    found = orders(ARMS, 40, seed=3)
    assert all(sorted(arm.name for arm in order) == sorted(arm.name for arm in ARMS) for order in found)
    for arm in ARMS:
        places = [order.index(arm) for order in found]
        assert len(set(places)) == len(ARMS)
        assert len({order[place - 1].name for order, place in zip(found, places, strict=True) if place}) > 2


def test_arms_of_a_repeat_get_the_same_requests_and_repeats_get_others() -> None:
    engine = LoadedEngine()
    runs_of(campaign_of(engine))
    asked: dict[str, list[tuple[object, ...]]] = {}
    for _, request in engine.asked:
        run = request.request_id.rpartition("/")[0]
        sampling = request.sampling
        asked.setdefault(run, []).append((request.prompt_token_ids, sampling.max_tokens, sampling.seed))
    first = [each for run, each in asked.items() if run.startswith("1/0/")]
    second = [each for run, each in asked.items() if run.startswith("1/1/")]
    assert len(first) == len(second) == len(ARMS)
    assert all(each == first[0] and len(each) == COUNT for each in first)
    assert all(each == second[0] for each in second)
    assert first[0] != second[0]


def test_the_engine_is_told_what_an_arm_is_and_forgets_nothing() -> None:
    engine = LoadedEngine()
    found = runs_of(campaign_of(engine, repeats=1))
    by_name = {arm.name: arm for arm in ARMS}
    expected = [by_name[run.arm] for run in found]
    assert engine.switches == [(arm.policy, arm.gamma, False, arm.overlap) for arm in expected]


def test_what_was_drafted_ahead_is_counted_for_the_arm_that_did_it() -> None:
    found = {run.arm: run for run in runs_of(campaign_of(LoadedEngine(), repeats=1))}
    for arm in ARMS:
        run = found[arm.name]
        assert run.ahead_steps == (run.cell.num_steps if arm.overlap == "auto" else 0)


def test_answers_unlike_those_of_the_first_arm_are_counted() -> None:
    found = runs_of(campaign_of(LoadedEngine(wrong_policy="faser"), repeats=1))
    right = {run.arm for run in found} - {"+lengths", "+overlap"}
    first = found[0].arm
    assert sum(run.different for run in found) == COUNT * (len(right) if first not in right else 2)
    assert not any(run.different for run in runs_of(campaign_of(LoadedEngine())))


def test_latencies_are_kept_by_request_and_agree_with_the_summary() -> None:
    for run in runs_of(campaign_of(LoadedEngine(), repeats=1)):
        assert len(run.latencies_s) == COUNT == run.cell.num_requests
        assert 1000 * sum(run.latencies_s) / COUNT == pytest.approx(run.cell.e2e.mean_ms)
        assert 1000 * sum(run.tpots_s) / len(run.tpots_s) == pytest.approx(run.cell.tpot.mean_ms)


def test_capacity_and_target_are_measured_with_nobody_drafting() -> None:
    engine = LoadedEngine()
    found = campaign_of(engine).bearing()
    assert found.tokens_per_s == pytest.approx(4 / STEP_S)
    assert found.tpot_s == pytest.approx(STEP_S)
    assert found.slo.tpot_ms == pytest.approx(2000 * STEP_S)
    assert {switch[0] for switch in engine.switches} == {"off"}


def test_every_arm_warms_up() -> None:
    engine = LoadedEngine()
    campaign_of(engine).warm(lambda _stage: None)
    assert [switch[0] for switch in engine.switches] == [arm.policy for arm in ARMS]
    assert engine.now_s > 3.0 * len(ARMS)
