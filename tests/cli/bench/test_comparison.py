"""Drafters in turn under one load: what is asked, what is timed, and what counts as a different answer."""

from collections import Counter
from typing import cast

import pytest

from faser.cli.bench.comparison import Arm, Comparison, Load, Measured, Policy
from faser.cli.bench.prompts import BenchPrompt
from faser.engine.engine import Engine
from faser.errors import EngineError
from tests.cli.stepped_engine import ROW_S, STEP_S, SteppedEngine

PROMPTS = [BenchPrompt(category="code", token_ids=(1, 2, 3)), BenchPrompt(category="chat", token_ids=(4, 5))]
FASER, FIXED = Policy(text="faser", name="faser"), Policy(text="fixed:2", name="fixed", gamma=2)


class Engines:
    """An engine that never drafts and one for each policy; one clock for all, of which one runs at a time."""

    def __init__(self, *policies: Policy, rounds: int = 2, min_s: float = 0.0, **options: object) -> None:
        self.off = SteppedEngine(has_drafter=False)
        self.drafting = {each.text: SteppedEngine(**options) for each in policies}  # type: ignore[arg-type]
        self.told: list[dict[tuple[int, tuple[int, ...]], tuple[int, ...]]] = []
        self.order: list[str] = []
        arms = [Arm(name="off", engine=cast(Engine, self.off))]
        arms += [
            Arm(
                name=each.text,
                engine=cast(Engine, self.drafting[each.text]),
                policy=each,
                expect=lambda answers: self.told.append(dict(answers)),
            )
            for each in policies
        ]
        self.comparison = Comparison(
            arms=arms,
            prompts=PROMPTS,
            output_tokens=9,
            rounds=rounds,
            ignore_eos=True,
            now=lambda: self.off.now_s + sum(each.now_s for each in self.drafting.values()),
            min_s=min_s,
        )

    def measure(self, concurrency: int = 2, temperature: float = 0.0) -> list[Measured]:
        return self.comparison.under(Load(temperature=temperature, concurrency=concurrency), self.order.append)


def test_every_arm_is_measured_in_every_round_and_off_is_the_first() -> None:
    found = Engines(FIXED, FASER, rounds=3).measure()
    assert [(each.arm, len(each.runs), len(each.off)) for each in found] == [
        ("off", 3, 3),
        ("fixed:2", 3, 3),
        ("faser", 3, 3),
    ]


def test_arms_learn_before_the_rounds_and_each_round_begins_with_another_one() -> None:
    engines = Engines(FIXED, FASER, rounds=2)
    engines.measure()
    load = "2 at once, temperature 0"
    assert engines.order == [
        f"{load}: off",
        f"{load}: fixed:2, learning",
        f"{load}: faser, learning",
        *(f"{load}: {name}, round 1" for name in ("off", "fixed:2", "faser")),
        *(f"{load}: {name}, round 2" for name in ("fixed:2", "faser", "off")),
    ]
    assert len(engines.order) == engines.comparison.runs_per_load


def test_what_earlier_processes_learned_is_forgotten_and_what_this_one_learns_is_kept() -> None:
    engines = Engines(FASER)
    for concurrency in (1, 2):
        engines.measure(concurrency)
    assert engines.drafting["faser"].times_forgotten == 1


def test_a_run_lasts_at_least_min_s_and_has_twice_as_many_requests_as_run_at_once() -> None:
    (off,) = Engines(min_s=2.0).measure(4)
    assert all(each.seconds >= 2.0 and len(each.answers) % 4 == 0 for each in off.runs)
    (short,) = Engines().measure(5)
    assert len(short.runs[0].answers) == 10


def test_all_arms_answer_the_same_requests() -> None:
    engines = Engines(FIXED, FASER)
    count = len(engines.measure(2, 0.8)[0].runs[0].answers)
    asked = Counter(
        (each.prompt_token_ids, each.sampling.seed, each.sampling.temperature)
        for engine in (engines.off, *engines.drafting.values())
        for each in engine.asked
    )
    assert asked == {(PROMPTS[seed % 2].token_ids, seed, 0.8): 9 for seed in range(count)}


def test_every_run_reads_its_prompts_and_knows_no_earlier_answers() -> None:
    engines = Engines(FASER)
    engines.measure(2)
    for engine in (engines.off, engines.drafting["faser"]):
        runs = [each.request_id.partition("/")[0] for each in engine.asked]
        assert [each.cache_salt for each in engine.asked] == runs
        assert len(set(runs)) == 3


def test_answers_end_where_the_model_ends_them_unless_asked() -> None:
    engines = Engines(FASER)
    engines.comparison.ignore_eos = False
    engines.measure()
    assert not any(each.sampling.ignore_eos for each in engines.off.asked)


def test_drafters_of_given_acceptance_are_told_the_answers_of_off() -> None:
    engines = Engines(FASER)
    off, _ = engines.measure()
    assert engines.told == [
        {
            (seed, PROMPTS[seed % 2].token_ids): tuple(answer.token_ids)
            for seed, answer in enumerate(off.runs[0].answers)
        }
    ]


def test_equal_answers_do_not_differ_and_a_changed_token_does() -> None:
    assert not any(each.differing for each in Engines(FIXED, FASER).measure())
    off, spoilt = Engines(FASER, wrong_policy="faser").measure()
    assert (off.differing, spoilt.differing) == (0, spoilt.num_answers)
    assert off.runs[0].answers_hash != spoilt.runs[0].answers_hash


def test_answers_of_other_lengths_have_another_hash() -> None:
    one, other = (Engines(FASER).measure()[0].runs[0] for _ in range(2))
    assert one.answers_hash == other.answers_hash
    other.answers[1].token_ids.insert(0, other.answers[0].token_ids.pop())
    assert one.answers_hash != other.answers_hash


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_the_concurrency_is_kept_while_requests_remain(concurrency: int) -> None:
    engines = Engines()
    engines.measure(concurrency)
    assert engines.off.most_running == concurrency


def test_reading_the_prompts_counts_for_the_whole_and_not_for_decoding() -> None:
    """One at a time: a step reads the prompt, nine decode, of which the first begins the answer."""
    (off,) = Engines().measure(1)
    run, count = off.runs[0], len(off.runs[0].answers)
    prompts_s = count * STEP_S + 5 * ROW_S  # each of the two is read once in a run
    assert run.tokens == 9 * count
    assert run.seconds == pytest.approx(prompts_s + 9 * count * (STEP_S + ROW_S))
    assert run.decode_per_s == pytest.approx(1 / (STEP_S + ROW_S))


def test_rates_are_over_those_of_off_in_the_same_rounds() -> None:
    _, fixed = Engines(FIXED, right=2).measure(1)
    step_s = (STEP_S + 3 * ROW_S) / (STEP_S + ROW_S)
    # Three steps of three tokens: the first ones begin the answer, the six others come in two steps.
    assert fixed.decoding is not None
    assert fixed.decoding.mean == pytest.approx(3 / step_s)
    assert fixed.decoding.low == pytest.approx(fixed.decoding.mean)
    assert 1 < fixed.whole.mean < fixed.decoding.mean


def test_answers_of_one_token_are_compared_as_a_whole_alone() -> None:
    engines = Engines(FIXED)
    engines.comparison.output_tokens = 1
    for each in engines.measure():
        assert each.decoding is None
        assert each.runs[0].decode_per_s is None
        assert each.whole.mean > 0


def test_counters_exclude_earlier_runs() -> None:
    _, fixed = Engines(Policy(text="fixed:3", name="fixed", gamma=3), right=2).measure()
    for run in fixed.runs:
        assert (run.verified, run.accepted, run.gamma_mean) == (54, 36, 3)


def test_an_answer_that_fails_ends_the_comparison() -> None:
    with pytest.raises(EngineError, match="run-2/0 ended with error: the model"):
        Engines(FASER, fails=True).measure()
