"""A campaign measures every cell in every round, notices changed tokens, and can be resumed."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from faser.bench.campaign import Campaign, CampaignPlan, Run
from faser.bench.policy_spec import parse_policy
from faser.bench.prompts import BenchPrompt
from faser.bench.report import load, save
from faser.errors import ConfigError
from tests.bench.stepped_engine import CAP, SteppedEngine

PROMPTS = [BenchPrompt(category="code", token_ids=(1, 2, 3)), BenchPrompt(category="chat", token_ids=(4, 5))]
CONDITIONS = {"model": "fake", "threads": 2}
ABOUT = {"command": "faser bench spec", "machine": {}, "conditions": CONDITIONS}


def plan(
    *policies: str, concurrencies: tuple[int, ...] = (1, 2), rounds: int = 2, min_s: float = 0.0
) -> CampaignPlan:
    return CampaignPlan(
        policies=tuple(parse_policy(each, cap=CAP) for each in policies or ("off", "fixed:2", "faser")),
        concurrencies=concurrencies,
        temperatures=(0.0, 1.0),
        rounds=rounds,
        output_tokens=9,
        min_s=min_s,
    )


def measure(engine: SteppedEngine, chosen: CampaignPlan, done: list[Run] | None = None) -> Campaign:
    before = list(done or [])
    campaign = Campaign(engine=engine, plan=chosen, prompts=PROMPTS, done=[*before], now=engine.now)
    assert before + list(campaign.runs(lambda _stage: None)) == campaign.done
    return campaign


def test_every_policy_is_measured_once_per_cell_and_round() -> None:
    campaign = measure(SteppedEngine(), plan())
    assert Counter(each.key for each in campaign.done) == Counter(
        {(t, c, p, r): 1 for t in (0.0, 1.0) for c in (1, 2) for p in ("off", "fixed:2", "faser") for r in (0, 1)}
    )
    assert campaign.plan.num_runs == campaign.num_done == 24


def test_each_round_begins_with_another_policy() -> None:
    engine = SteppedEngine()
    campaign = measure(engine, plan(concurrencies=(1,), rounds=3))
    order = [each.policy for each in campaign.done[:9]]
    assert order == ["off", "fixed:2", "faser", "fixed:2", "faser", "off", "faser", "off", "fixed:2"]


def test_a_run_lasts_at_least_min_s() -> None:
    engine = SteppedEngine()
    campaign = measure(engine, plan("off", concurrencies=(4,), rounds=1, min_s=2.0))
    assert all(each.wall_s >= 2.0 for each in campaign.done)
    assert all(each.num_jobs % 4 == 0 for each in campaign.done)


def test_all_policies_of_a_cell_answer_the_same_requests() -> None:
    campaign = measure(SteppedEngine(), plan(min_s=1.0))
    jobs: dict[tuple[float, int], set[tuple[int, int]]] = {}
    for each in campaign.done:
        jobs.setdefault((each.temperature, each.concurrency), set()).add((each.num_jobs, each.num_tokens))
    assert all(len(found) == 1 for found in jobs.values())


def test_equal_answers_are_no_mismatches_and_changed_ones_are() -> None:
    clean = measure(SteppedEngine(), plan())
    assert not any(each.mismatches for each in clean.done)
    spoilt = measure(SteppedEngine(wrong_policy="faser"), plan())
    assert all(each.mismatches == (each.num_jobs if each.policy == "faser" else 0) for each in spoilt.done)


def test_survival_is_the_share_of_drafts_of_that_depth() -> None:
    campaign = measure(SteppedEngine(right=2), plan("fixed:3"))
    assert campaign.done[0].survivals == (1.0, 1.0, 0.0, None, None, None, None, None)


def test_a_policy_below_drop_below_has_no_further_rounds_in_the_cell() -> None:
    chosen = replace(plan("off", "fixed:1", "fixed:2", "fixed:7", "faser", rounds=3), drop_below=0.9)
    campaign = measure(SteppedEngine(right=2), chosen)
    first = {each.key[:3]: each.tokens_per_s for each in campaign.done if each.round == 0}
    for (temperature, concurrency, policy), speed in first.items():
        best = max(found for key, found in first.items() if key[:2] == (temperature, concurrency))
        rounds = {each.round for each in campaign.done if each.key[:3] == (temperature, concurrency, policy)}
        stays = policy in ("off", "faser") or speed >= 0.9 * best
        assert rounds == ({0, 1, 2} if stays else {0})
    assert len({len([each for each in campaign.done if each.policy == policy]) for *_, policy in first}) > 1
    assert campaign.num_done == chosen.num_runs


def test_a_campaign_resumes_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    engine = SteppedEngine()
    first = Campaign(engine=engine, plan=plan(), prompts=PROMPTS, now=engine.now)
    runs = first.runs(lambda _stage: None)
    before = [next(runs) for _ in range(9)]
    save(path, ABOUT, first.done)
    again = measure(SteppedEngine(), plan(), load(path, CONDITIONS))
    assert again.done[:9] == before
    assert len({each.key for each in again.done}) == len(again.done) == 24


def test_a_resumed_cell_keeps_its_number_of_requests_on_a_slower_machine() -> None:
    engine = SteppedEngine()
    first = Campaign(engine=engine, plan=plan(min_s=2.0), prompts=PROMPTS, now=engine.now)
    before = [next(first.runs(lambda _stage: None))]
    again = measure(SteppedEngine(slowness=50.0), plan(min_s=2.0), before)
    of_cell = {each.num_jobs for each in again.done if (each.temperature, each.concurrency) == (0.0, 1)}
    assert of_cell == {before[0].num_jobs}
    assert before[0].num_jobs > 4


def test_what_is_measured_already_costs_nothing() -> None:
    done = measure(SteppedEngine(), plan()).done
    engine = SteppedEngine()
    measure(engine, plan(), done)
    assert engine.asked == []


def test_runs_outside_the_plan_do_not_count_as_progress() -> None:
    done = measure(SteppedEngine(), plan()).done
    engine = SteppedEngine()
    campaign = Campaign(engine=engine, plan=plan("off", "fixed:5"), prompts=PROMPTS, done=done, now=engine.now)
    assert campaign.num_done == 8


def test_runs_under_other_conditions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    save(path, ABOUT, [])
    with pytest.raises(ConfigError, match="was measured with threads 2; now it is 4"):
        load(path, {"model": "fake", "threads": 4})


@pytest.mark.parametrize("text", ["", "{}", '{"about": 1}', '{"about": {"conditions": {}}, "runs": [{"a": 1}]}'])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is no result of faser bench spec"):
        load(path, {})
