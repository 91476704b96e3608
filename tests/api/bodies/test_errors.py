"""Every failure has its status, and one shape."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from faser.errors import EngineDiedError, EngineError, OverloadError, TargetError
from faser.types.engine import EngineState
from tests.api.server import http_client, serving, settings
from tests.fake_engine import MAX_MODEL_LEN, FakeEngine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


def error(answer: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """The error of an answer, its shape checked."""
    body = answer.json()
    assert list(body) == ["error"]
    failure: dict[str, Any] = body["error"]
    assert list(failure) == ["message", "type", "param", "code"]
    assert (answer.status_code, failure["code"], failure["type"]) == (status, status, kind), failure
    return failure


def bad(answer: httpx.Response) -> dict[str, Any]:
    return error(answer, 400, "BadRequestError")


@pytest.mark.parametrize(
    "content, words",
    [
        (b"{", "the body is not JSON"),
        (b"", "the body is not JSON"),
        (b'{"prompt": "\xff\xfe"}', "the body is not JSON"),
        (b'{"prompt": "\\ud800"}', "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b"[1, 2]", "the body is [1, 2]; it must be a JSON object"),
        (b'"hi"', 'the body is "hi"; it must be a JSON object'),
        (b"{}", "prompt is missing; it is required"),
    ],
)
def test_body_that_cannot_be_read_is_a_400(http: httpx.Client, content: bytes, words: str) -> None:
    assert words in bad(http.post(TEXT, content=content, headers=JSON))["message"]


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "repetition_penalty"])
def test_numbers_that_are_none_are_refused_by_name(http: httpx.Client, literal: str, field: str) -> None:
    content = f'{{"prompt": "hi", "{field}": {literal}}}'
    failure = bad(http.post(TEXT, content=content, headers=JSON))
    assert failure["param"] == field
    assert f"{field} is" in failure["message"]
    assert "finite number" in failure["message"]


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("temperature", "hot", 'temperature is "hot"; it must be a valid number'),
        ("temperature", True, "temperature is true; it must be a valid number"),
        ("temperature", 3, "temperature is 3.0; it must be at least 0.0 and at most 2.0"),
        ("temperature", -0.1, "temperature is -0.1"),
        ("top_p", 0, "top_p is 0.0; it must be above 0.0 and at most 1.0"),
        ("top_k", -2, "top_k is -2; it must be at least 0"),
        ("min_p", 1.5, "min_p is 1.5"),
        ("n", 0, "n is 0; it must be at least 1"),
        ("n", 1000, "n is 1000"),
        ("n", 1.5, "n is 1.5; it must be a valid integer"),
        ("n", "two", 'n is "two"'),
        ("n", "1.5", "n is 1.5; it must be a valid integer"),
        ("max_tokens", True, "max_tokens is true"),
        ("temperature", "1e999", "temperature is"),
        ("stream", 2, "stream is 2"),
        ("max_tokens", 0, "max_tokens is 0; it must be at least 1"),
        ("max_tokens", -1, "max_tokens is -1"),
        ("max_tokens", 2.5, "max_tokens is 2.5"),
        ("min_tokens", 17, "min_tokens is 17; it must not exceed max_tokens, 16"),
        ("presence_penalty", 2.5, "presence_penalty is 2.5"),
        ("frequency_penalty", -2.5, "frequency_penalty is -2.5"),
        ("repetition_penalty", 0, "repetition_penalty is 0.0"),
        ("logprobs", 21, "logprobs is 21; it must be at least 0 and at most 20"),
        ("logprobs", -1, "logprobs is -1"),
        ("prompt_logprobs", 21, "prompt_logprobs is 21"),
        ("stop", [""], "stop contains an empty string"),
        ("stop", 5, "stop is 5"),
        ("stop", ["x"] * 17, "stop has 17 strings; at most 16 are allowed"),
        ("stop", ["x" * 1025], "stop has a string of 1025 characters; at most 1024 are allowed"),
        ("stop_token_ids", [1] * 1025, "stop_token_ids has 1025 token ids; at most 1024 are allowed"),
        ("logit_bias", {str(i): 1 for i in range(1025)}, "logit_bias has 1025 entries; at most 1024 are allowed"),
        ("seed", "x", 'seed is "x"'),
        ("seed", 2**64, f"seed is {2**64}"),
        ("logit_bias", {"the": 1}, 'logit_bias has the key "the"; keys must be token ids'),
        ("logit_bias", {"the": 1, "5": 1, "-1": 1}, 'logit_bias has the keys "the", "-1"; keys must be token ids'),
        ("logit_bias", {"5": 101}, "logit_bias.5 is 101.0"),
        ("allowed_token_ids", [], "allowed_token_ids is empty"),
        ("best_of", 2, "best_of is 2; it must be absent or equal to n, 1"),
        ("stream", "yes", 'stream is "yes"'),
        ("stream_options", {"include_usage": True}, "stream_options is set but stream is not true"),
        ("truncate_prompt_tokens", 0, f"truncate_prompt_tokens is 0; it must be -1, or from 1 to {MAX_MODEL_LEN}"),
        ("cache_salt", "", 'cache_salt is ""'),
        ("cache_salt", "s" * 257, "… (257 characters); it should have at most 256 characters"),
        ("request_id", "a\nb", "request_id is 'a\\nb'; it must be 1 to 256 printable ASCII characters"),
        ("prompt", "", "the prompt is empty: it has 0 tokens"),
        ("prompt", [], "prompt is an empty list"),
        ("prompt", 5, "prompt is 5; it must be a string, a list of strings"),
        ("prompt", {"text": "x"}, 'prompt is {"text": "x"}'),
        ("prompt", ["a", 5], "prompt.1 is 5"),
        ("prompt", ["a"] * 2049, "prompt has 2049 prompts; at most 2048 are allowed"),
        ("prompt", [5, "a"], 'prompt.1 is "a"'),
        ("prompt", [5, True], "prompt.1 is true"),
        ("prompt", [[5], [6, None]], "prompt.1.1 is null"),
    ],
)
def test_value_out_of_range_is_named_with_its_limit(
    http: httpx.Client, engine: FakeEngine, field: str, value: Any, words: str
) -> None:
    failure = bad(http.post(TEXT, json={"prompt": "hi", field: value}))
    assert words in failure["message"]
    assert failure["param"].split(".")[0] == field
    assert not engine.requests


@pytest.mark.parametrize(
    "body, param",
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": 5, "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "r" * 65, "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal"}]}]}, "messages.0.content.0.refusal"),
        ({"messages": [*HI, {"role": "user"}]}, "messages.1"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0"),
        ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HI, "logprobs": 2}, "logprobs"),
        ({"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": HI, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (
            {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ({"messages": HI, "speculative": {"enabled": "maybe"}}, "speculative.enabled"),
        ({"messages": HI, "speculative": {"gamma": 5}}, "speculative.gamma"),
        ({"messages": HI, "speculative": {"max_tokens": -1}}, "speculative.max_tokens"),
        ({"messages": HI, "speculative": {"slo": {"tpot_ms": "fast"}}}, "speculative.slo.tpot_ms"),
        ({"messages": HI, "speculative": {"slo": {"tpot_ms": 0}}}, "speculative.slo.tpot_ms"),
        ({"messages": HI, "speculative": {"slo": {"ttft": 20}}}, "speculative.slo.ttft"),
        ({"messages": HI, "speculative": {"class": "gold"}}, "speculative.class"),
        ({"messages": HI, "response_format": {"type": "text", "shema": {}}}, "response_format.shema"),
        ({"messages": HI, "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ],
)
def test_chat_body_that_does_not_fit_names_the_path(
    http: httpx.Client, engine: FakeEngine, body: dict[str, Any], param: str
) -> None:
    assert bad(http.post(CHAT, json=body))["param"] == param
    assert not engine.requests


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1"}]}


@pytest.mark.parametrize("arguments", ["[" * 300, '{"a":' * 250, "[" * 202 + "]" * 202, "{", "[1]"])
@pytest.mark.parametrize("route", [CHAT, "/tokenize"])
def test_arguments_of_a_call_that_cannot_be_read_are_text(http: httpx.Client, route: str, arguments: str) -> None:
    assert http.post(route, json=called(arguments)).status_code == 200


def test_a_body_nested_too_deeply_names_the_limit(http: httpx.Client) -> None:
    deep = '{"messages": [], "documents": ' + "[" * 201 + "]" * 201 + "}"
    message = bad(http.post(CHAT, content=deep, headers=JSON))["message"]
    assert message.startswith("the body is not JSON: lists and objects are nested deeper than 201 levels")


def test_arguments_of_a_call_have_the_limits_of_a_body(http: httpx.Client) -> None:
    """A million lists of lists would take a second and 600 MB."""
    answer = http.post(CHAT, json=called("[" + "[]," * 1_000_000 + "[]]"))
    message = error(answer, 413, "RequestTooLargeError")["message"]
    assert message.startswith("messages.1.tool_calls.0.function.arguments has ")
    assert "at most 131072 are allowed" in message


@pytest.mark.parametrize("header", ["fast", "-1", "1.5", "٣"])
def test_speculation_header_is_checked(http: httpx.Client, header: str) -> None:
    headers = [(b"X-Faser-Speculative", header.encode())]
    assert bad(http.post(TEXT, json={"prompt": "hi"}, headers=headers))["param"] == "X-Faser-Speculative"


@pytest.mark.parametrize("prompt", ["x" * (MAX_MODEL_LEN + 1), [7] * (MAX_MODEL_LEN + 1)])
def test_prompt_longer_than_the_context_is_a_400_with_both_numbers(http: httpx.Client, prompt: Any) -> None:
    message = bad(http.post(TEXT, json={"prompt": prompt}))["message"]
    assert "maximum context length" in message
    assert str(MAX_MODEL_LEN) in message


def test_prompt_and_limit_over_the_context_are_a_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096"):
        client.completions.create(model="tiny", prompt="hi", max_tokens=MAX_MODEL_LEN)


@pytest.mark.parametrize("body", [{"prompt": "x" * 10_000_000}, {"prompt": ["y" * 10_000_000]}])
def test_giant_prompt_is_refused_at_once(http: httpx.Client, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    message = bad(http.post(TEXT, content=content, headers=JSON))["message"]
    assert "at least" in message, "it was tokenised"
    assert len(message) < 1000


def test_giant_chat_is_refused_at_once(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "x" * 10_000_000}]
    message = bad(http.post(CHAT, json={"messages": messages}))["message"]
    assert "maximum context length" in message
    assert "at least" in message, "it was tokenised"


def test_unknown_model_is_a_404_that_lists_the_known(http: httpx.Client) -> None:
    failure = error(http.post(TEXT, json={"prompt": "hi", "model": "gpt-9"}), 404, "NotFoundError")
    assert failure["param"] == "model"
    assert "gpt-9" in failure["message"]
    assert "tiny, tiny-alias" in failure["message"]


def test_every_served_name_works_and_the_answer_repeats_it(http: httpx.Client) -> None:
    assert http.post(TEXT, json={"prompt": "hi", "model": "tiny-alias"}).json()["model"] == "tiny-alias"
    assert http.post(TEXT, json={"prompt": "hi", "model": None}).json()["model"] == "tiny"


@pytest.mark.parametrize("route", ["/v1/embeddings", "/pooling", "/score", "/api/chat", "/health/x", "/v1"])
def test_unknown_route_is_a_404_that_names_it(http: httpx.Client, route: str) -> None:
    message = error(http.post(route, json={}), 404, "NotFoundError")["message"]
    assert message.startswith(f"POST {route} not found; available routes: POST /v1/chat/completions, ")
    assert "GET /health" in message


def test_wrong_method_is_a_405_that_names_the_right_one(http: httpx.Client) -> None:
    answer = http.get(CHAT)
    assert "it takes POST" in error(answer, 405, "MethodNotAllowedError")["message"]
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_body_that_is_not_json_is_a_415(http: httpx.Client, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    failure = error(http.post(TEXT, content=b"{}", headers=headers), 415, "UnsupportedMediaTypeError")
    assert "application/json" in failure["message"]


def test_compressed_body_is_a_415(http: httpx.Client) -> None:
    answer = http.post(TEXT, content=b"{}", headers={**JSON, "content-encoding": "gzip"})
    assert "gzip" in error(answer, 415, "UnsupportedMediaTypeError")["message"]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_spelling_of_the_content_type_does_not_matter(http: httpx.Client, content_type: str) -> None:
    answer = http.post(TEXT, content=b'{"prompt": "hi"}', headers={"content-type": content_type})
    assert answer.status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_limit_is_a_413(chunked: bool) -> None:
    content = json.dumps({"prompt": "x" * 5000}).encode()

    def pieces() -> Iterator[bytes]:
        yield content[:3000]
        yield content[3000:]

    with serving(FakeEngine(), settings(max_request_bytes=4000)) as url, http_client(url) as http:
        answer = http.post(TEXT, content=pieces() if chunked else content, headers=JSON)
        assert "at most 4000" in error(answer, 413, "RequestTooLargeError")["message"]
        assert http.post(TEXT, json={"prompt": "hi"}).status_code == 200


@pytest.mark.parametrize("n, fits", [(1, 6), (3, 2)])
def test_more_prompts_than_the_server_ever_holds_are_a_400_before_anything_is_tokenised(
    http: httpx.Client, engine: FakeEngine, n: int, fits: int
) -> None:
    """A 503 would say: try again. It would be as long, and refused, for ever."""
    engine.max_samples = 6
    body = {"prompt": ["x" * 100_000] * (fits + 1), "n": n}
    failure = bad(http.post(TEXT, json=body))
    assert failure["param"] == "prompt"
    assert f"prompt has {fits + 1} prompts and n is {n}, together {n * (fits + 1)} samples" in failure["message"]
    assert "at most 6" in failure["message"]
    assert http.post(TEXT, json={"prompt": ["hi"] * fits, "n": n}).status_code == 200


@pytest.mark.parametrize("beyond", [0, MAX_MODEL_LEN * 40])
def test_a_chat_that_leaves_no_room_names_messages(http: httpx.Client, beyond: int) -> None:
    """One that fills the context exactly is not too long, so the engine alone can say that it leaves no room."""

    def chat(length: int, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "x" * length}]
        return http.post(CHAT, json={"messages": messages, "max_tokens": 40, **fields})

    filling = MAX_MODEL_LEN - chat(0).json()["usage"]["prompt_tokens"]
    assert bad(chat(filling - 1))["param"] == "max_tokens"
    for stream in (False, True):
        failure = bad(chat(filling + beyond, stream=stream))
        assert failure["param"] == "messages"
        assert str(MAX_MODEL_LEN) in failure["message"]


def test_full_queue_is_a_503_with_retry_after(http: httpx.Client, engine: FakeEngine) -> None:
    before = rejections(http, "queue_full")
    engine.refusals = [OverloadError("the queue is full: 8 samples", retry_after_s=3)]
    answer = http.post(CHAT, json={"messages": HI})
    assert "8 samples" in error(answer, 503, "ServiceUnavailableError")["message"]
    assert answer.headers["retry-after"] == "3"
    assert rejections(http, "queue_full") == before + 1


@pytest.mark.parametrize(
    "state",
    [
        EngineState.LOADING,
        EngineState.WARMING,
        EngineState.RESTARTING,
        EngineState.DRAINING,
        EngineState.DEAD,
    ],
)
def test_engine_that_takes_nothing_now_is_a_503_with_the_reason(
    http: httpx.Client, engine: FakeEngine, state: EngineState
) -> None:
    before = rejections(http, state)
    engine.state, engine.state_reason = state, "because of reasons"
    answer = http.post(TEXT, json={"prompt": "hi"})
    assert f"{state}: because of reasons" in error(answer, 503, "ServiceUnavailableError")["message"]
    assert int(answer.headers["retry-after"]) > 0
    assert rejections(http, state) == before + 1


def rejections(http: httpx.Client, reason: str) -> float:
    prefix = f'vllm:admission_rejections_total{{engine="0",model_name="tiny",reason="{reason}"}} '
    return next(
        float(line.removeprefix(prefix)) for line in http.get("/metrics").text.splitlines() if prefix in line
    )


def test_an_engine_that_dies_under_a_request_is_a_503_and_the_supervisor_has_logged_it(
    http: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script = lambda _: [EngineDiedError("request r-1: the engine died (signal 9)", retry_after_s=7)]
    answer = http.post(TEXT, json={"prompt": "hi"})
    failure = error(answer, 503, "ServiceUnavailableError")
    assert failure["message"] == "request r-1: the engine died (signal 9)"
    assert answer.headers["retry-after"] == "7"
    assert not [each for each in caplog.records if "signal 9" in each.getMessage()]


def test_a_bug_that_strikes_one_request_is_a_500_in_the_log(
    http: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script = lambda _: [EngineError("request r-1: its logits are not finite")]
    error(http.post(TEXT, json={"prompt": "hi"}), 500, "InternalServerError")
    assert len([each for each in caplog.records if "not finite" in each.getMessage()]) == 1


@pytest.mark.parametrize("prompt", ["one", ["one", "two"]])
def test_bug_is_a_500_that_names_the_request_and_shows_no_trace(
    http: httpx.Client, engine: FakeEngine, prompt: str | list[str]
) -> None:
    engine.script = lambda _: [ZeroDivisionError("secret")]
    answer = http.post(TEXT, json={"prompt": prompt}, headers={"X-Request-Id": "my-id"})
    failure = error(answer, 500, "InternalServerError")
    assert "my-id" in failure["message"]
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] == "my-id"
    assert engine.num_open == 0


def test_template_that_raises_is_a_400_with_its_words() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with serving(FakeEngine(), settings(chat_template=template)) as url, http_client(url) as http:
        assert "roles must alternate" in bad(http.post(CHAT, json={"messages": HI}))["message"]


@pytest.mark.parametrize("field", ["prompt_logprobs", "logprobs"])
def test_operator_can_lower_the_limit_of_alternatives(field: str) -> None:
    with serving(FakeEngine(), settings(max_logprobs=2)) as url, http_client(url) as http:
        assert "at most 2" in bad(http.post(TEXT, json={"prompt": "hi", field: 3}))["message"]


def test_long_values_are_cut_in_messages(http: httpx.Client) -> None:
    message = bad(http.post(TEXT, json={"prompt": "hi", "temperature": "x" * 100_000}))["message"]
    assert len(message) < 300


def test_a_target_that_cannot_be_met_is_a_429_that_says_when_to_come_back(
    http: httpx.Client, engine: FakeEngine
) -> None:
    engine.refusals = [TargetError("the TTFT target of 200 ms cannot be met now", retry_after_s=7)]
    answer = http.post(CHAT, json={"messages": HI})
    assert error(answer, 429, "RateLimitError")["message"] == "the TTFT target of 200 ms cannot be met now"
    assert answer.headers["retry-after"] == "7"
    assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
