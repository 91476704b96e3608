"""Which questions and salts the runs of a cell get, and what becomes of the answers."""

import itertools

import pytest

from benchmarks.prompts import Prompt
from benchmarks.servers import Answered
from benchmarks.speed.default_flags import AGAIN, FULL, KINDS, REQUESTS, Cell, document, figures, grid, page

PROMPTS = tuple(Prompt(question_id=number, category="qa", text=f"q{number}") for number in range(240))


def answered(tokens: int, seconds: float, *texts: str) -> Answered:
    return Answered(tokens=tokens, seconds=seconds, drafted=10, accepted=5, texts=texts)


def cell(kind: str = FULL, concurrency: int = 1) -> Cell:
    return Cell(concurrency=concurrency, temperature=0.0, kind=kind)


def test_no_two_runs_share_a_salt_but_those_asked_again_and_what_they_repeat() -> None:
    runs = itertools.product(grid((1, 4), (0.0, 1.0), list(KINDS)), ("default", "off"), range(3))
    by_salt: dict[str, list[Cell]] = {}
    for one, arm, round in runs:
        by_salt.setdefault(one.asking(arm, round, 9).salt, []).append(one)

    assert len(by_salt) == 2 * 2 * 2 * 2 * 3
    for cells in by_salt.values():
        kinds = [one.kind for one in cells]
        assert kinds in (["stop"], ["full", "again"])


@pytest.mark.parametrize("concurrency", [1, 16])
def test_rounds_ask_other_questions_until_all_have_been_asked(concurrency: int) -> None:
    count = REQUESTS[concurrency]
    rounds = [cell(concurrency=concurrency).questions(PROMPTS, round) for round in range(240 // count)]

    asked = [prompt.question_id for questions in rounds for prompt in questions]
    assert sorted(asked) == [*range(count * len(rounds))]


def test_arms_and_kinds_get_the_same_questions_with_the_same_seeds() -> None:
    assert cell(FULL).questions(PROMPTS, 2) == cell(AGAIN).questions(PROMPTS, 2)
    one, other = (cell().asking(arm, 0, 9).body(PROMPTS[3]) for arm in ("default", "off"))

    assert one["seed"] == other["seed"] == 3
    assert {name for name in one if one[name] != other[name]} == {"cache_salt"}


def test_ignore_eos_is_off_in_one_kind_only() -> None:
    assert {kind: cell(kind).asking("off", 0, 9).ignore_eos for kind in KINDS} == {
        "stop": False,
        "full": True,
        "again": True,
    }


def test_figures_are_medians_of_rates_and_ratios_within_rounds() -> None:
    mine = [answered(100, 1.0, "a", "b"), answered(400, 2.0, "a", "b"), answered(90, 3.0, "a", "c")]
    off = [answered(100, 2.0, "a", "b"), answered(100, 1.0, "a", "b"), answered(60, 4.0, "a", "b")]

    found = figures(cell(), "default", mine, off)

    assert (found.tokens_per_s, found.off_tokens_per_s) == (100.0, 50.0)
    assert found.ratio.mean == pytest.approx((2 * 2 * 2) ** (1 / 3))
    assert (found.different, found.num_answers) == (1, 6)


def test_the_page_has_a_row_a_concurrency_and_a_column_a_kind_and_says_how_many_answers_differ() -> None:
    mine, off = [answered(150, 1.0, "a")], [answered(100, 1.0, "b")]
    found = [figures(cell(kind, count), "auto", mine, off) for count in (1, 4) for kind in (FULL, AGAIN)]

    lines = page({"command": "as run"}, found).splitlines()

    assert "3 of 4" not in lines[2]
    assert lines[2] == "0 of 4 answers equal those of arm off."
    assert "off → auto, temperature 0" in lines[4]
    assert lines[6] == "| requests at once | ignore_eos on | asked again |"
    assert lines[8:] == [f"| {count} | 100 → 150, 1.50x | 100 → 150, 1.50x |" for count in (1, 4)]


def test_the_document_has_every_cell_and_every_run_and_what_they_were_told() -> None:
    runs = {cell(): {"auto": [answered(150, 1.0, "a")], "off": [answered(100, 1.0, "a")]}}
    found = [figures(cell(), "auto", runs[cell()]["auto"], runs[cell()]["off"])]

    made = document({"commit": "abc"}, found, runs)

    assert made["commit"] == "abc"
    assert made["cells"][0]["ratio"] == {"mean": 1.5, "low": None, "high": None, "rounds": 1}
    assert made["cells"][0]["accepted_a_token"] == pytest.approx(5 / 150, abs=1e-3)
    assert [(run["arm"], run["round"], run["tokens"]) for run in made["runs"]] == [
        ("auto", 0, 150),
        ("off", 0, 100),
    ]
