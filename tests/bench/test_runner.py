"""A run answers every request once, at its concurrency, and counts only its own steps."""

import pytest

from faser.bench.prompts import BenchPrompt
from faser.bench.runner import Conditions, RunResult, run
from faser.bench.workload import bench_requests
from faser.errors import EngineError
from tests.bench.stepped_engine import ROW_S, STEP_S, SteppedEngine

PROMPTS = [BenchPrompt(category="code", token_ids=(1, 2, 3)), BenchPrompt(category="chat", token_ids=(4, 5))]


def run_requests(
    engine: SteppedEngine, *, num_requests: int = 4, concurrency: int = 2, tokens: int = 9, name: str = "a"
) -> RunResult:
    conditions = Conditions(concurrency=concurrency, temperature=1.0, output_tokens=tokens)
    return run(engine, bench_requests(PROMPTS, num_requests), conditions, name=name, now=engine.now)


def test_every_request_is_answered_in_full_and_in_order() -> None:
    engine = SteppedEngine()
    result = run_requests(engine, num_requests=5)
    assert [len(answer) for answer in result.answers] == [9] * 5
    assert [request.prompt_token_ids for request in engine.asked] == [(1, 2, 3), (4, 5)] * 2 + [(1, 2, 3)]
    assert [answer[0] for answer in result.answers] == [(7 * seed + 3 - seed % 2) % 100 for seed in range(5)]


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_the_concurrency_is_kept_while_requests_remain(concurrency: int) -> None:
    engine = SteppedEngine()
    run_requests(engine, num_requests=8, concurrency=concurrency)
    assert engine.most_running == concurrency


def test_time_counts_from_the_first_request_to_the_last_token() -> None:
    engine = SteppedEngine(now_s=50.0)
    run_requests(engine, num_requests=1, concurrency=1, name="warm")
    result = run_requests(engine, num_requests=1, concurrency=1)
    assert result.wall_s == pytest.approx(10 * STEP_S + 9 * ROW_S)
    assert result.tokens_per_s == pytest.approx(9 / result.wall_s)


def test_speed_is_measured_at_full_concurrency_only() -> None:
    """Eight answers, three at a time: the last two run alone and do not count."""
    result = run_requests(SteppedEngine(), num_requests=8, concurrency=3)
    assert result.num_tokens == 8 * 9
    assert result.window_tokens == 6 * 9
    assert result.window_s < result.wall_s
    assert result.tokens_per_s == pytest.approx(result.window_tokens / result.window_s)


def test_counters_exclude_earlier_runs() -> None:
    engine = SteppedEngine(right=2)
    engine.use_policy("fixed", 5)
    run_requests(engine, name="earlier")
    engine.use_policy("fixed", 3)
    result = run_requests(engine, num_requests=2, concurrency=2, tokens=9)
    assert (result.drafted, result.verified, result.accepted) == (18, 18, 12)
    assert result.gamma_mean == 3
    assert result.draft_counts == (6, 6, 6, 0, 0, 0, 0, 0)
    assert result.accepted_counts == (6, 6, 0, 0, 0, 0, 0, 0)


def test_each_step_has_its_time_its_gamma_and_its_duration() -> None:
    engine = SteppedEngine(right=2)
    engine.use_policy("fixed", 3)
    result = run_requests(engine, num_requests=2, concurrency=2, tokens=9)
    assert len(result.points) == result.num_steps == 4
    assert [point.gamma for point in result.points] == [0, 3, 3, 3]
    assert result.points[-1].at_s == pytest.approx(result.wall_s)
    assert result.points[1].measured_s == pytest.approx(STEP_S + 8 * ROW_S)
    assert result.points[1].predicted_s == pytest.approx(0.9 * (STEP_S + 8 * ROW_S))


def test_prompts_come_from_the_prefix_cache_unless_they_are_to_be_measured() -> None:
    engine = SteppedEngine()
    salts = []
    for include, name in ((False, "a"), (False, "b"), (True, "c"), (True, "d")):
        conditions = Conditions(concurrency=1, temperature=0.0, output_tokens=1, include_prefill=include)
        run(engine, bench_requests(PROMPTS, 1), conditions, name=name, now=engine.now)
        salts.append(engine.asked[-1].cache_salt)
    assert salts == [None, None, "c", "d"]


def test_answers_have_equal_lengths_and_different_seeds() -> None:
    engine = SteppedEngine()
    run_requests(engine, num_requests=3)
    assert [request.sampling.seed for request in engine.asked] == [0, 1, 2]
    assert all(request.sampling.ignore_eos for request in engine.asked)


def test_an_answer_that_fails_ends_the_run() -> None:
    with pytest.raises(EngineError, match="a/0 ended with error: the model"):
        run_requests(SteppedEngine(fails=True))


def test_an_engine_without_a_drafter_is_refused() -> None:
    with pytest.raises(EngineError, match="without a drafter"):
        run_requests(SteppedEngine(has_drafter=False))
