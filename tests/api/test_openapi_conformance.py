"""Requests made from the server's own OpenAPI document: none fails the server, and no answer is undocumented.

schemathesis makes bodies that fit the schemas and bodies that break them. Hypothesis cuts the bytes of an answer's
stream, and of a body, anywhere.
"""

import http.client
import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from tests.fake_engine import FakeEngine, saying
from tests.waiting import PATIENCE_S

_CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]
_FEW = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
_ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/invocations"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/load"),
]


@pytest.fixture(scope="module")
def schema(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: str(mode.value))
@pytest.mark.parametrize("method, path", _ROUTES)
def test_no_body_fails_the_server_or_gets_an_undocumented_answer(
    schema: Any, engine: FakeEngine, method: str, path: str, mode: Any
) -> None:
    engine.script = saying("Hi!", tokens_per_step=3)
    operation = schema[path][method]
    if mode is schemathesis.GenerationMode.NEGATIVE and method == "GET":
        pytest.skip("a route without parameters has no wrong ones")

    @_FEW
    @given(case=operation.as_strategy(generation_mode=mode))
    def conforms(case: Any) -> None:
        case.call_and_validate(checks=_CHECKS, timeout=PATIENCE_S)

    conforms()


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=24)


@_FEW
@given(spoken=_TEXTS, tokens_per_step=st.integers(1, 7), cuts=st.lists(st.integers(1, 40), max_size=60))
def test_a_stream_cut_anywhere_is_the_whole_answer(
    url: str, shared_engine: FakeEngine, spoken: str, tokens_per_step: int, cuts: list[int]
) -> None:
    """The text has line ends, quotes and code points of every length; each step may end within one."""
    shared_engine.reset(saying(spoken, tokens_per_step=tokens_per_step))
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    raw = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S).content
    pieces, at = [], 0
    for size in cuts:
        pieces.append(raw[at : at + size])
        at += size
    events = _Events()
    for piece in [*pieces, raw[at:]]:
        events.feed(piece)
    *chunks, done = events.found
    assert done == "[DONE]"
    texts = [json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks]
    whole = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": False}, timeout=PATIENCE_S).json()
    assert "".join(texts) == whole["choices"][0]["message"]["content"]


class _Events:
    """A reader of server-sent events as the standard says: events end at an empty line, fields are lines."""

    def __init__(self) -> None:
        self._held = b""
        self.found: list[str] = []

    def feed(self, piece: bytes) -> None:
        *whole, self._held = (self._held + piece).split(b"\n\n")
        for event in whole:
            lines = event.decode().split("\n")
            assert all(line.startswith("data: ") for line in lines)
            self.found.append("\n".join(line.removeprefix("data: ") for line in lines))


@_FEW
@given(
    raw=st.binary(max_size=300)
    | st.text(alphabet='{}[]",:0123456789.eE+-ntrufalsx\\ ', max_size=80).map(str.encode),
    sizes=st.lists(st.integers(1, 50), max_size=8),
)
def test_any_bytes_in_any_pieces_get_an_answer_in_the_shape_of_errors(
    url: str, shared_engine: FakeEngine, raw: bytes, sizes: list[int]
) -> None:
    shared_engine.reset()
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(raw[at : at + size])
        at += size
    body = (piece for piece in [*pieces, raw[at:]] if piece)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"}, encode_chunked=True)
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    connection.close()
    assert answer.status == 400, error
    assert set(error) == {"message", "type", "param", "code"}
