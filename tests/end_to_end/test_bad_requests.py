"""What no client should send: each is answered at once, with words and numbers, and the server lives on."""

import asyncio
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.end_to_end.conftest import MODEL, ROOM
from tests.end_to_end.server import Server
from tests.waiting import PATIENCE_S

PROMPT = "the quick brown fox"
TEXT = "/v1/completions"
HUGE = 10**400  # no double holds it


def refusal(server: Server, status: int, path: str = TEXT, **sent: Any) -> str:
    """The message with which a body is refused; the server answers the next request."""
    with server.http() as http:
        response = http.post(path, **sent)
        assert response.status_code == status, response.text[:500]
        error = response.json()["error"]
        assert error["code"] == status
        assert http.post(TEXT, json={"prompt": PROMPT, "max_tokens": 1}).status_code == 200
    message: str = error["message"]
    return message


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"prompt": ""}, "the prompt is empty: it has 0 tokens"),
        ({"prompt": [[]]}, "the prompt is empty: it has 0 tokens"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": 10**9}, "max_tokens is 1000000000: together 10000000"),
        ({"max_tokens": HUGE}, "max_tokens is 1000"),
        ({"seed": HUGE}, "seed is 1000"),
        ({"top_k": HUGE}, "top_k is 1000"),
        ({"top_k": 10**30}, "top_k is 1000"),
        ({"temperature": HUGE}, "temperature is 1000"),
        ({"temperature": 2.1}, "temperature is 2.1; it must be at least 0.0 and at most 2.0"),
        ({"n": 129}, "n is 129; it must be at least 1 and at most 128"),
        ({"prompt": [512]}, "prompt has token id 512; ids must be at least 0 and at most 511"),
        ({"prompt": [HUGE]}, "prompt has token id 1000"),
        ({"logit_bias": {"9" * 5000: 1}}, "keys must be token ids"),
        ({"logit_bias": {"512": 1}}, "logit_bias has token id 512; ids must be at least 0 and at most 511"),
        ({"stop": ["x" * 5_000_000]}, "stop has a string of 5000000 characters; at most 1024 are allowed"),
        ({"allowed_token_ids": [2], "min_tokens": 3}, "min_tokens is 3, and every allowed token would end"),
        ({"tools": [{}], "best_of": 2}, "best_of is 2"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_limit(
    server: Server, fields: dict[str, Any], words: str
) -> None:
    assert words in refusal(server, 400, json={"prompt": PROMPT, **fields})


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_a_temperature_that_is_no_number_is_refused(server: Server, number: bytes) -> None:
    content = b'{"prompt": "a", "temperature": ' + number + b"}"
    message = refusal(server, 400, content=content, headers={"Content-Type": "application/json"})
    assert message.startswith("temperature is ")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b'{"prompt": "\xff\xfe"}', b'{"prompt": "\\ud800"}', b'{"prompt": ' + b"[" * 100_000],
)
def test_a_body_that_is_no_json_object_in_utf_8_is_refused(server: Server, content: bytes) -> None:
    message = refusal(server, 400, content=content, headers={"Content-Type": "application/json"})
    assert message.startswith("the body is ")


@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions"])
def test_a_prompt_of_10_mb_is_refused_before_it_is_tokenised(server: Server, path: str) -> None:
    text = "word " * 2_000_000
    body = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
    content = json.dumps(body).encode()
    message = refusal(server, 400, path, content=content, headers={"Content-Type": "application/json"})
    assert "maximum context length is 2048 tokens. The prompt has at least 6666" in message


def test_a_body_beyond_the_limit_is_refused_before_it_comes(server: Server) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000000000000\r\n\r\n"
        )
        answer = b""
        while b"allowed" not in answer and (piece := connection.recv(1 << 16)):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"the body has 1000000000000 bytes; at most 33554432 are allowed" in answer


def test_a_conversation_that_the_template_refuses_is_refused_in_its_words(small: Server) -> None:
    with small.client() as client:
        with pytest.raises(openai.BadRequestError, match="the word forbidden is not allowed"):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a forbidden word"}])
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "an allowed word"}], max_tokens=2
        )
        assert answer.choices


def test_a_full_queue_is_refused_with_a_time_to_come_back(small: Server) -> None:
    """Streams hold all the room that there is; when they have left, there is room again."""
    with small.client() as client:
        held = [
            client.completions.create(
                model=MODEL,
                prompt=PROMPT,
                n=ROOM // 2,
                max_tokens=2000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        ]
        body = {"prompt": PROMPT, "n": ROOM // 2 + 1, "max_tokens": 1}
        with small.http() as http:
            refused = http.post(TEXT, json=body)
            for stream in held:
                stream.close()
            assert refused.status_code == 503
            assert refused.json()["error"]["type"] == "ServiceUnavailableError"
            assert f"the limit is {ROOM}" in refused.json()["error"]["message"]
            assert 1 <= int(refused.headers["Retry-After"]) <= 60
            assert small.metric("admission_rejections_total", reason="queue_full") == 1
            wait_for_room(http, body)


def wait_for_room(http: httpx.Client, body: dict[str, Any]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while (status := http.post(TEXT, json=body).status_code) != 200:
        assert status == 503
        assert time.monotonic() < deadline_s


def test_more_samples_than_the_server_ever_holds_are_the_callers_mistake(small: Server) -> None:
    message = refusal(small, 400, json={"prompt": PROMPT, "n": ROOM + 1})
    assert message == f"n is {ROOM + 1}; this server holds at most {ROOM} samples"


def test_200_simultaneous_clients_are_all_answered(server: Server) -> None:
    async def crowd() -> list[int]:
        async with server.async_client() as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(
                        model=MODEL, prompt=f"{number} {PROMPT}", max_tokens=3, extra_body={"ignore_eos": True}
                    )
                    for number in range(200)
                )
            )
        return [answer.usage.completion_tokens for answer in answers if answer.usage is not None]

    assert asyncio.run(crowd()) == [3] * 200
