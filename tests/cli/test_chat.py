"""`faser chat`: its flags, conversations, and answers of a server and of a model in this process."""

import io
import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Self

import httpx
import pytest

from faser.cli.chat import AnswerLimits, Conversation, Message, RemoteAnswerer, chat, talk
from faser.cli.main import main
from faser.config.sources import UsageError
from faser.errors import ConfigError, EngineError, RequestError


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--url is http://127.0.0.1:9; no server answers there"):
        chat(["--url", "http://127.0.0.1:9"])


def test_engine_flags_need_a_model_in_this_process() -> None:
    with pytest.raises(UsageError) as caught:
        chat(["--max-num-seqs", "4", "--config", "x"])
    assert caught.value.problems == (
        "--config is x; only faser serve reads a config file",
        "--max-num-seqs needs --in-process; a server has its own settings",
    )


@pytest.mark.parametrize(
    "text, problem",
    [(None, "cannot be read as JSON"), ("{", "cannot be read as JSON"), ("[]", "must hold a JSON object")],
)
def test_a_schema_that_cannot_be_read_is_named(text: str | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError) as caught:
        chat(["--json-schema", str(path)])
    assert f"--json-schema is {path}; " in caught.value.problems[0]
    assert problem in caught.value.problems[0]


class EchoAnswerer:
    """Repeats each question, numbered, and records it. "fail" and "interrupt" end the answer early."""

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []
        self.closed = 0

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        self.asked.append(list(messages))
        question = messages[-1]["content"]
        try:
            yield f"{len(self.asked)}: "
            if question == "interrupt":
                raise KeyboardInterrupt
            if question == "fail":
                raise EngineError("it broke")
            yield question
        finally:
            self.closed += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def run_script(text: str, system_prompt: str | None = None) -> tuple[EchoAnswerer, str, int]:
    answerer, out = EchoAnswerer(), io.StringIO()
    status = talk(Conversation(answerer, system_prompt=system_prompt), io.StringIO(text), out)
    return answerer, out.getvalue(), status


def test_every_line_of_a_script_gets_an_answer_that_ends_with_a_newline() -> None:
    answerer, out, status = run_script("hello\n\nagain\n")
    assert out == "1: hello\n2: again\n"
    assert status == 0
    assert answerer.closed == 2


def test_a_conversation_remembers_both_sides() -> None:
    answerer, _, _ = run_script("hello\nagain\n", system_prompt="be brief")
    assert [(each["role"], each["content"]) for each in answerer.asked[1]] == [
        ("system", "be brief"),
        ("user", "hello"),
        ("assistant", "1: hello"),
        ("user", "again"),
    ]


def test_reset_forgets_all_but_the_system_prompt() -> None:
    answerer, _, _ = run_script("hello\n/reset\nagain\n", system_prompt="be brief")
    assert [each["content"] for each in answerer.asked[1]] == ["be brief", "again"]


def test_exit_ends_a_script() -> None:
    answerer, _, _ = run_script("hello\n/exit\nagain\n")
    assert len(answerer.asked) == 1


def test_a_stopped_answer_is_kept_up_to_where_it_stopped() -> None:
    answerer, out, _ = run_script("interrupt\nagain\n")
    assert out == "1:  [stopped]\n2: again\n"
    assert answerer.asked[1][1]["content"] == "1: "


def test_a_failed_question_is_forgotten_and_makes_a_script_fail(capsys: pytest.CaptureFixture[str]) -> None:
    answerer, _, status = run_script("fail\nagain\n")
    assert status == 1
    assert [each["content"] for each in answerer.asked[1]] == ["again"]
    assert capsys.readouterr().err == "faser chat: it broke\n"


def test_a_model_in_this_process_answers(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--in-process", "--backend", "torch", "--max-tokens", "4", "--temperature", "0", "--quick", "hello"]
    assert main(["chat", str(tiny_checkpoint), *flags]) == 0
    assert capsys.readouterr().out.endswith("\n")


def sse(*events: object) -> bytes:
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def delta(**fields: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def remote(
    status: int,
    content: bytes,
    requests: list[httpx.Request] | None = None,
    limits: AnswerLimits = AnswerLimits(max_tokens=5),  # noqa: B008
) -> RemoteAnswerer:
    def handle(request: httpx.Request) -> httpx.Response:
        if requests is not None:
            requests.append(request)
        return httpx.Response(status, content=content)

    return RemoteAnswerer("http://x/v1/", limits, api_key="k", transport=httpx.MockTransport(handle))


def test_a_servers_stream_becomes_the_pieces_of_an_answer() -> None:
    requests: list[httpx.Request] = []
    stream = sse(
        delta(role="assistant", content=""), delta(content="Pa"), delta(content="ris"), {"choices": []}, "[DONE]"
    )
    with remote(200, stream, requests) as answerer:
        assert list(answerer.answer([{"role": "user", "content": "?"}])) == ["Pa", "ris"]
    assert str(requests[-1].url) == "http://x/v1/chat/completions"
    assert requests[-1].headers["Authorization"] == "Bearer k"
    assert json.loads(requests[-1].content) == {
        "stream": True,
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "?"}],
    }


def test_an_event_may_hold_what_unicode_calls_line_ends() -> None:
    """Planted: httpx's iter_lines."""
    text = "a\u2028b\u0085c\u2029d"
    event = f"data: {json.dumps(delta(content=text), ensure_ascii=False)}\r\n\r\ndata: [DONE]\r\n\r\n"
    with remote(200, event.encode()) as answerer:
        assert list(answerer.answer([])) == [text]


@pytest.mark.parametrize(
    "status, content, error, message",
    [
        (400, b'{"error": {"message": "too long"}}', RequestError, "400: too long"),
        (502, b"bad gateway\n", RequestError, "502: bad gateway"),
        (200, sse(delta(content="Pa"), {"error": {"message": "it died"}}, "[DONE]"), EngineError, "it died"),
        (200, sse(delta(content="Pa")), EngineError, "the answer ended early"),
    ],
)
def test_a_response_without_an_answer_is_an_error(
    status: int, content: bytes, error: type[Exception], message: str
) -> None:
    with remote(status, content) as answerer, pytest.raises(error) as caught:
        list(answerer.answer([]))
    assert str(caught.value) == message


def test_a_schema_is_sent_with_every_question() -> None:
    requests: list[httpx.Request] = []
    answerer = remote(200, sse("[DONE]"), requests, AnswerLimits(json_schema={"type": "null"}))
    with answerer:
        list(answerer.answer([]))
    assert json.loads(requests[-1].content)["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "null"}, "strict": True},
    }
