"""faser run-batch with a model in this process, as a user runs it."""

import json
from pathlib import Path
from typing import Any

import pytest

from faser.cli.main import main

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
    lines = [line(f"good-{at}", urls[at % 4], temperature=0) for at in range(24)]
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
