"""A server's stream becomes the pieces of an answer; its errors become FASER's."""

import json

import httpx
import pytest

from faser.cli.chat.answerer import AnswerLimits
from faser.cli.chat.remote import RemoteAnswerer
from faser.errors import EngineError, RequestError


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


@pytest.mark.parametrize(
    "status, content, error, message",
    [
        (400, b'{"error": {"message": "too long"}}', RequestError, "400: too long"),
        (502, b"bad gateway\n", RequestError, "502: bad gateway"),
        (200, sse(delta(content="Pa"), {"error": {"message": "it died"}}, "[DONE]"), EngineError, "it died"),
        (200, sse(delta(content="Pa")), EngineError, "the answer broke off"),
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
