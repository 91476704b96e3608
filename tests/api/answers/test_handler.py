"""A client that goes away takes its request with it, streaming or not.

Streams, byte for byte, and what the official client makes of them.
"""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from faser.errors import EngineError, NotReadyError, OverloadError, RequestError
from faser.types.answer import FinishReason, RequestOutput
from faser.types.request import Request
from tests.api.server import http_client, openai_client, serving, settings
from tests.fake_engine import FakeEngine, Step, delta, saying
from tests.waiting import until

BODY: dict[str, Any] = {"prompt": ["one", "two"], "max_tokens": 1000}


def send_raw(url: str, body: dict[str, Any]) -> socket.socket:
    """A request on a bare socket, so that the test decides when it is closed."""
    address = httpx.URL(url)
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection((address.host, address.port or 80))
    connection.sendall(head.encode() + content)
    return connection


def slow(engine: FakeEngine, step_s: float) -> None:
    engine.script = saying("x" * 1000)
    engine.step_s = step_s


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step_s", [0.005, 60.0])
def test_client_that_leaves_aborts_its_request(url: str, engine: FakeEngine, stream: bool, step_s: float) -> None:
    """step_s of a minute: it leaves while it waits for the first token."""
    slow(engine, step_s)
    connection = send_raw(url, {**BODY, "stream": stream})
    until(lambda: engine.num_open == 2)
    if stream and step_s < 1:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert not engine.aborted
    connection.close()
    until(lambda: len(engine.aborted) == 2)
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
    assert engine.num_open == 0


def test_client_that_stops_reading_its_stream_aborts_it(url: str, engine: FakeEngine) -> None:
    slow(engine, 0.005)
    with http_client(url) as http, http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        next(answer.iter_lines())
    until(lambda: len(engine.aborted) == 2)


def test_client_that_leaves_while_sending_its_body_leaves_nothing_behind(url: str, engine: FakeEngine) -> None:
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000\r\n\r\n{"
        )
    with http_client(url) as http:
        assert http.get("/health").status_code == 200
    assert not engine.requests


def test_request_that_finishes_aborts_nothing(http: httpx.Client, engine: FakeEngine) -> None:
    http.post("/v1/completions", json={**BODY, "stream": True})
    http.post("/v1/completions", json=BODY)
    assert len(engine.requests) == 4
    assert not engine.aborted
    assert engine.num_open == 0


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
STREAM: dict[str, Any] = {"messages": HI, "stream": True}


def events(answer: httpx.Response) -> list[Any]:
    """Payloads in order. Framing is checked byte for byte: data lines and empty lines, nothing else."""
    assert answer.status_code == 200
    frames = answer.content.split(b"\n\n")
    assert frames.pop() == b""
    assert frames.pop() == b"data: [DONE]"
    assert all(frame.startswith(b"data: {") and b"\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


def choices(payloads: list[Any]) -> list[Any]:
    return [choice for payload in payloads for choice in payload["choices"]]


def test_chat_stream_is_byte_for_byte_openais(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying('é"')
    answer = http.post(CHAT, json={**STREAM, "model": "tiny"}, headers={"X-Request-Id": "me"})
    created = json.loads(answer.text.partition("\n")[0][6:])["created"]
    head = (
        f'data: {{"id":"chatcmpl-me","created":{created},"model":"tiny","system_fingerprint":"faser-1.2.3",'
        f'"object":"chat.completion.chunk","choices":[{{"index":0,"delta":'
    )
    bodies = [
        '{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
        '{"content":""},"logprobs":null,"finish_reason":null}]}',
        '{"content":""},"logprobs":null,"finish_reason":null}]}',
        '{"content":"\\""},"logprobs":null,"finish_reason":null}]}',
        '{},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}',
    ]
    assert answer.text == "".join(f"{head}{body}\n\n" for body in bodies) + "data: [DONE]\n\n"


def test_headers_keep_proxies_from_holding_events_back(http: httpx.Client) -> None:
    headers = http.post(CHAT, json=STREAM).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in headers
    assert "content-length" not in headers


def test_joined_stream_is_the_whole_answer(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying("The whole answer.", tokens_per_step=4)
    whole = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    text = ""
    for chunk in client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
    ):
        text += chunk.choices[0].delta.content or ""
    assert text == whole.choices[0].message.content


def test_one_step_makes_one_content_chunk(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying("abcdefgh", tokens_per_step=3)
    contents = [choice["delta"].get("content") for choice in choices(events(http.post(CHAT, json=STREAM)))]
    assert contents == ["", "abc", "def", "gh", None]


def test_role_comes_once_and_only_with_the_first_token(engine: FakeEngine, http: httpx.Client) -> None:
    engine.step_s = 0.2
    with http.stream("POST", CHAT, json=STREAM) as answer:
        first = next(answer.iter_raw())
    assert first.count(b'"role":"assistant"') == 1
    assert b'"content":"H"' in first


def test_samples_interleave_and_are_told_apart(http: httpx.Client) -> None:
    payloads = events(http.post(CHAT, json={**STREAM, "n": 2}))
    said = {0: "", 1: ""}
    for choice in choices(payloads):
        said[choice["index"]] += choice["delta"].get("content", "")
    assert said == {0: "Hello!", 1: "Hello!"}
    assert all(len(payload["choices"]) == 1 for payload in payloads)
    ended = [choice["index"] for choice in choices(payloads) if choice["finish_reason"]]
    assert sorted(ended) == [0, 1]


def test_sample_that_ends_early_ends_in_its_own_chunk(http: httpx.Client, engine: FakeEngine) -> None:
    def script(request: Request) -> Iterator[Step]:
        yield output(request, delta(request, 0, b"a"), delta(request, 1, b"x", finish_reason=FinishReason.STOP))
        yield output(request, delta(request, 0, b"b", finish_reason=FinishReason.LENGTH))

    engine.script = script
    payloads = events(http.post(TEXT, json={"prompt": "p", "n": 2, "stream": True}))
    seen = [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices(payloads)]
    assert seen == [(0, "a", None), (1, "x", "stop"), (0, "b", "length")]


def output(request: Request, *deltas: Any) -> RequestOutput:
    return RequestOutput(request_id=request.request_id, deltas=deltas)


def test_without_usage_option_no_chunk_has_usage(http: httpx.Client) -> None:
    assert all("usage" not in payload for payload in events(http.post(CHAT, json=STREAM)))


@pytest.mark.parametrize("route, body", [(CHAT, STREAM), (TEXT, {"prompt": "hi", "stream": True})])
def test_usage_comes_last_and_alone(http: httpx.Client, route: str, body: dict[str, Any]) -> None:
    payloads = events(http.post(route, json={**body, "stream_options": {"include_usage": True}}))
    *chunks, last = payloads
    assert all(payload["usage"] is None and payload["choices"] for payload in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    whole = http.post(route, json={**body, "stream": False}).json()
    assert last["usage"] == whole["usage"]


def test_continuous_usage_runs_along(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    payloads = events(http.post(TEXT, json={"prompt": "hi", "stream": True, "stream_options": options}))
    assert [payload["usage"]["completion_tokens"] for payload in payloads] == [1, 2, 3, 4, 5, 6, 6]
    assert {payload["usage"]["prompt_tokens"] for payload in payloads} == {2}


def test_the_chunk_that_opens_a_chat_counts_none_of_its_tokens(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    payloads = events(http.post(CHAT, json={**STREAM, "stream_options": options}))
    assert [payload["usage"]["completion_tokens"] for payload in payloads] == [0, 1, 2, 3, 4, 5, 6, 6, 6]


def test_continuous_usage_needs_usage(http: httpx.Client) -> None:
    options = {"continuous_usage_stats": True}
    payloads = events(http.post(CHAT, json={**STREAM, "stream_options": options}))
    assert all("usage" not in payload for payload in payloads)


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
def test_operator_can_force_usage_into_every_chunk(options: dict[str, Any]) -> None:
    with serving(FakeEngine(), settings(force_include_usage=True)) as url, openai_client(url) as client:
        chunks = list(client.completions.create(model="tiny", prompt="hi", stream=True, **options))
    used = [chunk.usage for chunk in chunks]
    assert [None if each is None else each.completion_tokens for each in used] == [1, 2, 3, 4, 5, 6, 6]


def test_obfuscated_chunks_have_sizes_that_say_little(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying("I am much longer than that", tokens_per_step=5)
    options = {"include_usage": True, "include_obfuscation": True}
    answer = http.post(CHAT, json={**STREAM, "stream_options": options})
    sizes = [len(line) + 2 for line in answer.text.split("\n\n") if line not in ("", "data: [DONE]")]
    assert all(size % 64 == 0 for size in sizes), sizes
    payloads = events(answer)
    assert all(isinstance(payload["obfuscation"], str) for payload in payloads)
    said = "".join(choice["delta"].get("content", "") for choice in choices(payloads))
    assert said == "I am much longer than that"


def test_chunk_has_the_logprobs_of_exactly_its_tokens(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying("Größe", tokens_per_step=2)
    payloads = events(http.post(CHAT, json={**STREAM, "logprobs": True, "top_logprobs": 1}))
    reports = [choice["logprobs"]["content"] for choice in choices(payloads) if choice["logprobs"]]
    said = b"".join(bytes(token["bytes"]) for report in reports for token in report)
    assert said.decode() == "Größe"
    assert [len(report) for report in reports] == [2, 2, 2, 1]


def test_text_offsets_run_on_over_chunks(http: httpx.Client) -> None:
    payloads = events(http.post(TEXT, json={"prompt": "p", "stream": True, "logprobs": 0}))
    offsets = [at for choice in choices(payloads) for at in choice["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2, 3, 4, 5]


def test_prompt_comes_with_the_first_chunk_alone_when_echoed(http: httpx.Client) -> None:
    payloads = events(http.post(TEXT, json={"prompt": "Say ", "stream": True, "echo": True}))
    assert [choice["text"] for choice in choices(payloads)] == ["Say H", "e", "l", "l", "o", "!"]


def test_token_ids_stream_when_asked_for(http: httpx.Client) -> None:
    payloads = events(http.post(CHAT, json={**STREAM, "return_token_ids": True, "return_prompt_text": True}))
    assert bytes(payloads[0]["prompt_token_ids"]) == b"[user]hi[assistant]"
    assert payloads[0]["prompt_text"] == "[user]hi[assistant]"
    assert all("prompt_token_ids" not in payload and "prompt_text" not in payload for payload in payloads[1:])
    assert bytes(each for choice in choices(payloads) for each in choice.get("token_ids", ())) == b"Hello!"


def failing_after(text: str, error: Exception) -> Any:
    def script(request: Request) -> Iterator[Step]:
        for byte in text.encode():
            yield output(request, delta(request, 0, bytes([byte])))
        yield error

    return script


@pytest.mark.parametrize(
    "error, code, kind",
    [
        (EngineError("request r: the engine died"), 500, "InternalServerError"),
        (NotReadyError("the server shut down"), 503, "ServiceUnavailableError"),
    ],
)
def test_failure_after_the_start_is_an_event_and_then_done(
    http: httpx.Client, engine: FakeEngine, error: Exception, code: int, kind: str
) -> None:
    engine.script = failing_after("ab", error)
    *chunks, last = events(http.post(CHAT, json={**STREAM, "stream_options": {"include_usage": True}}))
    assert last == {"error": {"message": str(error), "type": kind, "param": None, "code": code}}
    assert [choice["finish_reason"] for choice in choices(chunks)] == [None, None, None]


def test_official_client_raises_what_fails_in_a_stream(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = failing_after("ab", EngineError("the engine died"))
    with pytest.raises(openai.APIError, match="the engine died"):
        list(client.completions.create(model="tiny", prompt="p", stream=True))


def test_bug_in_a_stream_names_the_request_and_shows_no_trace(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = failing_after("ab", ZeroDivisionError("secret"))
    answer = http.post(CHAT, json=STREAM, headers={"X-Request-Id": "my-id"})
    error = events(answer)[-1]["error"]
    assert error["code"] == 500
    assert "my-id" in error["message"]
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    "error, status",
    [
        (EngineError("died"), 500),
        (RequestError("no room for this prompt"), 400),
        (NotReadyError("gone"), 503),
        (OverloadError("full"), 503),
        (ZeroDivisionError("secret"), 500),
    ],
)
@pytest.mark.parametrize("prompt", ["one", ["one", "two"]])
def test_failure_before_the_first_token_has_a_status_of_its_own(
    http: httpx.Client, engine: FakeEngine, error: Exception, status: int, prompt: str | list[str]
) -> None:
    engine.script = failing_after("", error)
    answer = http.post(TEXT, json={"prompt": prompt, "stream": True})
    assert answer.status_code == answer.json()["error"]["code"] == status
    assert "secret" not in answer.text
    assert engine.num_open == 0


def test_refusal_of_a_stream_is_an_ordinary_answer(http: httpx.Client, engine: FakeEngine) -> None:
    engine.refusals = [OverloadError("the queue is full", retry_after_s=7)]
    answer = http.post(CHAT, json=STREAM)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert answer.headers["content-type"] == "application/json"
