"""The command line of the grid."""

from pathlib import Path

import pytest

from benchmarks.speed.default_flags import FLOOR, Cell, Wanted, wanted_of


def _wanted(*arguments: str) -> Wanted:
    return wanted_of(["questions.jsonl", "out.json", *arguments])


def test_without_arguments_it_is_the_table_of_the_readme() -> None:
    wanted = _wanted()

    assert wanted.arms == {"default": (), "off": ("--speculative-policy", "off")}
    assert [(cell.concurrency, cell.kind) for cell in wanted.cells] == [
        (count, kind) for count in (1, 4, 16) for kind in ("stop", "full", "again")
    ]
    assert {cell.temperature for cell in wanted.cells} == {0}
    assert (wanted.questions, wanted.out) == (Path("questions.jsonl"), Path("out.json"))
    assert wanted.num_runs == 5 * 9 * 2


def test_cells_are_all_combinations_and_again_follows_what_it_repeats() -> None:
    wanted = _wanted("--concurrency", "2,32", "--temperatures", "0,1", "--kinds", "again,full")

    assert wanted.cells == tuple(
        Cell(concurrency=count, temperature=temperature, kind=kind)
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

    assert wanted.flags("off") == ("grown", "--max-num-seqs", "8", "--no-drafts")
    assert wanted.arms.keys() == {"off"}


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--kinds", "stop,again"], "again repeats full"),
        (["--kinds", "long"], "long not among stop, full, again"),
        (["--concurrency", "1,3"], r"[3] not among 1, 2"),
        (["--rounds", "0"], "at least 1"),
        (["--beside-load", "-1"], "at least 0"),
        (["--arm", "--flag"], "NAME=FLAGS"),
        (["--prompts", "poems"], "invalid choice"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_server_starts(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _wanted(*arguments)

    assert complaint in capsys.readouterr().err
