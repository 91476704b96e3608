"""POST /v1/messages and count_tokens with a fake engine: the official client, fields, errors."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from faser.api.middleware.key_limits import KeyLimits
from faser.errors import EngineError, OverloadError
from faser.types.answer import FinishReason, RequestOutput
from faser.types.engine import EngineState
from faser.types.request import Request
from tests.api.dialects.events import typed_events
from tests.api.server import http_client, serving, settings
from tests.fake_engine import MAX_MODEL_LEN, FakeEngine, delta, saying
from tests.waiting import PATIENCE_S

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI: list[Any] = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": HI}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def shared_claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def claude(shared_claude: anthropic.Anthropic, engine: FakeEngine) -> anthropic.Anthropic:
    del engine  # reset before the first request
    return shared_claude


def refusal(answer: httpx.Response) -> dict[str, Any]:
    """The error, in Anthropic's shape."""
    body = answer.json()
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"type", "message"}
    return error


def test_a_message_is_answered_and_counted(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.script = saying("Hello!")
    answer = claude.messages.create(
        model="tiny", max_tokens=50, messages=HI, system="Be brief.", extra_body={"temperature": 0.5, "top_k": 3}
    )
    assert [block.text for block in answer.content if block.type == "text"] == ["Hello!"]
    assert (answer.stop_reason, answer.role, answer.model) == ("end_turn", "assistant", "tiny")
    assert answer.usage.input_tokens == len(b"[system]Be brief.[user]hi[assistant]")
    assert answer.usage.output_tokens == 6
    (request,) = engine.requests
    assert bytes(request.prompt_token_ids) == b"[system]Be brief.[user]hi[assistant]"
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.max_tokens) == (0.5, 3, 50)


def test_the_clients_own_accumulator_agrees_with_the_whole_message(
    claude: anthropic.Anthropic, engine: FakeEngine
) -> None:
    engine.script = saying("Gruezi mitenand")
    whole = claude.messages.create(model="tiny", max_tokens=50, messages=HI)
    with claude.messages.stream(model="tiny", max_tokens=50, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Gruezi mitenand"
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_every_event_has_the_published_type(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying("Hello")
    events = typed_events(http.post(PATH, json={**BODY, "stream": True}))
    for event in events:
        EVENT.validate_python(event)
    assert [event["type"] for event in events[:2]] == ["message_start", "content_block_start"]
    assert events[-1] == {"type": "message_stop"}


def test_the_stop_sequence_that_ended_it_is_named(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    def script(request: Request) -> Iterator[RequestOutput]:
        ended = delta(request, 0, b"one ", finish_reason=FinishReason.STOP, stop_reason="END")
        yield RequestOutput(request_id=request.request_id, deltas=(ended,))

    engine.script = script
    answer = claude.messages.create(model="tiny", max_tokens=50, messages=HI, stop_sequences=["END", "X"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert engine.requests[0].sampling.stop == ("END", "X")


def test_max_tokens_is_a_reason_to_stop(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.script = saying("Hello, world")
    answer = claude.messages.create(model="tiny", max_tokens=5, messages=HI)
    assert answer.stop_reason == "max_tokens"


def test_text_of_the_assistant_at_the_end_is_continued(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    claude.messages.create(
        model="tiny", max_tokens=5, messages=[*HI, {"role": "assistant", "content": "The answer is"}]
    )
    assert bytes(engine.requests[0].prompt_token_ids) == b"[user]hi[assistant]The answer is"


def test_tokens_are_counted_as_the_message_counts_them(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "grüezi"}]}]
    counted = claude.messages.count_tokens(model="tiny", messages=messages, system="Be brief.")
    answered = claude.messages.create(model="tiny", max_tokens=5, messages=messages, system="Be brief.")
    assert (
        counted.input_tokens == answered.usage.input_tokens == len("[system]Be brief.[user]grüezi[assistant]") + 1
    )
    engine.state = EngineState.DRAINING
    assert claude.messages.count_tokens(model="tiny", messages=messages).input_tokens > 0


def test_cached_tokens_are_counted_apart(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying("Hello", cached=4)
    counted = http.post(PATH, json={**BODY, "cache_salt": "mine"}).json()["usage"]
    assert (counted["cache_read_input_tokens"], counted["input_tokens"]) == (4, len("[user]hi[assistant]") - 4)
    shared = http.post(PATH, json=BODY).json()["usage"]
    assert (shared["cache_read_input_tokens"], shared["input_tokens"]) == (0, len("[user]hi[assistant]"))


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "maximum context length"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type"),
        ({"stop_sequences": [""]}, "stop_sequences contains an empty string"),
        ({"temperature": 3}, "temperature is 3"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"n": 2}, "`n` is not supported: it is a field of /v1/chat/completions"),
        ({"stop": ["x"]}, "`stop` is not supported: here it is stop_sequences"),
    ],
)
def test_what_cannot_be_done_is_named(http: httpx.Client, fields: dict[str, Any], words: str) -> None:
    answer = http.post(PATH, json={**BODY, **fields})
    assert answer.status_code == 400
    error = refusal(answer)
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_errors_of_every_layer_have_the_dialects_shape(engine: FakeEngine) -> None:
    chosen = settings(api_keys=("key",), key_limits=KeyLimits(requests_per_minute=6), max_request_bytes=1000)
    with serving(engine, chosen) as url, http_client(url) as http:
        key = {"x-api-key": "key"}
        expected: list[tuple[httpx.Response, int, str]] = [
            (http.post(PATH, json=BODY), 401, "authentication_error"),
            (http.post(PATH, json=BODY, headers={"x-api-key": "wrong"}), 401, "authentication_error"),
            (http.post(PATH, json={**BODY, "model": "x"}, headers=key), 404, "not_found_error"),
            (http.get(PATH, headers=key), 405, "invalid_request_error"),
            (http.post(PATH, content=b"{", headers=key), 415, "invalid_request_error"),
            (http.post(PATH, json={**BODY, "system": "x" * 1000}, headers=key), 413, "request_too_large"),
        ]
        assert http.post(PATH, json=BODY, headers=key).status_code == 200
        engine.refusals = [OverloadError("the queue is full")]
        expected += [
            (http.post(PATH, json=BODY, headers=key), 503, "overloaded_error"),
            (http.post(PATH, json=BODY, headers=key), 429, "rate_limit_error"),
        ]
        for answer, status, kind in expected:
            assert (answer.status_code, refusal(answer)["type"]) == (status, kind), answer.text
        assert "error" in http.get("/nowhere").json()
        assert "type" not in http.get("/nowhere").json()


def test_a_failure_in_the_midst_is_an_event(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    def script(request: Request) -> Iterator[Any]:
        yield from list(saying("Hello")(request))[:2]
        yield EngineError("the engine had a bug")

    engine.script = script
    with pytest.raises(anthropic.APIStatusError, match="the engine had a bug"):
        list(claude.messages.create(model="tiny", max_tokens=50, messages=HI, stream=True))


def test_what_asks_for_nothing_is_accepted(http: httpx.Client) -> None:
    neutral: dict[str, Any] = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "thinking": {"type": "disabled"},
        "tools": [],
        "container": None,
        "stop_sequences": [],
    }
    answer = http.post(PATH, json={**BODY, **neutral}, headers={"anthropic-beta": "x", "anthropic-version": "y"})
    assert answer.status_code == 200, answer.text
    Message.model_validate(answer.json())


def test_optional_keys_that_anthropic_leaves_out_are_absent(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying("Hello")
    whole = http.post(PATH, json=BODY).json()
    assert whole["content"] == [{"type": "text", "text": "Hello"}]
    started, begun = typed_events(http.post(PATH, json={**BODY, "stream": True}))[:2]
    assert begun["content_block"] == {"type": "text", "text": ""}
    for message in (whole, started["message"]):
        absent = {name for name, value in message.items() if value is None}
        assert absent <= {"stop_reason", "stop_sequence"}


def test_max_tokens_beyond_the_context_is_lowered(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying("x" * MAX_MODEL_LEN)
    answer = http.post(PATH, json={**BODY, "max_tokens": 32 * MAX_MODEL_LEN}).json()
    left = MAX_MODEL_LEN - len("[user]hi[assistant]")
    assert engine.requests[0].sampling.max_tokens == left
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", left)


SERVER_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 9, "display_height_px": 9},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "mcp_toolset", "mcp_server_name": "m"},
]
WEATHER = {"name": "weather", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}


def test_tools_that_anthropic_defines_are_left_out_and_named(http: httpx.Client, engine: FakeEngine) -> None:
    answer = http.post(PATH, json={**BODY, "tools": [WEATHER, *SERVER_TOOLS]})
    assert answer.status_code == 200, answer.text
    named = answer.headers["x-faser-ignored"].split(", ")
    assert named == [f"tools.{at} ({tool['type']})" for at, tool in enumerate(SERVER_TOOLS, 1)]
    assert "x-faser-ignored" not in http.post(PATH, json={**BODY, "tools": [WEATHER]}).headers
    with_tools, alone = engine.requests
    assert with_tools.prompt_token_ids == alone.prompt_token_ids
    nothing_else = http.post(PATH, json={**BODY, "tools": SERVER_TOOLS, "tool_choice": {"type": "auto"}})
    assert nothing_else.status_code == 200, nothing_else.text
    assert bytes(engine.requests[-1].prompt_token_ids) == b"[user]hi[assistant]"


# What Anthropic's clients send beside messages, with the name that the answer's header has for it.
EXTRAS: list[tuple[dict[str, Any], str]] = [
    (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        "context_management.edits.0 (clear_thinking_20251015)",
    ),
    ({"container": {"id": "c", "skills": []}}, "container (field)"),
    ({"mcp_servers": [{"type": "url", "url": "x", "name": "m"}]}, "mcp_servers (field)"),
    ({"fallbacks": "default"}, "fallbacks (field)"),
    ({"speed": "fast"}, "speed (field)"),
    ({"thinking": {"type": "adaptive", "effort": "x"}}, "thinking.effort (field)"),
    (
        {"output_config": {"effort": "xhigh", "task_budget": {"type": "tokens", "total": 5}}},
        "output_config.task_budget",
    ),
    ({"tools": [{"type": "x\r\nx-evil: 1", "name": "bash"}]}, "tools.0 (unknown)"),
    ({"output_config": {"\u00fc\r\n": 1}}, "unknown (field)"),
]


@pytest.mark.parametrize("fields, named", EXTRAS)
@pytest.mark.parametrize("path", [PATH, COUNT])
def test_what_has_no_effect_is_taken_and_named(
    path: str, fields: dict[str, Any], named: str, http: httpx.Client
) -> None:
    answer = http.post(path, json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-faser-ignored"].startswith(named)
    assert "x-evil" not in answer.headers


def test_what_has_no_effect_is_logged_once(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    body = {**BODY, "tools": SERVER_TOOLS[:1], **EXTRAS[0][0]}
    with serving(engine) as url, http_client(url) as http, caplog.at_level("WARNING", "faser.api"):
        for _ in range(3):
            assert http.post(PATH, json=body).status_code == 200
    assert [record.getMessage() for record in caplog.records if record.name == "faser.api"] == [
        "requests have tools of type web_search_20250305, which has no effect",
        "requests have context_management of type clear_thinking_20251015, which has no effect",
    ]


def test_hints_are_not_named(http: httpx.Client) -> None:
    hints: dict[str, Any] = {
        "betas": ["x"],
        "cache_control": {"type": "ephemeral"},
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive", "display": "summarized"},
        "context_management": {"edits": []},
    }
    answer = http.post(PATH, json={**BODY, **hints})
    assert answer.status_code == 200, answer.text
    assert "x-faser-ignored" not in answer.headers


BILLING = "x-anthropic-billing-header: cc_version=1.2.3.{}; cc_entrypoint=cli;"


def test_a_billing_line_is_not_part_of_the_prompt(http: httpx.Client, engine: FakeEngine) -> None:
    lasting = {"type": "text", "text": "Be brief."}
    for system in (
        [{"type": "text", "text": BILLING.format("123")}, lasting],
        [{"type": "text", "text": BILLING.format("19e")}, lasting],
        [lasting],
    ):
        http.post(PATH, json={**BODY, "system": system})
    first, second, without = (request.prompt_token_ids for request in engine.requests)
    assert first == second == without
    http.post(PATH, json={**BODY, "system": [{"type": "text", "text": BILLING.format("5")}]})
    assert bytes(engine.requests[-1].prompt_token_ids) == b"[user]hi[assistant]"
    http.post(PATH, json={**BODY, "system": [lasting, {"type": "text", "text": BILLING.format("5")}]})
    assert b"cc_version" in bytes(engine.requests[-1].prompt_token_ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [WEATHER, *SERVER_TOOLS]},
        {"tools": [WEATHER], "tool_choice": {"type": "none"}},
        {"tools": [WEATHER], "tool_choice": {"type": "any"}},
        {"system": [{"type": "text", "text": BILLING.format("123")}, {"type": "text", "text": "Be brief."}]},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
        {"messages": [*HI, {"role": "assistant", "content": "So"}]},
        {"max_tokens": 10 * MAX_MODEL_LEN, "stream": False, "temperature": 0.5, "stop_sequences": ["x"]},
    ],
)
def test_the_count_is_that_of_the_request(http: httpx.Client, fields: dict[str, Any]) -> None:
    counted = http.post(COUNT, json={**BODY, **fields}).json()["input_tokens"]
    assert counted == http.post(PATH, json={**BODY, **fields}).json()["usage"]["input_tokens"]
