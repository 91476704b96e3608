"""faser run-batch: its files, lines answered over a fake engine, and the command with a model in this process."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from faser.api.app import create_app
from faser.cli.batch.command import run_lines
from faser.cli.batch.lines import BatchLine, ResultsFile, Totals, read_lines
from faser.cli.main import main
from faser.errors import ConfigError, OverloadError
from faser.metrics.server import Metrics
from tests.api.server import settings
from tests.fake_engine import FakeEngine, saying

HI = [{"role": "user", "content": "hi"}]
FLAGS = (
    "--dtype",
    "float32",
    "--backend",
    "torch",
    "--num-threads",
    "1",
    "--max-num-seqs",
    "4",
    "--served-model-name",
    "tiny",
)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 4},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 4, "n": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/rerank": {"query": "a", "documents": ["b", "a"]},
    "/v1/score": {"text_1": "a", "text_2": ["a", "b"]},
}


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    assert len({each["id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def run(given: Path, out: Path, model: Path, *flags: str) -> int:
    return main(["run-batch", "-i", str(given), "-o", str(out), str(model), *FLAGS, *flags])


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**BODIES[url], **body}}


@pytest.mark.slow
def test_every_line_is_answered_or_says_why_not_and_failures_are_tried_again(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    urls = list(BODIES)
    lines = [line(f"good-{at}", urls[at % 7], **({"temperature": 0} if at % 7 < 4 else {})) for at in range(24)]
    write(given, [line("model", urls[0], model="gpt-9"), *lines, line("limit", urls[1], max_tokens=-1)])

    assert run(given, out, tiny_checkpoint, "--requests-at-once", "9") == 1

    assert "24 answered, 2 failed, 0 kept" in capsys.readouterr().err
    results = read(out)
    assert len(results) == 26
    for at in range(24):
        each = results[f"good-{at}"]
        assert (each["error"], each["response"]["status_code"]) == (None, 200)
    bodies = {url: results[f"good-{at}"]["response"]["body"] for at, url in enumerate(urls)}
    assert bodies["/v1/chat/completions"]["choices"][0]["message"]["role"] == "assistant"
    assert len(bodies["/v1/completions"]["choices"]) == 4
    assert bodies["/v1/responses"]["object"] == "response"
    assert bodies["/v1/messages"]["type"] == "message"
    assert len(bodies["/v1/embeddings"]["data"]) == 2
    ranked = bodies["/v1/rerank"]["results"]
    assert [each["index"] for each in ranked] == [1, 0]
    scores = [each["score"] for each in bodies["/v1/score"]["data"]]
    assert scores == pytest.approx([each["relevance_score"] for each in ranked])  # of a with a, and with b
    assert results["model"]["response"]["status_code"] == 404
    assert "gpt-9" in results["model"]["error"]["message"]
    assert results["model"]["response"]["body"]["error"]["param"] == "model"
    assert results["limit"]["error"]["code"] == "BadRequestError"

    write(given, [line("model", urls[0]), *lines])
    assert run(given, out, tiny_checkpoint, "--resume") == 0
    assert "1 answered, 0 failed, 24 kept" in capsys.readouterr().err
    assert read(out)["model"]["response"]["status_code"] == 200


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "-i is missing; it is required"),
        (["-i", "in.jsonl"], "-o is missing; it is required"),
        (["-i", "none.jsonl", "-o", "out.jsonl"], "none.jsonl cannot be read: No such file or directory"),
        (["-i", "a", "-o", "b", "--port", "1"], "--port is for faser serve; run-batch opens no port"),
        (["-i", "a", "-o", "b", "--api-key", "k"], "--api-key is for faser serve; run-batch opens no port"),
        (["-i", "a", "-o", "b", "--requests-at-once", "0"], "--requests-at-once is 0; it must be at least 1"),
        (["-i", "a", "-o", "b", "--max-num-seqs", "0"], "--max-num-seqs is 0; it must be at least 1"),
        (["-i", "a", "-o", "b", "--ray-replicas", "2"], "--ray-replicas is 2; it needs --ray"),
        (["-i", "a", "-o", "b", "--ray", "--ray-replicas", "0"], "--ray-replicas is 0; it must be at least 1"),
    ],
)
def test_what_cannot_start_is_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run-batch", *arguments]) == 2
    assert capsys.readouterr().err.splitlines()[0].startswith(f"faser run-batch: {message}")
    assert list(tmp_path.iterdir()) == []


def test_answers_that_are_there_already_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(given, [])
    out.write_text("precious\n")
    assert main(["run-batch", "-i", str(given), "-o", str(out)]) == 2
    assert "give --resume" in capsys.readouterr().err
    assert out.read_text() == "precious\n"


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
        ({**GOOD, "url": "/v1/audio/speech"}, 'url is "/v1/audio/speech"; it must be one of /v1/chat/completions'),
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


def lines(number: int) -> list[BatchLine]:
    body = b'{"prompt":"hi","max_tokens":5}'
    return [
        BatchLine(number=at, custom_id=f"id-{at}", url="/v1/completions", body=body) for at in range(1, number + 1)
    ]


def answer_all(engine: FakeEngine, path: Path, given: list[BatchLine], at_once: int) -> tuple[Totals, list[str]]:
    app = create_app(engine, settings=settings(), metrics=Metrics(model_name="tiny", max_model_len=4096))
    heard: list[None] = []
    with ResultsFile(path, resume=False) as results:
        totals = asyncio.run(
            run_lines(app, iter(given), results, at_once=at_once, on_result=lambda: heard.append(None))
        )
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(heard) == len(found)
    return totals, [each["custom_id"] for each in found]


def test_no_more_lines_than_allowed_run_at_once(tmp_path: Path) -> None:
    engine = FakeEngine(saying("Hello"))
    most = 0

    def watched(request: object) -> object:
        nonlocal most
        most = max(most, engine.num_open)
        return saying("Hello")(request)  # type: ignore[arg-type]

    engine.script = watched  # type: ignore[assignment]
    totals, ids = answer_all(engine, tmp_path / "out", lines(20), 3)
    assert sorted(ids) == sorted(f"id-{at}" for at in range(1, 21))
    assert (totals.answered, totals.failed) == (20, 0)
    assert (totals.prompt_tokens, totals.generated_tokens) == (40, 100)
    assert most == 3


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    engine = FakeEngine(saying("Hello"))
    full = OverloadError("the queue is full", retry_after_s=0)
    engine.refusals = [full, None, full]
    totals, _ = answer_all(engine, tmp_path / "out", lines(3), 1)
    assert (totals.answered, totals.failed) == (3, 0)


def test_a_line_that_cannot_be_sent_is_a_result_with_its_number(tmp_path: Path) -> None:
    wrong = BatchLine(number=7, custom_id=None, problem="it is not JSON")
    totals, ids = answer_all(FakeEngine(), tmp_path / "out", [wrong, *lines(1)], 2)
    assert (totals.answered, totals.failed) == (1, 1)
    by_id = {each["custom_id"]: each for each in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert by_id[None]["error"] == {"code": "invalid_line", "message": "line 7: it is not JSON"}
    assert by_id[None]["response"] is None
    assert len(ids) == 2
