"""The files of a batch."""

import json
from pathlib import Path
from typing import Any

import pytest

from faser.cli.batch.batch_file import ResultsFile, read_lines
from faser.errors import ConfigError

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}


def problems(path: Path, *lines: object) -> list[str]:
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines))
    return [line.problem for line in read_lines(path)]


def test_lines_are_read_in_order_without_empty_ones(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    assert problems(path, GOOD, "", {**GOOD, "custom_id": "b", "body": {"prompt": "grüezi"}}) == ["", ""]
    first, second = read_lines(path)
    assert (first.number, first.custom_id, first.url) == (1, "a", "/v1/completions")
    assert (second.number, json.loads(second.body)) == (3, {"prompt": "grüezi"})


@pytest.mark.parametrize(
    "line, problem",
    [
        ("{", "it is not JSON"),
        ("[]", "it must be a JSON object"),
        ({**GOOD, "custom_id": None}, "custom_id is null"),
        ({**GOOD, "custom_id": 5}, "custom_id is 5"),
        ({**GOOD, "method": "GET"}, 'method is "GET"; it must be POST'),
        ({**GOOD, "url": "/v1/embeddings"}, 'url is "/v1/embeddings"; it must be one of /v1/chat/completions'),
        ({**GOOD, "body": "x" * 200}, "body is"),
        ({**GOOD, "body": {"stream": True}}, "body.stream is true"),
    ],
)
def test_a_wrong_line_says_what_is_wrong_and_others_are_read(tmp_path: Path, line: object, problem: str) -> None:
    found = problems(tmp_path / "in.jsonl", line, {**GOOD, "custom_id": "other"})
    assert found[0].startswith(problem)
    assert len(found[0]) < 200
    assert found[1] == ""


def test_an_id_that_occurs_twice_is_a_problem_of_the_second_line(tmp_path: Path) -> None:
    first, second = problems(tmp_path / "in.jsonl", GOOD, GOOD)
    assert first == ""
    assert "as in a line before" in second


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read: No such file"):
        list(read_lines(tmp_path / "none.jsonl"))


def result(custom_id: str, status: int) -> dict[str, Any]:
    return {"custom_id": custom_id, "response": {"status_code": status}}


def test_results_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultsFile(path, resume=False) as results:
        results.write(result("a", 200))
        assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a"]
    with pytest.raises(ConfigError, match="give --resume"):
        ResultsFile(path, resume=False)


def test_resuming_keeps_answers_and_drops_failures_and_what_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    lines = [json.dumps(result("a", 200)), json.dumps(result("b", 400)), '{"custom_id": "e", "response": null}']
    path.write_text("\n".join([*lines, json.dumps(result("c", 200)), json.dumps(result("d", 200))[:-4]]))
    with ResultsFile(path, resume=True) as results:
        assert results.answered == {"a", "c"}
        results.write(result("b", 200))
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", "c", "b"]
    assert list(tmp_path.iterdir()) == [path]
