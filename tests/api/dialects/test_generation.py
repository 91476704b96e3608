"""Deadlines: who may set one, which holds, how a request that misses it ends; max_tokens beyond the context."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from faser.errors import DeadlineError
from faser.types.request import Request
from tests.api.server import http_client, serving, settings
from tests.fake_engine import MAX_MODEL_LEN, FakeEngine, Step, saying

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"prompt": "hi"},
}


def limit_of(engine: FakeEngine) -> float | None:
    """Seconds that the last request was given."""
    last = engine.requests[-1]
    return None if last.deadline_s is None else round(last.deadline_s - last.arrival_s, 6)


@pytest.mark.parametrize("route", BODIES)
def test_without_a_timeout_there_is_no_deadline(http: httpx.Client, engine: FakeEngine, route: str) -> None:
    assert http.post(route, json=BODIES[route]).status_code == 200
    assert limit_of(engine) is None


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(
    "server, field, header, expected",
    [
        (None, 2.5, None, 2.5),
        (None, None, "2.5", 2.5),
        (None, 3, "2", 2.0),
        (None, 2, "3", 2.0),
        (5.0, None, None, 5.0),
        (5.0, 2, None, 2.0),
        (5.0, 1000, "1000", 5.0),
    ],
)
def test_the_shortest_of_server_field_and_header_holds(
    route: str, server: float | None, field: float | None, header: str | None, expected: float
) -> None:
    engine = FakeEngine()
    with serving(engine, settings(request_timeout_s=server)) as url, http_client(url) as http:
        body = BODIES[route] | ({} if field is None else {"timeout": field})
        headers = {} if header is None else {"X-Request-Timeout": header}
        assert http.post(route, json=body, headers=headers).status_code == 200
    assert limit_of(engine) == expected


@pytest.mark.parametrize("value", [0, -1])
def test_a_timeout_that_is_no_time_is_refused(http: httpx.Client, value: float) -> None:
    answer = http.post(TEXT, json={"prompt": "hi", "timeout": value})
    assert answer.status_code == 400
    assert (
        answer.json()["error"]["message"] == f"timeout is {float(value)}; it must be a number of seconds above 0"
    )
    assert answer.json()["error"]["param"] == "timeout"


@pytest.mark.parametrize("value", ["0", "-3", "soon", "inf", "nan", ""])
def test_a_header_that_is_no_time_is_refused(http: httpx.Client, value: str) -> None:
    answer = http.post(TEXT, json={"prompt": "hi"}, headers={"X-Request-Timeout": value})
    assert answer.status_code == 400
    assert "it must be a number of seconds above 0" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_before_the_first_token_is_a_504(http: httpx.Client, engine: FakeEngine, stream: bool) -> None:
    engine.script = lambda _: iter([DeadlineError("the request was not finished within 2 s, its deadline")])
    answer = http.post(TEXT, json={"prompt": "hi", "stream": stream})
    assert answer.status_code == 504
    assert answer.json()["error"] == {
        "message": "the request was not finished within 2 s, its deadline",
        "type": "GatewayTimeoutError",
        "param": None,
        "code": 504,
    }


def test_a_deadline_within_a_stream_ends_it_with_the_error(http: httpx.Client, engine: FakeEngine) -> None:
    def script(request: Request) -> Iterator[Step]:
        yield from itertools.islice(saying("Hello!", tokens_per_step=2)(request), 1)
        yield DeadlineError("the request was not finished within 2 s")

    engine.script = script
    answer = http.post(TEXT, json={"prompt": "hi", "stream": True})
    assert answer.status_code == 200
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == 504


FIELDS = [
    (CHAT, "max_tokens"),
    (CHAT, "max_completion_tokens"),
    (TEXT, "max_tokens"),
    ("/v1/responses", "max_output_tokens"),
]


@pytest.mark.parametrize("route, field", FIELDS)
@pytest.mark.parametrize("shortens", [False, True])
def test_a_setting_lowers_max_tokens_to_what_the_prompt_leaves(route: str, field: str, shortens: bool) -> None:
    engine, body = FakeEngine(), BODIES.get(route, {"input": "hi"})
    with serving(engine, settings(shorten_max_tokens=shortens)) as url, http_client(url) as http:
        fits, exceeds = (http.post(route, json=body | {field: asked}) for asked in (7, 9 * MAX_MODEL_LEN))
        if not shortens:
            assert (fits.status_code, exceeds.status_code) == (200, 400)
            message = exceeds.json()["error"]["message"]
            assert f"{field} is {9 * MAX_MODEL_LEN}: together" in message
            assert "Ask for at most" in message
            assert "--shorten-max-tokens" in message
            assert exceeds.json()["error"]["param"] == field
            return
        assert (fits.status_code, exceeds.status_code) == (200, 200)
        full = http.post(route, json=body | {field: 9 * MAX_MODEL_LEN, next(iter(body)): _longer(body)})
    limits = [request.sampling.max_tokens for request in engine.requests]
    assert limits == [7, MAX_MODEL_LEN - len(engine.requests[1].prompt_token_ids)]
    assert (full.status_code, "maximum context length" in full.text) == (400, True)


def _longer(body: dict[str, Any]) -> Any:
    """The prompt of a body, far beyond the context."""
    text = "x" * 2 * MAX_MODEL_LEN
    return [{"role": "user", "content": text}] if "messages" in body else text


def test_each_prompt_of_a_completion_has_what_it_leaves() -> None:
    engine = FakeEngine()
    with serving(engine, settings(shorten_max_tokens=True)) as url, http_client(url) as http:
        answer = http.post(TEXT, json={"prompt": ["a", "a" * 90], "max_tokens": 2 * MAX_MODEL_LEN})
    assert answer.status_code == 200, answer.text
    assert [request.sampling.max_tokens for request in engine.requests] == [MAX_MODEL_LEN - 1, MAX_MODEL_LEN - 90]
