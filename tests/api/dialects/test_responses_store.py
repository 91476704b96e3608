"""Responses that are kept: bounded, found by their owner only, got, deleted and continued."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from faser.api.dialects.responses_store import ResponseStore
from tests.api.dialects.events import typed_events
from tests.api.server import http_client, openai_client, serving, settings
from tests.fake_engine import FakeEngine, saying

PATH = "/v1/responses"
KEYS = ("one", "two")


def response(name: str, text: str = "") -> dict[str, Any]:
    return {"id": name, "output": [{"type": "message", "role": "assistant", "content": text}]}


def test_a_store_is_bounded_and_what_was_not_used_for_longest_goes_first() -> None:
    store = ResponseStore(4 << 10)
    for name in ("a", "b", "c"):
        store.put(None, response(name), [])
    assert store.get(None, "a") is not None
    store.put(None, response("d"), [])
    assert [store.get(None, name) is not None for name in "abcd"] == [True, False, True, True]
    for at in range(100):
        store.put(None, response(f"n{at}", "x" * 700), [{"role": "user", "content": "y" * 700}])
    kept = [at for at in range(100) if store.get(None, f"n{at}") is not None]
    assert kept == [99]


def test_a_response_larger_than_the_store_is_not_kept_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = ResponseStore(4 << 10)
    store.put(None, response("small"), [])
    with caplog.at_level(logging.WARNING, "faser.api"):
        store.put(None, response("large", "x" * 4096), [])
    assert (store.get(None, "large"), store.get(None, "small") is not None) == (None, True)
    assert "--responses-store is 4096 bytes" in caplog.text


def test_what_is_deleted_makes_room() -> None:
    store = ResponseStore(3 << 10)
    for at in range(50):
        store.put(None, response("first"), [])
        store.put(None, response(f"{at}"), [])
        assert store.get(None, "first") is not None
        assert store.delete(None, f"{at}")
        assert not store.delete(None, f"{at}")
        assert store.delete(None, "first")


def test_a_conversation_is_its_items_and_the_output() -> None:
    store = ResponseStore(1 << 20)
    items = [{"role": "user", "content": "hi"}]
    store.put(1, response("a", "hello"), items)
    assert store.conversation(1, "a") == [*items, *response("a", "hello")["output"]]
    assert (store.conversation(2, "a"), store.conversation(None, "a"), store.get(2, "a")) == (None, None, None)
    assert not store.delete(2, "a")


@pytest.fixture
def keeping() -> Iterator[tuple[str, FakeEngine]]:
    engine = FakeEngine()
    with serving(engine, settings(responses_store_bytes=1 << 20, api_keys=KEYS)) as url:
        yield url, engine


def prompt_of(engine: FakeEngine) -> str:
    return bytes(engine.requests[-1].prompt_token_ids).decode()


def test_a_response_is_got_continued_and_deleted(keeping: tuple[str, FakeEngine]) -> None:
    url, engine = keeping
    with openai_client(url, "one") as client:
        engine.script = saying("Hello.")
        first = client.responses.create(model="tiny", input="hi", instructions="Be brief.")
        assert (first.model_extra or {})["store"] is True
        got = client.responses.retrieve(first.id)
        assert got == first
        engine.script = saying("Bob.")
        second = client.responses.create(model="tiny", input="Who?", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert prompt_of(engine) == "[user]hi[assistant]Hello.[user]Who?[assistant]"
        client.responses.create(model="tiny", input="And?", previous_response_id=second.id, instructions="Now.")
        assert prompt_of(engine) == (
            "[system]Now.[user]hi[assistant]Hello.[user]Who?[assistant]Bob.[user]And?[assistant]"
        )
        client.responses.delete(first.id)
        for ask in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                ask(first.id)
        with pytest.raises(openai.BadRequestError, match="there is no such response") as caught:
            client.responses.create(model="tiny", input="Who?", previous_response_id=first.id)
        assert caught.value.param == "previous_response_id"
        assert client.responses.retrieve(second.id).output_text == "Bob."


def test_another_key_does_not_find_it(keeping: tuple[str, FakeEngine]) -> None:
    url, _ = keeping
    with openai_client(url, "one") as client, openai_client(url, "two") as other:
        made = client.responses.create(model="tiny", input="hi")
        for ask in (other.responses.retrieve, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.BadRequestError):
            other.responses.create(model="tiny", input="hi", previous_response_id=made.id)
        assert client.responses.retrieve(made.id).id == made.id


def test_the_id_of_a_kept_response_is_not_the_clients_choice(keeping: tuple[str, FakeEngine]) -> None:
    url, _ = keeping
    with http_client(url) as http:
        headers = {"Authorization": "Bearer one", "X-Request-Id": "guess-me"}
        answers = [http.post(PATH, json={"input": "hi"}, headers=headers).json() for _ in range(2)]
        assert all("guess-me" not in answer["id"] for answer in answers)
        assert answers[0]["id"] != answers[1]["id"]


def test_a_stream_is_kept_as_it_ended_and_store_false_is_not(keeping: tuple[str, FakeEngine]) -> None:
    url, engine = keeping
    engine.script = saying("Hello, world")
    with http_client(url) as http:
        headers = {"Authorization": "Bearer one"}

        def ended(**fields: Any) -> dict[str, Any]:
            sent = http.post(PATH, json={"input": "hi", "stream": True, **fields}, headers=headers)
            response: dict[str, Any] = typed_events(sent)[-1]["response"]
            return response

        for fields in ({}, {"max_output_tokens": 5}):
            last = ended(**fields)
            assert http.get(f"{PATH}/{last['id']}", headers=headers).json() == last
        last = ended(store=False)
        assert last["store"] is False
        assert http.get(f"{PATH}/{last['id']}", headers=headers).status_code == 404


def test_without_a_store_nothing_is_found_and_the_answer_says_how_to_have_one(http: httpx.Client) -> None:
    made = http.post(PATH, json={"input": "hi", "store": True}).json()
    assert made["store"] is False
    for ask in (http.get, http.delete):
        answer = ask(f"{PATH}/{made['id']}")
        assert answer.status_code == 404
        assert "--responses-store" in answer.json()["error"]["message"]


def test_input_tokens_are_those_that_the_response_counts(keeping: tuple[str, FakeEngine]) -> None:
    url, engine = keeping
    tool: Any = {"type": "custom", "name": "f", "description": "does f"}
    hosted: Any = {"type": "web_search"}
    with openai_client(url, "one") as client:
        made = client.responses.create(model="tiny", input="hi")
        fields: Any = {"input": "And?", "previous_response_id": made.id, "tools": [tool, hosted]}
        counted = client.responses.input_tokens.with_raw_response.count(model="tiny", **fields)
        num_requests = len(engine.requests)
        answer = client.responses.create(model="tiny", **fields)
    assert answer.usage is not None
    assert json.loads(counted.content) == {
        "object": "response.input_tokens",
        "input_tokens": answer.usage.input_tokens,
    }
    assert counted.headers["x-faser-ignored"] == "tools.1 (web_search)"
    assert num_requests == 1
