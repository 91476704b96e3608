"""Requests of clients, recorded by tests/clients/record.py: each is answered in the shape that its dialect has.

Prose in the requests is made up; fields, types and the order of messages are the clients' own.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api.dialects.events import typed_events
from tests.api.server import http_client, serving, settings
from tests.fake_engine import FakeEngine, saying

RECORDED = Path(__file__).parent / "recorded"
CLIENTS = ("aider", "claude-code", "opencode", "vercel")
WHOLE: dict[str, TypeAdapter[Any]] = {
    "completions": TypeAdapter(ChatCompletion),
    "messages": TypeAdapter(Message),
    "responses": TypeAdapter(Response),
}
EVENT: dict[str, TypeAdapter[Any]] = {
    "messages": TypeAdapter(RawMessageStreamEvent),
    "responses": TypeAdapter(ResponseStreamEvent),
}
LAST = {"messages": "message_stop", "responses": "response.completed"}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[httpx.Client]:
    """A server that takes more max_tokens than its context has: opencode asks so, on the route of chats."""
    with serving(engine, settings(shorten_max_tokens=True)) as url, http_client(url) as client:
        yield client


def recorded() -> Iterator[Any]:
    for path in (RECORDED / f"{client}.json" for client in CLIENTS):
        for at, request in enumerate(json.loads(path.read_text(encoding="utf-8"))):
            yield pytest.param(request["path"], request["body"], id=f"{path.stem}-{at}")


def test_every_client_is_recorded() -> None:
    assert set(CLIENTS) <= {path.stem for path in RECORDED.glob("*.json")}


@pytest.mark.parametrize("path, body", [*recorded()])
def test_a_recorded_request_is_answered(http: httpx.Client, engine: FakeEngine, path: str, body: Any) -> None:
    engine.script = saying("Done.")
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    dialect = path.partition("?")[0].rpartition("/")[2]
    if not body.get("stream"):
        WHOLE[dialect].validate_python(answer.json())
    elif dialect == "completions":
        *chunks, end = [line for line in answer.text.split("\n\n") if line]
        assert end == "data: [DONE]"
        for chunk in chunks:
            ChatCompletionChunk.model_validate_json(chunk.removeprefix("data: "))
    else:
        events = typed_events(answer)
        for event in events:
            EVENT[dialect].validate_python(event)
        assert events[-1]["type"] == LAST[dialect]
    (request,) = engine.requests
    assert b"x-anthropic-billing-header" not in bytes(request.prompt_token_ids)


def test_a_session_of_claude_code_begins_with_the_prompt_of_the_last_one(
    http: httpx.Client, engine: FakeEngine
) -> None:
    """The tools and the system prompt are what another session has computed, whatever its first message."""
    (first, *_) = json.loads((RECORDED / "claude-code.json").read_text(encoding="utf-8"))
    body = json.loads(json.dumps(first["body"]))
    body["system"][0]["text"] = body["system"][0]["text"].replace("123", "19e")
    body["messages"][0]["content"][-1]["text"] = "Something else altogether."
    for each in (first["body"], body):
        assert http.post(first["path"], json=each).status_code == 200
    one, other = (bytes(request.prompt_token_ids) for request in engine.requests)
    common = next(at for at, (mine, its) in enumerate(zip(one, other, strict=False)) if mine != its)
    assert common > one.index(b"[user]")
