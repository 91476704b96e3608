"""The table, the picture and the JSON say the same of what was measured."""

import json
import xml.etree.ElementTree as ET
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from faser.cli.bench.comparison import Answer, Load, Measured, Run
from faser.cli.bench.estimates import Estimate
from faser.cli.bench.prompts import BenchPrompt
from faser.cli.bench.report import WIDTH, about_machine, bar, by_category, tables, write_json, write_picture

PROMPTS = [BenchPrompt(category="code", token_ids=(1, 2, 3)), BenchPrompt(category="chat", token_ids=(4, 5))]
ONE, FOUR = Load(temperature=0.0, concurrency=1), Load(temperature=0.0, concurrency=4)


def run(*decode_s: float, accepted: int = 0, first: int = 7) -> Run:
    """Each answer has five tokens, of which four take this time; each prompt takes a second."""
    answers = [Answer() for _ in decode_s]
    for answer, taken in zip(answers, decode_s, strict=True):
        answer.add([first], 1.0)
        answer.add([2, 3, 4, 5], 1.0 + taken)
    seconds = sum(decode_s) + len(decode_s)
    return Run(
        answers=tuple(answers), seconds=seconds, gamma_mean=1.5, verified=4 * bool(accepted), accepted=accepted
    )


def measured(load: Load, text: tuple[Run, ...]) -> list[Measured]:
    off = (run(4.0, 2.0), run(8.0, 4.0))
    return [Measured(load=load, arm="off", runs=off, off=off), Measured(load=load, arm="text", runs=text, off=off)]


FOUND = [
    *measured(ONE, (run(1.0, 2.0, accepted=3), run(2.0, 4.0, accepted=3))),
    *measured(FOUR, (run(4.0, 4.0), run(8.0, 8.0, first=9))),
]


def test_the_table_has_a_line_for_each_drafter_and_load() -> None:
    console = Console(file=StringIO(), width=WIDTH)
    console.print(tables(FOUND, PROMPTS))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "1 at once, temperature 0, 2 requests, 2 rounds" in lines[0]
    off, text = (line.split() for line in lines[2:4])
    assert off[:2] == ["off", "1.0"]
    # 10 tokens in 5 and 8 s, where off takes 8 and 14; 8 of them decoded in 3 and 6, where off takes 6 and 12.
    assert text[:3] == ["text", "1.6", "1.67x"]
    assert "2.00x (2.00 … 2.00)" in lines[3]
    assert lines[3].split()[-6:] == ["1.50", "75%", "1.43", "0", "of", "4"]
    assert [line.split()[-3:] for line in lines if line.startswith("text")] == [["0", "of", "4"], ["2", "of", "4"]]
    assert max(map(len, lines)) <= WIDTH


def test_kinds_of_prompts_are_compared_by_the_time_that_they_take() -> None:
    assert by_category(FOUND[:2], PROMPTS) == {"code": {"text": 4.0}, "chat": {"text": 1.0}}


@pytest.mark.parametrize(
    "estimate, expected",
    [
        (Estimate(mean=0.75, low=0.5, high=1.0, rounds=3), "█" * 10 + "▒" * 10 + "│" + " " * 9),
        (Estimate(mean=1.25, low=None, high=None, rounds=1), "█" * 25 + " " * 5),
        (Estimate(mean=0.0, low=0.0, high=9.0, rounds=2), "▒" * 30),
    ],
)
def test_a_bar_reaches_to_the_mean_and_shows_its_interval(estimate: Estimate, expected: str) -> None:
    assert bar(estimate, 1.5).plain == expected


def test_the_picture_is_svg_with_the_table_in_it(tmp_path: Path) -> None:
    write_picture(tmp_path / "found.svg", tables(FOUND, PROMPTS), "faser bench spec")
    texts = "".join(ET.parse(tmp_path / "found.svg").getroot().itertext()).replace("\xa0", " ")
    assert "2.00x (2.00 … 2.00)" in texts
    assert "faser bench spec" in texts


def test_the_json_has_every_load_drafter_and_request(tmp_path: Path) -> None:
    write_json(tmp_path / "found.json", {"command": "faser bench spec", **about_machine()}, FOUND, PROMPTS)
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert found["command"] == "faser bench spec"
    assert found["cores"] >= 1
    assert [(each["concurrency"], each["requests"]) for each in found["loads"]] == [(1, 2), (4, 2)]
    off, text = found["loads"][0]["drafters"]
    assert text["decoding_over_off"] == {"mean": 2.0, "low": 2.0, "high": 2.0, "rounds": 2}
    assert (text["accepted_share"], text["tokens_per_step"]) == (0.75, 1.429)
    assert text["answers_hash"] == off["answers_hash"]
    assert text["by_request"][0] == {
        "kind": "code",
        "prompt_tokens": 3,
        "answer_tokens": 5,
        "decode_s": 1.5,
        "verified": 0,
        "accepted": 0,
    }
    assert found["loads"][1]["drafters"][1]["differing_answers"] == 2
