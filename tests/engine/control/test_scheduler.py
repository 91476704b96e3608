"""The scheduler's promises, one by one, over an executor that remembers what was written where."""

import time
from dataclasses import replace
from typing import Any

import pytest

from faser.engine.contract.plan import StepPlan, StepResult
from faser.engine.control.clock import SimulatedClock, WallClock
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.scheduler import Scheduler
from faser.engine.control.sequence import sample_seed
from faser.errors import ConfigError, RequestError
from faser.types.answer import FinishReason, PositionLogprobs, SequenceError
from faser.types.request import Request, SpeculationParams
from tests.engine.driving import EOS, Driver, Sample, expected, expected_prompt_logprobs, request, rows_by_slot
from tests.fakes import RandomPolicy, SequenceOutcome, extend, next_token, scripted_logprobs, step_result


def prompt(length: int, first: int = 100) -> list[int]:
    return list(range(first, first + length))


def generated_after(token_ids: list[int], count: int, *, seed: int = 1) -> list[int]:
    """What the scripted model generates after token_ids, to find a token to stop at."""
    alone = request("x", token_ids, max_tokens=count, seed=seed)
    return expected(alone, 0, max_model_len=10_000)[0]


def new_in_turn(token_ids: list[int]) -> list[int]:
    """Positions of tokens that have not occurred before: a stop id there stops there."""
    return [i for i, token_id in enumerate(token_ids) if token_id not in token_ids[:i]]


# Planning


def test_without_work_there_is_no_plan() -> None:
    driver = Driver()
    assert driver.plan() is None
    assert not driver.scheduler.has_work()


def test_a_request_is_computed_in_one_step_a_token() -> None:
    driver = Driver()
    mine = request("a", prompt(10), max_tokens=3)
    driver.add(mine)

    plans = driver.run()

    driver.check(mine)
    assert [[len(rows.token_ids) for rows in plan.rows] for plan in plans] == [[10], [1], [1]]
    assert [plan.rows.samples[0] for plan in plans] == [True] * 3
    assert plans[0].started[0].token_ids == mine.prompt_token_ids
    assert plans[0].started[0].seed == sample_seed(1, 0)
    assert [plan.released for plan in plans] == [(), (), ()]


def test_a_released_slot_is_announced_by_the_next_plan_that_has_rows_and_may_start_again_in_it() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(request("a", prompt(5), max_tokens=1), request("b", prompt(5), max_tokens=1))
    driver.run()

    assert [plan.released for plan in driver.executor.steps] == [(), (0,)]
    assert [[start.slot for start in plan.started] for plan in driver.executor.steps] == [[0], [0]]


def test_a_long_prompt_is_computed_in_chunks_and_samples_with_the_last() -> None:
    driver = Driver(max_num_batched_tokens=8)
    mine = request("a", prompt(21), max_tokens=2)
    driver.add(mine)

    plans = driver.run()

    driver.check(mine)
    assert [plan.num_rows for plan in plans] == [8, 8, 5, 1]
    assert [plan.rows.samples[0] for plan in plans] == [False, False, True, True]


def test_a_long_prompt_never_keeps_a_decoding_sequence_from_its_row() -> None:
    driver = Driver(max_num_batched_tokens=8, num_blocks=128, max_model_len=256)
    early = [request(f"d{i}", prompt(3, 10 * i), max_tokens=20) for i in range(3)]
    driver.add(*early)
    while any(not sample.token_ids for sample in driver.samples.values()):
        driver.step()
    long = request("long", prompt(60), max_tokens=1, at_s=-1.0, priority=-1)
    driver.add(long)

    for _ in range(10):
        plan = driver.step()
        assert sorted(rows_by_slot(plan).values()) == [1, 1, 1, 5]
        assert plan.num_rows == 8


def test_running_prompts_are_continued_before_newcomers_are_admitted() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add(request("a", prompt(12), at_s=1.0), request("b", prompt(12, 200), at_s=0.5))
    first = driver.step()
    driver.add(request("c", prompt(4, 300), at_s=0.0))
    second = driver.step()

    assert first.started[0].token_ids == tuple(prompt(12, 200))
    assert [len(rows.token_ids) for rows in second.rows] == [4, 4]
    assert second.started[0].token_ids == tuple(prompt(4, 300))


def test_no_more_sequences_run_than_there_are_slots() -> None:
    driver = Driver(max_num_seqs=2)
    requests = [request(str(i), prompt(3, 10 * i)) for i in range(5)]
    driver.add(*requests)

    plans = driver.run()

    assert max(len(plan.rows) for plan in plans) == 2
    driver.check(*requests)


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "bca"), ("priority", "cab")])
def test_newcomers_are_admitted_in_the_order_of_the_policy(policy: str, order: str) -> None:
    driver = Driver(max_num_seqs=1, policy=policy)
    driver.add(
        request("a", prompt(3), at_s=3.0, priority=0, max_tokens=1),
        request("b", prompt(4), at_s=1.0, priority=1, max_tokens=1),
        request("c", prompt(5), at_s=2.0, priority=-1, max_tokens=1),
    )

    lengths = {3: "a", 4: "b", 5: "c"}
    assert "".join(lengths[plan.started[0].prompt_len] for plan in driver.run()) == order


def test_equal_arrivals_are_served_in_the_order_they_were_added() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(*(request(str(length), prompt(length), max_tokens=1) for length in (5, 3, 4)))
    assert [plan.started[0].prompt_len for plan in driver.run()] == [5, 3, 4]


def test_no_sequence_overtakes_the_first_in_the_queue() -> None:
    """The small request would fit; the big one before it would then wait for ever in a stream of small ones."""
    driver = Driver(num_blocks=10, max_model_len=40)
    driver.add(request("running", prompt(16), max_tokens=8))
    driver.step()
    driver.add(request("big", prompt(30, 200), max_tokens=2), request("small", prompt(2, 300)))

    while driver.samples["running", 0].last is None or driver.samples["running", 0].last.finish_reason is None:
        assert len(driver.step().rows) == 1
    assert driver.step().started[0].prompt_len == 30


# Blocks


def test_a_lone_request_may_fill_the_whole_pool() -> None:
    driver = Driver(num_blocks=5, max_model_len=21, max_num_batched_tokens=8)
    mine = request("a", prompt(19), max_tokens=2)
    driver.add(mine)
    driver.run()
    driver.check(mine)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_sequences_come_to_the_tokens_of_an_unhurried_run(prefix_caching: bool) -> None:
    driver = Driver(num_blocks=12, max_model_len=48, prefix_caching=prefix_caching)
    requests = [request(str(i), prompt(5, 20 * i), max_tokens=24, at_s=i) for i in range(4)]
    driver.add(*requests)

    driver.run()

    driver.check(*requests)
    assert driver.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "b"), ("priority", "a")])
def test_the_worst_running_sequence_gives_its_blocks_to_the_better_one(policy: str, victim: str) -> None:
    driver = Driver(num_blocks=6, max_model_len=24, policy=policy)
    a = request("a", prompt(7), at_s=1.0, priority=5, max_tokens=16)
    b = request("b", prompt(7, 50), at_s=2.0, priority=0, max_tokens=16)
    driver.add(a, b)

    driver.run()

    driver.check(a, b)
    restarted = driver.executor.steps[-1].rows.slots[0]
    last_start = next(
        start for plan in reversed(driver.executor.steps) for start in plan.started if start.slot == restarted
    )
    assert last_start.token_ids[0] == {"a": 100, "b": 50}[victim]
    assert len(last_start.token_ids) > 7
    assert last_start.prompt_len == 7
    assert driver.scheduler.stats().num_preemptions == 1


def test_a_preempted_sequence_gets_no_rows_in_that_plan_even_if_it_could_share_a_twins_blocks() -> None:
    """Twins compute the same prompt side by side; the preempted one would need almost no blocks of its own."""
    driver = Driver(num_blocks=7, max_model_len=28)
    twins = [request(name, prompt(8), max_tokens=20) for name in "ab"]
    driver.add(*twins)
    while driver.scheduler.stats().num_preemptions == 0:
        plan = driver.step()
    assert (len(plan.rows), plan.released, plan.started) == (1, (1,), ())

    driver.run()
    driver.check(*twins)


def test_a_decoding_sequence_that_had_its_row_is_preempted_by_a_better_prompt() -> None:
    """Two rows a step: the prompt gets one, so the decoding sequence outgrows the blocks left for it."""
    driver = Driver(num_blocks=9, max_model_len=36, max_num_batched_tokens=2, max_num_seqs=2, policy="priority")
    worse = request("worse", prompt(1), max_tokens=28, priority=1)
    better = request("better", prompt(24, 50), max_tokens=2)
    driver.add(worse)
    driver.step()
    driver.add(better)

    while driver.scheduler.stats().num_preemptions == 0:
        plan = driver.step()

    assert len(driver.executor.steps[-2].rows) == 2
    assert [rows.token_ids[0] // 50 for rows in plan.rows] == [1]
    driver.run()
    driver.check(worse, better)


def test_the_worst_sequence_pauses_instead_of_giving_up_its_own_blocks() -> None:
    driver = Driver(num_blocks=5, max_model_len=20)
    a, b = request("a", prompt(8), max_tokens=4), request("b", prompt(7, 50), max_tokens=4)
    driver.add(a, b)

    plans = driver.run()

    driver.check(a, b)
    assert [len(plan.rows) for plan in plans] == [2, 2, 1, 1, 1, 1]
    assert driver.scheduler.stats().num_preemptions == 0


def test_a_newcomer_waits_while_the_running_ones_will_soon_want_the_blocks() -> None:
    driver = Driver(num_blocks=5, max_model_len=20)
    first, newcomer = request("a", prompt(8), max_tokens=8), request("b", prompt(12, 50), max_tokens=2)
    driver.add(first, newcomer)

    driver.run()

    driver.check(first, newcomer)
    assert driver.scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize(
    ("length", "sampling", "param"),
    [
        (0, {"max_tokens": 1}, "prompt"),
        (60, {"max_tokens": 5}, "max_tokens"),
        (64, {"max_tokens": None}, "min_tokens"),
        (60, {"max_tokens": None, "min_tokens": 5}, "min_tokens"),
        (65, {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_request_beyond_the_context_is_refused(length: int, sampling: dict[str, Any], param: str) -> None:
    driver = Driver()
    with pytest.raises(RequestError) as refusal:
        driver.add(request("a", prompt(length), **sampling))
    assert refusal.value.param == param
    assert not driver.scheduler.has_work()


def test_a_request_beyond_the_kv_pool_is_refused_with_both_numbers() -> None:
    driver = Driver(num_blocks=4)
    driver.add(request("a", prompt(12), max_tokens=5))
    with pytest.raises(RequestError, match=r"12 tokens and at least 6 more.*room for 16 tokens"):
        driver.add(request("b", prompt(12), max_tokens=6))
    driver.run()


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    driver = Driver()
    driver.add(request("a", prompt(3)))
    with pytest.raises(RequestError, match="in use"):
        driver.add(request("a", prompt(3)))
    driver.run()
    driver.add(request("a", prompt(3)))
    driver.run()


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens is 8 and max_num_seqs is 9"),
        ({"policy": "lottery"}, "'lottery'"),
    ],
)
def test_limits_that_cannot_work_are_refused(limits: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Driver(**limits)  # type: ignore[arg-type]


# Prefixes and samples


def test_a_repeated_prompt_computes_only_its_tail_and_reports_the_rest_as_cached() -> None:
    driver = Driver()
    first, second = (request(name, prompt(12), max_tokens=2) for name in "ab")
    driver.add(first)
    driver.run()
    driver.add(second)
    plans = driver.run()

    driver.check(first, second)
    assert (plans[0].rows.starts[0], plans[0].num_rows) == (8, 4)
    last = driver.samples["b", 0].last
    assert last is not None
    assert last.num_cached_tokens == 8
    stats = driver.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.prompt_tokens) == (24, 8, 24)


def test_a_continued_conversation_finds_generated_tokens_too() -> None:
    driver = Driver()
    driver.add(request("a", prompt(6), max_tokens=7))
    driver.run()
    said = driver.samples["a", 0].token_ids
    follow_up = request("b", [*prompt(6), *said, 1, 2])
    driver.add(follow_up)
    driver.run()

    driver.check(follow_up)
    last = driver.samples["b", 0].last
    assert last is not None
    assert last.num_cached_tokens == 12  # of 13 known tokens the last was never computed


def test_requests_with_different_salts_share_nothing() -> None:
    driver = Driver()
    for name, salt in [("a", "x"), ("b", "y"), ("c", None), ("d", "x")]:
        driver.add(replace(request(name, prompt(12)), cache_salt=salt))
        driver.run()
    cached = [driver.samples[name, 0].last for name in "abcd"]
    assert [last.num_cached_tokens for last in cached if last is not None] == [0, 0, 0, 8]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_samples_wait_for_the_first_one_and_then_share_its_prompt(prefix_caching: bool) -> None:
    driver = Driver(max_num_batched_tokens=8, prefix_caching=prefix_caching)
    mine = request("a", prompt(19), n=3, max_tokens=5)
    driver.add(mine)

    plans = driver.run()

    driver.check(mine)
    assert [len(plan.rows) for plan in plans[:4]] == [1, 1, 1, 3]
    assert sorted(rows_by_slot(plans[3]).values()) == [1, 3, 3]
    assert len({tuple(sample.token_ids) for sample in driver.samples.values()}) == 3
    assert driver.scheduler.stats().prompt_tokens == 19


def test_a_prompt_of_whole_blocks_is_recomputed_by_one_block_in_a_sample() -> None:
    driver = Driver(prefix_caching=False)
    driver.add(request("a", prompt(8), n=2))
    driver.step()
    assert sorted(rows_by_slot(driver.step()).values()) == [1, 4]


def test_others_are_admitted_while_samples_wait_for_the_first() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add(request("a", prompt(6), n=3), request("b", prompt(2, 50)))
    assert [start.prompt_len for start in driver.step().started] == [6, 2]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("moment", [0, 1, 2, 3])
def test_samples_go_on_without_the_first(moment: int, prefix_caching: bool) -> None:
    driver = Driver(max_num_batched_tokens=8, prefix_caching=prefix_caching)
    mine = request("a", prompt(19), n=3)
    driver.add(mine)
    for _ in range(moment):
        driver.step()
    driver.abort("a", 0)
    driver.run()

    for index in (1, 2):
        assert driver.samples["a", index].ending == expected(mine, index, max_model_len=64)


def test_samples_of_one_token_each_all_come() -> None:
    driver = Driver(prefix_caching=False)
    mine = request("a", prompt(9), n=3, max_tokens=1)
    driver.add(mine)
    driver.run()
    driver.check(mine)


def test_equal_seeds_give_equal_samples_and_no_seed_draws_another_each_time() -> None:
    driver = Driver()
    driver.add(
        *(request(name, prompt(5), seed=seed, n=2) for name, seed in zip("abcd", [3, 3, None, None], strict=True))
    )
    driver.run()
    said = {key: tuple(sample.token_ids) for key, sample in driver.samples.items()}

    assert said["a", 0] == said["b", 0] != said["a", 1] == said["b", 1]
    assert len({said[name, index] for name in "cd" for index in (0, 1)}) == 4


def test_a_sample_seed_is_a_fixed_function_of_seed_and_index() -> None:
    seeds = {sample_seed(seed, index) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for index in range(128)}
    assert len(seeds) == 5 * 128
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, 0) == 2502747115357309867  # in every process and on every machine


# Endings


def test_end_of_sequence_stops_without_a_stop_reason_unless_ignored() -> None:
    length = next(n for n in range(1, 500) if EOS in generated_after(prompt(n), 6)[1:])
    driver = Driver(max_model_len=600, num_blocks=300)
    stops, goes_on = (request(str(flag), prompt(length), ignore_eos=flag, max_tokens=6) for flag in (False, True))
    driver.add(stops, goes_on)
    driver.run()

    driver.check(stops, goes_on)
    assert driver.samples["False", 0].ending[1:] == (FinishReason.STOP, None)
    assert driver.samples["False", 0].token_ids[-1] == EOS
    assert driver.samples["True", 0].ending[1] is FinishReason.LENGTH


@pytest.mark.parametrize("min_tokens", [0, 2, 3])
def test_a_stop_id_ends_the_sample_and_is_its_reason_from_min_tokens_on(min_tokens: int) -> None:
    said = generated_after(prompt(5), 8)
    at = new_in_turn(said)[2]
    driver = Driver()
    mine = request("a", prompt(5), stop_token_ids=(said[at],), max_tokens=8, min_tokens=min_tokens)
    driver.add(mine)
    driver.run()

    driver.check(mine)
    if min_tokens <= at:
        assert driver.samples["a", 0].ending == (said[: at + 1], FinishReason.STOP, said[at])


@pytest.mark.parametrize(("max_tokens", "count"), [(1, 1), (5, 5), (None, 11)])
def test_length_ends_a_sample_at_max_tokens_or_at_the_context(max_tokens: int | None, count: int) -> None:
    driver = Driver(max_model_len=16)
    mine = request("a", prompt(5), max_tokens=max_tokens)
    driver.add(mine)
    driver.run()

    driver.check(mine)
    assert len(driver.samples["a", 0].token_ids) == count


def test_without_max_tokens_a_pool_smaller_than_the_context_ends_the_sample() -> None:
    driver = Driver(num_blocks=4, max_model_len=64)
    driver.add(request("a", prompt(5), max_tokens=None))
    driver.run()
    assert len(driver.samples["a", 0].token_ids) == 16 + 1 - 5
    assert driver.samples["a", 0].ending[1] is FinishReason.LENGTH


@pytest.mark.parametrize("n", [1, 3])
def test_no_tokens_scores_the_prompt_and_samples_nothing(n: int) -> None:
    driver = Driver(max_num_batched_tokens=8)
    mine = request("a", prompt(13), max_tokens=0, prompt_logprobs=1, n=n)
    driver.add(mine)
    plans = driver.run()

    driver.check(mine)
    assert not any(rows.samples for plan in plans for rows in plan.rows)
    assert driver.samples["a", 0].prompt_logprobs == expected_prompt_logprobs(mine)


@pytest.mark.parametrize("length", [1, 4, 8, 9, 21])
def test_prompt_scores_come_whole_though_the_prompt_is_cached_and_chunked(length: int) -> None:
    driver = Driver(max_num_batched_tokens=8)
    plain, scored = request("a", prompt(length)), request("b", prompt(length), prompt_logprobs=0, n=2)
    driver.add(plain)
    driver.run()
    driver.add(scored)
    driver.run()

    driver.check(plain, scored)
    assert driver.samples["b", 0].prompt_logprobs == expected_prompt_logprobs(scored)
    assert driver.samples["b", 1].prompt_logprobs is None
    first = driver.samples["b", 0].last
    assert first is not None
    assert first.num_cached_tokens == 0


def test_prompt_scores_survive_a_preemption_in_the_middle_of_the_prompt() -> None:
    driver = Driver(num_blocks=9, max_model_len=36, max_num_batched_tokens=2, max_num_seqs=2)
    grows = request("a", prompt(4), max_tokens=30)
    scored = request("b", prompt(24, 50), max_tokens=2, prompt_logprobs=0)
    driver.add(grows, scored)

    driver.run()

    driver.check(grows, scored)
    assert driver.samples["b", 0].prompt_logprobs == expected_prompt_logprobs(scored)
    assert driver.scheduler.stats().num_preemptions > 0


def test_logprobs_come_with_their_tokens() -> None:
    driver = Driver()
    mine = request("a", prompt(5), logprobs=0, max_tokens=6)
    driver.add(mine)
    driver.run()

    history = 0
    for token_id in mine.prompt_token_ids:
        history = extend(history, token_id)
    for token_id, scores in zip(driver.samples["a", 0].token_ids, driver.samples["a", 0].logprobs, strict=True):
        assert token_id == next_token(history, sample_seed(1, 0))
        assert scores == scripted_logprobs(history, token_id)
        history = extend(history, token_id)


def answered(plan: StepPlan, *token_ids: int, logprobs: bool = False) -> StepResult:
    """A result with these tokens for the plan's only sequence."""
    scores = tuple(PositionLogprobs(token_id=each, logprob=-1.0, rank=1, top=()) for each in token_ids)
    outcome = SequenceOutcome(token_ids=token_ids, logprobs=scores if logprobs else None)
    return step_result(plan.step, outcome, run_s=0.0)


def test_tokens_after_the_one_that_ends_a_sample_are_dropped_with_their_logprobs() -> None:
    driver = Driver()
    driver.add(request("a", prompt(5), stop_token_ids=(42,), max_tokens=9, logprobs=0))
    plan = driver.plan()
    assert plan is not None

    (delta,) = driver.scheduler.commit(plan, answered(plan, 1, 42, 3, 4, logprobs=True))

    assert delta.token_ids == (1, 42)
    assert delta.logprobs is not None
    assert [each.token_id for each in delta.logprobs] == [1, 42]
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, 42)
    assert driver.scheduler.stats().generation_tokens == 2


def test_several_tokens_at_once_end_at_max_tokens() -> None:
    driver = Driver()
    driver.add(request("a", prompt(5), max_tokens=2))
    plan = driver.plan()
    assert plan is not None
    (delta,) = driver.scheduler.commit(plan, answered(plan, 1, 2, 3))
    assert (delta.token_ids, delta.finish_reason) == ((1, 2), FinishReason.LENGTH)


def test_a_step_that_yields_no_token_is_repeated_from_the_last_one() -> None:
    driver = Driver()
    driver.add(request("a", prompt(8), max_tokens=2))
    first = driver.plan()
    assert first is not None
    assert not driver.scheduler.commit(first, answered(first))
    driver.scheduler.check_invariants()

    second = driver.plan()

    assert second is not None
    assert (second.rows.starts, second.rows.token_ids, second.rows.samples) == ([7], [107], [True])


@pytest.mark.parametrize("policy_seed", [2, 4])
def test_several_tokens_a_step_come_to_the_same_answer(policy_seed: int) -> None:
    driver = Driver(speculates=RandomPolicy(policy_seed), num_blocks=20)
    requests = [request(str(i), prompt(5, 30 * i), max_tokens=20, n=2) for i in range(3)]
    driver.add(*requests)
    driver.run()
    driver.check(*requests)


@pytest.mark.parametrize("policy_seed", range(10, 16))
def test_blocks_that_drafts_have_left_over_are_not_promised_to_newcomers(policy_seed: int) -> None:
    """Drafts are longer than a block, so that a sequence may hold more blocks than it soon wants."""
    driver = Driver(speculates=RandomPolicy(policy_seed), num_blocks=18, max_model_len=48)
    requests = [request(str(i), prompt(5 + i % 5 * 3, 30 * i), max_tokens=20) for i in range(10)]
    for each in requests[:5]:
        driver.add(each)
    for each in requests[5:]:
        driver.add(each)
        driver.step()
    driver.run()
    driver.check(*requests)


def test_an_error_ends_its_sequence_and_no_other() -> None:
    driver = Driver()
    bad, good = request("bad", prompt(5)), request("good", prompt(5, 50))
    driver.add(bad, good)
    driver.step()
    driver.executor.fail_slots.add(0)
    driver.run()

    driver.check(good)
    last = driver.samples["bad", 0].last
    assert last is not None
    assert (last.finish_reason, last.error, last.token_ids) == (FinishReason.ERROR, SequenceError.NOT_FINITE, ())


def failing_at(moment: int, whole: Request) -> Sample:
    """What is said of the request if that step of it fails, which may have drafts."""
    driver = Driver(speculates=RandomPolicy(4))
    driver.add(whole)
    for _ in range(moment):
        driver.step()
    driver.executor.fail_slots.add(0)
    driver.run()
    return driver.samples[whole.request_id, 0]


def test_tokens_accepted_before_an_error_come_with_it() -> None:
    whole = request("a", prompt(5), max_tokens=30, logprobs=1)
    whole = replace(whole, speculation=SpeculationParams(trace=True))
    tokens, _, _ = expected(whole, 0, max_model_len=64)
    accepted = []
    for moment in range(1, 12):
        sample = failing_at(moment, whole)
        last = sample.last
        assert last is not None
        assert (last.finish_reason, last.error) == (FinishReason.ERROR, SequenceError.NOT_FINITE)
        assert sample.token_ids == tokens[: len(sample.token_ids)]
        assert len(sample.logprobs) == len(sample.token_ids)
        assert (0 if last.trace is None else last.trace.accepted) == len(last.token_ids)
        accepted.append(len(last.token_ids))
    assert max(accepted) > 1, "no step that failed had accepted drafts"


def test_an_accepted_token_that_ends_the_answer_hides_the_error_behind_it() -> None:
    whole = request("a", prompt(5), max_tokens=30)
    num_ended = 0
    for moment in range(1, 12):
        failed = failing_at(moment, whole)
        assert failed.last is not None
        stopping = request("a", prompt(5), max_tokens=30, stop_token_ids=(failed.token_ids[-1],))
        ending = expected(stopping, 0, max_model_len=64)
        if failed.last.token_ids and len(ending[0]) == len(failed.token_ids):
            ended = failing_at(moment, stopping)
            assert ended.ending == ending
            assert ended.last is not None
            assert ended.last.error is None
            num_ended += 1
    assert num_ended > 0, "no step that failed had accepted a new token"


def test_a_prompt_that_fails_at_once_is_not_shared() -> None:
    driver = Driver()
    driver.add(request("a", prompt(17)))
    driver.executor.fail_slots.add(0)
    driver.run()
    again = request("b", prompt(17))
    driver.add(again)
    driver.run()
    driver.check(again)
    assert driver.scheduler.stats().prefix_cache_hits == 0


def test_an_error_of_the_first_sample_lets_the_others_go_on() -> None:
    driver = Driver()
    mine = request("a", prompt(5), n=2)
    driver.add(mine)
    driver.executor.fail_slots.add(0)
    driver.run()
    assert driver.samples["a", 1].ending == expected(mine, 1, max_model_len=64)


# Aborts


@pytest.mark.parametrize("moment", range(6))
def test_an_abort_between_steps_frees_everything(moment: int) -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add(request("a", prompt(19), n=2), request("b", prompt(4, 50), max_tokens=9))
    for _ in range(moment):
        driver.step()
    driver.abort("a")
    driver.abort("a")
    driver.run()
    assert driver.samples["b", 0].ending[1] is FinishReason.LENGTH


@pytest.mark.parametrize("moment", range(5))
def test_an_abort_while_a_step_runs_frees_everything_once_it_is_committed(moment: int) -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add(request("a", prompt(19), n=2))
    for _ in range(moment):
        driver.step()
    plan = driver.plan()
    assert plan is not None
    driver.abort("a")
    assert driver.scheduler.stats().kv_usage > 0

    assert driver.commit(plan) == []

    assert driver.scheduler.stats().kv_usage == 0
    assert driver.plan() is None


def test_blocks_of_an_aborted_sequence_are_closed_while_its_step_runs() -> None:
    driver = Driver(num_blocks=4, max_model_len=16)
    driver.add(request("a", prompt(14), max_tokens=2))
    plan = driver.plan()
    assert plan is not None
    driver.abort("a")
    assert driver.scheduler.stats().kv_usage == 1.0
    driver.commit(plan)
    assert driver.scheduler.stats().kv_usage == 0.0


def test_an_id_may_come_again_while_the_step_of_its_aborted_namesake_runs() -> None:
    driver = Driver()
    driver.add(request("a", prompt(5)))
    plan = driver.plan()
    assert plan is not None
    driver.abort("a")
    again = request("a", prompt(6, 50))
    driver.add(again)

    assert driver.commit(plan) == []
    driver.run()
    driver.check(again)


def test_unknown_ids_may_be_aborted() -> None:
    driver = Driver()
    mine = request("a", prompt(3))
    driver.abort("unknown")
    driver.add(mine)
    driver.abort("a", 5)
    driver.run()
    driver.check(mine)


# Books


def test_plans_and_commits_alternate() -> None:
    driver = Driver()
    driver.add(request("a", prompt(3)))
    plan = driver.plan()
    assert plan is not None
    with pytest.raises(AssertionError, match="has not been committed"):
        driver.scheduler.plan()
    with pytest.raises(AssertionError, match="is not step"):
        driver.scheduler.commit(plan, replace(driver.executor.run(plan), step=9))
    with pytest.raises(AssertionError, match="0 answers for 1 sequences"):
        driver.scheduler.commit(plan, step_result(plan.step, run_s=0.0))


def test_stats_count_sequences_and_tokens() -> None:
    driver = Driver(max_num_seqs=2)
    driver.add(request("a", prompt(5), n=2), request("b", prompt(4), max_tokens=2), request("c", prompt(4)))
    assert (driver.scheduler.stats().num_running, driver.scheduler.stats().num_waiting) == (0, 4)
    driver.step()
    assert (driver.scheduler.stats().num_running, driver.scheduler.stats().num_waiting) == (2, 2)
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.num_running, stats.num_waiting) == (13, 14, 0, 0)


def test_the_first_admission_is_timed_and_a_second_one_is_not() -> None:
    driver = Driver(num_blocks=6, max_model_len=24)
    driver.add(request("a", prompt(7), max_tokens=16), request("b", prompt(7, 50), max_tokens=16))
    while driver.scheduler.has_work():
        driver.step()
        driver.clock.advance(1.0)
    assert driver.scheduler.stats().num_preemptions == 1
    assert [sample.last.first_scheduled_s for sample in driver.samples.values() if sample.last] == [100.0, 100.0]


def test_clocks_do_not_go_back() -> None:
    wall = WallClock()
    assert wall.now() <= wall.now()
    clock = SimulatedClock()
    clock.advance(1.5)
    assert clock.now() == 1.5
    with pytest.raises(AssertionError, match="cannot go back"):
        clock.advance(-1.0)


def test_planning_and_committing_64_decoding_sequences_costs_well_under_a_step() -> None:
    """Half a millisecond is the aim. Time of this thread on a core, which other programs do not lengthen."""
    scheduler = Scheduler(
        kv=KvManager(4096, 16),
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        max_model_len=2048,
        eos_token_ids=(EOS,),
        clock=WallClock(),
    )
    for i in range(64):
        scheduler.add(request(str(i), prompt(40, i), max_tokens=500))
    spent_s = []
    for _ in range(100):
        began_s = time.thread_time()
        plan = scheduler.plan()
        planned_s = time.thread_time() - began_s
        assert plan is not None
        count = len(plan.rows)
        result = StepResult(step=plan.step, counts=[1] * count, token_ids=[11] * count, run_s=0.0)
        began_s = time.thread_time()
        scheduler.commit(plan, result)
        spent_s.append(planned_s + time.thread_time() - began_s)
    assert sorted(spent_s)[10] < 0.002, f"{1000 * sorted(spent_s)[50]:.2f} ms in the median"
