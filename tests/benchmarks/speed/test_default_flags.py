"""The default flags against off: the command line, questions and salts of runs, and how they become figures."""

import itertools
from pathlib import Path

import pytest

from benchmarks.cells import Cell
from benchmarks.prompts import Prompt
from benchmarks.servers import Run
from benchmarks.speed.default_flags import (
    AGAIN,
    FLOOR,
    FULL,
    KINDS,
    REQUESTS,
    Wanted,
    asking_of,
    figures,
    questions_of,
    settings_of,
    wanted_of,
)


def _wanted(*arguments: str) -> Wanted:
    return wanted_of(["questions.jsonl", "out.json", *arguments])


def test_without_arguments_it_is_the_table_of_the_readme() -> None:
    wanted = _wanted()

    assert wanted.arms == {"default": (), "off": ("--speculative-policy", "off")}
    assert [(each["concurrency"], each["kind"]) for each in wanted.settings] == [
        (count, kind) for count in (1, 4, 16) for kind in ("stop", "full", "again")
    ]
    assert {each["temperature"] for each in wanted.settings} == {0}
    assert (wanted.questions, wanted.out) == (Path("questions.jsonl"), Path("out.json"))
    assert (wanted.rounds, len(wanted.settings)) == (5, 9)


def test_cells_are_all_combinations_and_again_follows_what_it_repeats() -> None:
    wanted = _wanted("--concurrency", "2,32", "--temperatures", "0,1", "--kinds", "again,full")

    assert wanted.settings == tuple(
        {"concurrency": count, "temperature": temperature, "kind": kind}
        for count in (2, 32)
        for temperature in (0, 1)
        for kind in ("full", "again")
    )


def test_named_arms_take_the_place_of_default_and_off_is_always_there() -> None:
    wanted = _wanted("--arm", "plain=", "--arm", 'auto=--speculative-config \'{"model": "DRAFT"}\'')

    assert wanted.arms == {
        "plain": (),
        "auto": ("--speculative-config", '{"model": "DRAFT"}'),
        FLOOR: ("--speculative-policy", "off"),
    }


def test_every_arm_serves_the_same_model_with_the_flags_of_all() -> None:
    wanted = _wanted("--model", "grown", "--server-args", "--max-num-seqs 8", "--arm", "off=--no-drafts")

    assert wanted.arms == {"off": ("grown", "--max-num-seqs", "8", "--no-drafts")}


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--kinds", "stop,again"], "again repeats full"),
        (["--kinds", "long"], "long not among stop, full, again"),
        (["--concurrency", "1,3"], r"[3] not among 1, 2"),
        (["--rounds", "0"], "at least 1"),
        (["--busy-cores", "-1"], "at least 0"),
        (["--arm", "quick"], "NAME=VALUE"),
        (["--prompts", "poems"], "invalid choice"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_server_starts(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _wanted(*arguments)

    assert complaint in capsys.readouterr().err


PROMPTS = tuple(Prompt(question_id=number, category="qa", text=f"q{number}") for number in range(240))


def run(tokens: int, seconds: float, *texts: str, paid: float = 0.0) -> Run:
    found = {"2-3": {"mean": paid, "low": paid - 0.1, "high": paid + 0.1}} if paid else {}
    return Run(tokens=tokens, seconds=seconds, drafted=10, accepted=5, texts=texts, paid=found)


def labels(kind: str = FULL, concurrency: int = 1) -> dict[str, object]:
    return {"concurrency": concurrency, "temperature": 0.0, "kind": kind}


def test_no_two_runs_share_a_salt_but_those_asked_again_and_what_they_repeat() -> None:
    runs = itertools.product(settings_of((1, 4), (0.0, 1.0), list(KINDS)), ("default", "off"), range(3))
    by_salt: dict[str, list[str]] = {}
    for one, arm, number in runs:
        by_salt.setdefault(asking_of(one, arm, number, 9).salt, []).append(one["kind"])

    assert len(by_salt) == 2 * 2 * 2 * 2 * 3
    assert all(kinds in (["stop"], ["full", "again"]) for kinds in by_salt.values())


@pytest.mark.parametrize("concurrency", [1, 16])
def test_rounds_ask_other_questions_until_all_have_been_asked(concurrency: int) -> None:
    count = REQUESTS[concurrency]
    rounds = [questions_of(labels(concurrency=concurrency), PROMPTS, number) for number in range(240 // count)]

    asked = [prompt.question_id for questions in rounds for prompt in questions]
    assert sorted(asked) == [*range(count * len(rounds))]


def test_arms_and_kinds_get_the_same_questions_with_the_same_seeds() -> None:
    assert questions_of(labels(FULL), PROMPTS, 2) == questions_of(labels(AGAIN), PROMPTS, 2)
    one, other = (asking_of(labels(), arm, 0, 9).body(PROMPTS[3]) for arm in ("default", "off"))

    assert one["seed"] == other["seed"] == 3
    assert {name for name in one if one[name] != other[name]} == {"cache_salt"}


def test_ignore_eos_is_off_in_one_kind_only() -> None:
    assert {kind: asking_of(labels(kind), "off", 0, 9).ignore_eos for kind in KINDS} == {
        "stop": False,
        "full": True,
        "again": True,
    }


def test_figures_are_medians_of_rates_and_ratios_within_rounds() -> None:
    mine = [run(100, 1.0, "a", "b"), run(400, 2.0, "a", "b"), run(90, 3.0, "a", "c")]
    off = [run(100, 2.0, "a", "b"), run(100, 1.0, "a", "b"), run(60, 4.0, "a", "b")]

    found = figures(Cell(labels=labels(), runs={"default": mine, FLOOR: off}), "default")

    assert (found["tokens_per_s"], found["off_tokens_per_s"]) == (100.0, 50.0)
    assert found["ratio"]["mean"] == pytest.approx((2 * 2 * 2) ** (1 / 3))
    assert (found["different_answers"], found["answers"]) == (1, 6)
