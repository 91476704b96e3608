"""POST /v1/responses with a fake engine: the official client, fields, refusals."""

from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from faser.errors import EngineError, OverloadError
from tests.api.dialects.events import typed_events
from tests.fake_engine import MAX_MODEL_LEN, FakeEngine, saying

PATH = "/v1/responses"
WEB = {"type": "web_search", "external_web_access": False}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def refused(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post(PATH, json={"input": "hi", **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_a_response_has_the_text_and_repeats_the_request(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying("Hello!", cached=2)
    answer = client.responses.create(
        model="tiny",
        input="hi",
        instructions="Be brief.",
        temperature=0.5,
        max_output_tokens=50,
        metadata={"a": "b"},
        store=True,
        extra_body={"cache_salt": "mine"},
    )
    assert answer.output_text == "Hello!"
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.model, answer.temperature, answer.max_output_tokens) == (
        "completed",
        "tiny",
        0.5,
        50,
    )
    assert answer.metadata == {"a": "b"}
    assert (answer.model_extra or {})["store"] is False
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(b"[system]Be brief.[user]hi[assistant]")
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert answer.usage.output_tokens == 6
    (request,) = engine.requests
    assert bytes(request.prompt_token_ids) == b"[system]Be brief.[user]hi[assistant]"
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, 50)


def test_the_whole_answer_is_what_the_stream_ends_with(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying("Gruezi, wie geht's?")
    body = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]}
    whole = http.post(PATH, json=body, headers={"X-Request-Id": "me"}).json()
    events = typed_events(http.post(PATH, json={**body, "stream": True}, headers={"X-Request-Id": "me"}))
    for event in events:
        EVENT.validate_python(event)
    last = events[-1]["response"]
    for response in (whole, last):
        Response.model_validate(response)
        response.pop("created_at")
        response.pop("completed_at")
    assert last == whole
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"] == "Gruezi, wie geht's?"


def test_the_clients_own_accumulator_agrees(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying("Hello, world")
    with client.responses.stream(model="tiny", input="hi") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Hello, world"


def test_an_answer_cut_by_max_output_tokens_is_incomplete(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying("Hello, world")
    answer = client.responses.create(model="tiny", input="hi", max_output_tokens=5)
    assert (answer.status, answer.output_text) == ("incomplete", "Hello")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_logprobs_come_with_the_text(client: openai.OpenAI, http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying("Hi")
    answer = client.responses.create(
        model="tiny", input="hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    (item,) = answer.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [each.token for each in part.logprobs] == ["H", "i"]
    assert [len(each.top_logprobs) for each in part.logprobs] == [2, 2]
    events = typed_events(http.post(PATH, json={"input": "hi", "top_logprobs": 2, "stream": True}))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [each["token"] for event in deltas for each in event["logprobs"]] == ["H", "i"]


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "--responses-store"),
        ({"conversation": "c"}, "conversation", "stores no conversations"),
        ({"background": True}, "background", "stores no responses"),
        ({"prompt": {"id": "p"}}, "prompt", "stores no prompts"),
        ({"truncation": "oldest"}, "truncation", "auto"),
        ({"truncation": "auto", "input": "x" * 5000}, "input", "maximum context length"),
        ({"include": ["everything"]}, "include", "reasoning.encrypted_content"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_output_tokens": MAX_MODEL_LEN}, "max_output_tokens", "maximum context length"),
        ({"input": "x" * 5000}, "input", "maximum context length"),
        ({"input": []}, "input", "at least one item"),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content", "text parts"),
        ({"top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"temperature": 3}, "temperature", "at most 2"),
        ({"tools": [{"type": "teleport"}]}, "tools.0.type", "no tools of its own"),
        ({"tools": [WEB, {"type": "function", "name": "a b"}]}, "tools.1.name", "128 characters"),
        ({"tools": [WEB, {"type": "function", "name": 5}]}, "tools.1.name", "string"),
        ({"tools": [{"type": "custom"}]}, "tools.0.name", "missing"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools.0.tools", "a list of functions"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]},
            "tools.0.tools.0.type",
            "function",
        ),
        ({"tools": [WEB], "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [WEB], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "function"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "required"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_object"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type", "allowed_tools"),
        ({"n": 2}, "n", "a field of /v1/chat/completions"),
        ({"max_tokens": 5}, "max_tokens", "here it is max_output_tokens"),
        ({"use_beam_search": True}, "use_beam_search", "a field of /v1/chat/completions"),
    ],
)
def test_what_cannot_be_done_is_named(http: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(http, **fields)
    assert error["param"] == param
    assert words in error["message"]
    assert param in error["message"] or "maximum context length" in error["message"]
    for name in ("max_completion_tokens", "messages"):
        assert name not in error["message"]


def test_a_missing_input_is_named(http: httpx.Client) -> None:
    answer = http.post(PATH, json={"model": "tiny"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.responses.create(model="gpt-9", input="hi")


def test_what_asks_for_nothing_is_accepted(http: httpx.Client) -> None:
    neutral = {
        "background": False,
        "previous_response_id": None,
        "truncation": "auto",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "text": {"format": {"type": "text"}},
        "tools": [],
        "max_tool_calls": 3,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "stream_options": {"include_obfuscation": False},
        "n": 1,
        "logprobs": False,
    }
    assert http.post(PATH, json={"input": "hi", **neutral}).status_code == 200


def test_engine_fields_reach_the_engine(http: httpx.Client, engine: FakeEngine) -> None:
    body = {
        "input": "hi",
        "seed": 7,
        "top_k": 5,
        "stop": "x",
        "speculative": {"class": "default", "max_tokens": 2},
    }
    assert http.post(PATH, json=body).status_code == 200
    assert http.post(PATH, json={"input": "hi", "structured_outputs": {"choice": ["a"]}}).status_code == 200
    request, structured = engine.requests
    assert structured.sampling.structured_output is not None
    assert (request.sampling.seed, request.sampling.top_k, request.sampling.stop) == (7, 5, ("x",))
    assert request.speculation.max_tokens == 2


def test_a_full_queue_is_a_503_before_the_stream_begins(http: httpx.Client, engine: FakeEngine) -> None:
    engine.refusals = [OverloadError("the queue is full", retry_after_s=3)]
    answer = http.post(PATH, json={"input": "hi", "stream": True})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")


def test_a_failure_in_the_midst_is_an_event(http: httpx.Client, engine: FakeEngine) -> None:
    def script(request: Any) -> Any:
        yield from list(saying("Hello")(request))[:2]
        yield EngineError("the engine had a bug")

    engine.script = script
    events = typed_events(http.post(PATH, json={"input": "hi", "stream": True}))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"] == "the engine had a bug"


def test_text_options_that_the_request_leaves_out_are_left_out(http: httpx.Client) -> None:
    """The specification has no null for them."""
    plain = http.post(PATH, json={"input": "hi"}).json()
    assert plain["text"] == {"format": {"type": "text"}}
    wanted = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    asked: dict[str, Any] = {"verbosity": "low", "format": wanted}
    told = http.post(PATH, json={"input": "hi", "text": asked}).json()
    assert told["text"] == {
        "verbosity": "low",
        "format": {"description": None, "strict": False, **asked["format"]},
    }


def test_a_demanded_call_wins_over_the_format_of_text(http: httpx.Client, engine: FakeEngine) -> None:
    """As instructor asks for objects."""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    asked = {"format": {"type": "json_schema", "name": "n", "schema": {"const": 1}}}
    choice = {"type": "function", "name": "f"}
    for text in (asked, None):
        answer = http.post(PATH, json={"input": "hi", "tools": [tool], "tool_choice": choice, "text": text})
        assert answer.status_code == 200, answer.text
    both, call = (request.sampling.structured_output for request in engine.requests)
    assert call is not None
    assert both == call
