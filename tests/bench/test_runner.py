"""A run answers every job once, so many at a time, and counts what the engine did in it and nothing before it."""

import pytest

from faser.bench.runner import Conditions, Outcome, run
from faser.bench.workload import choose, jobs_of
from faser.errors import ConfigError, EngineError
from tests.bench.stepped_engine import ROW_S, STEP_S, SteppedEngine

PROMPTS = [("code", (1, 2, 3)), ("chat", (4, 5))]


def go(engine: SteppedEngine, *, jobs: int = 4, concurrency: int = 2, tokens: int = 9, name: str = "a") -> Outcome:
    conditions = Conditions(concurrency=concurrency, temperature=1.0, output_tokens=tokens)
    return run(engine, jobs_of(PROMPTS, jobs), conditions, name=name, now=engine.now)


def test_every_job_is_answered_in_full_and_in_order() -> None:
    engine = SteppedEngine()
    outcome = go(engine, jobs=5)
    assert [len(answer) for answer in outcome.answers] == [9] * 5
    assert [request.prompt_token_ids for request in engine.asked] == [(1, 2, 3), (4, 5)] * 2 + [(1, 2, 3)]
    assert [answer[0] for answer in outcome.answers] == [(7 * seed + 3 - seed % 2) % 100 for seed in range(5)]


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_no_more_run_at_a_time_than_wanted_and_no_fewer_while_there_are_jobs(concurrency: int) -> None:
    engine = SteppedEngine()
    go(engine, jobs=8, concurrency=concurrency)
    assert engine.most_running == concurrency


def test_time_is_what_the_clock_says_from_the_first_request_to_the_last_token() -> None:
    engine = SteppedEngine(now_s=50.0)
    go(engine, jobs=1, concurrency=1, name="warm")
    outcome = go(engine, jobs=1, concurrency=1)
    assert outcome.wall_s == pytest.approx(10 * STEP_S + 9 * ROW_S)
    assert outcome.tokens_per_s == pytest.approx(9 / outcome.wall_s)


def test_speed_is_that_of_the_steps_with_every_place_taken() -> None:
    """Eight answers in three places: the last two have the engine to themselves, and do not count."""
    outcome = go(SteppedEngine(), jobs=8, concurrency=3)
    assert outcome.num_tokens == 8 * 9
    assert outcome.window_tokens == 6 * 9
    assert outcome.window_s < outcome.wall_s
    assert outcome.tokens_per_s == pytest.approx(outcome.window_tokens / outcome.window_s)


def test_counters_are_of_this_run_alone() -> None:
    engine = SteppedEngine(right=2)
    engine.use_policy("fixed", 5)
    go(engine, name="earlier")
    engine.use_policy("fixed", 3)
    outcome = go(engine, jobs=2, concurrency=2, tokens=9)
    assert (outcome.drafted, outcome.verified, outcome.accepted) == (18, 18, 12)
    assert outcome.gamma_mean == 3
    assert outcome.draft_counts == (6, 6, 6, 0, 0, 0, 0, 0)
    assert outcome.accepted_counts == (6, 6, 0, 0, 0, 0, 0, 0)


def test_each_step_says_when_it_was_how_much_was_drafted_and_how_long_it_took() -> None:
    engine = SteppedEngine(right=2)
    engine.use_policy("fixed", 3)
    outcome = go(engine, jobs=2, concurrency=2, tokens=9)
    assert len(outcome.points) == outcome.num_steps == 4
    assert [point.gamma for point in outcome.points] == [0, 3, 3, 3]
    assert outcome.points[-1].at_s == pytest.approx(outcome.wall_s)
    assert outcome.points[1].measured_s == pytest.approx(STEP_S + 8 * ROW_S)
    assert outcome.points[1].predicted_s == pytest.approx(0.9 * (STEP_S + 8 * ROW_S))


def test_prompts_come_from_the_prefix_cache_unless_they_are_to_be_measured() -> None:
    engine = SteppedEngine()
    salts = []
    for include, name in ((False, "a"), (False, "b"), (True, "c"), (True, "d")):
        conditions = Conditions(concurrency=1, temperature=0.0, output_tokens=1, include_prefill=include)
        run(engine, jobs_of(PROMPTS, 1), conditions, name=name, now=engine.now)
        salts.append(engine.asked[-1].cache_salt)
    assert salts == [None, None, "c", "d"]


def test_answers_have_one_length_and_seeds_of_their_own() -> None:
    engine = SteppedEngine()
    go(engine, jobs=3)
    assert [request.sampling.seed for request in engine.asked] == [0, 1, 2]
    assert all(request.sampling.ignore_eos for request in engine.asked)


def test_an_answer_that_fails_ends_the_run() -> None:
    with pytest.raises(EngineError, match="a/0 ended with error: no"):
        go(SteppedEngine(fails=True))


def test_an_engine_without_a_drafter_is_refused() -> None:
    with pytest.raises(EngineError, match="without a drafter"):
        go(SteppedEngine(has_drafter=False))


def test_prompts_are_chosen_by_category_and_length() -> None:
    assert choose(PROMPTS, categories=["chat"], max_prompt_tokens=None) == [PROMPTS[1]]
    assert choose(PROMPTS, categories=[], max_prompt_tokens=2) == [PROMPTS[1]]
    assert choose(PROMPTS, categories=[], max_prompt_tokens=None) == PROMPTS


def test_what_leaves_no_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="'poems'; the prompts have chat, code"):
        choose(PROMPTS, categories=["poems"], max_prompt_tokens=None)
    with pytest.raises(ConfigError, match="--max-prompt-tokens is 1; the shortest prompt has 2 tokens"):
        choose(PROMPTS, categories=[], max_prompt_tokens=1)
