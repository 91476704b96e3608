"""Numbers and truth values are read as vLLM reads them where nothing is lost, and not otherwise.

No known field is ignored silently: it is honoured, refused by name, or a documented hint.
"""

import logging
from typing import Any

import httpx
import pytest

from faser.api.bodies.chat import ChatBody
from faser.api.bodies.fields import HINTS, UNSUPPORTED_IN_CHATS, UNSUPPORTED_IN_COMPLETIONS
from faser.api.dialects.completions_requests import CompletionBody
from tests.api.server import http_client, serving, settings
from tests.fake_engine import FakeEngine


@pytest.mark.parametrize(
    "field, given, read",
    [
        ("n", "2", 2),
        ("n", 2.0, 2),
        ("n", "2.0", 2),
        ("temperature", "0.5", 0.5),
        ("temperature", 1, 1.0),
        ("top_k", "-1", 0),
        ("ignore_eos", 1, True),
        ("ignore_eos", "true", True),
        ("ignore_eos", 0, False),
        ("seed", "7", 7),
    ],
)
def test_a_value_in_another_spelling_is_the_same_value(
    http: httpx.Client, engine: FakeEngine, field: str, given: Any, read: Any
) -> None:
    assert http.post("/v1/completions", json={"prompt": "hi", field: given}).status_code == 200
    found = getattr(engine.requests[0].sampling, field)
    assert (found, type(found)) == (read, type(read))


def test_a_stream_may_be_asked_for_with_a_one(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "hi", "stream": 1})
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("given", [1.5, "1.5", "x", "", "0x10", "1_000", " 1", "٣", True, "9" * 5000, [1], {}])
def test_what_would_have_to_be_guessed_is_refused(http: httpx.Client, given: Any) -> None:
    answer = http.post("/v1/completions", json={"prompt": "hi", "max_tokens": given})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": HI}, TEXT: {"prompt": "hi"}}


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize("strict", [False, True])
def test_null_is_the_same_as_absent_in_every_known_field(route: str, strict: bool) -> None:
    refused = UNSUPPORTED_IN_CHATS if route == CHAT else UNSUPPORTED_IN_COMPLETIONS
    declared = (ChatBody if route == CHAT else CompletionBody).model_fields
    nulls = dict.fromkeys([*declared, *refused, *HINTS])
    with serving(FakeEngine(), settings(strict=strict)) as url, http_client(url) as http:
        answer = http.post(route, json={**nulls, **BODIES[route]})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "route, neutral",
    [
        (CHAT, {"n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}),
        (CHAT, {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": []}),
        (CHAT, {"response_format": {"type": "text"}, "modalities": ["text"], "bad_words": []}),
        (CHAT, {"include_reasoning": False, "reasoning_effort": "high", "verbosity": "low"}),
        (CHAT, {"priority": 3, "best_of": 1, "logprob_token_ids": [], "watermarking": False}),
        (CHAT, {"include_reasoning": True, "logprobs": False, "top_logprobs": 0, "echo": False}),
        (CHAT, {"reasoning_effort": "none", "documents": []}),
        (CHAT, {"stop": [], "logit_bias": {}, "stop_token_ids": [], "top_k": -1, "priority": 0}),
        (CHAT, {"speculative": {}, "chat_template_kwargs": {}, "structured_outputs": {}}),
        (CHAT, {"stream": False, "stream_options": None, "verbosity": "medium"}),
        (TEXT, {"suffix": "", "echo": False, "best_of": 1, "use_beam_search": False}),
        (TEXT, {"response_format": {"type": "text"}, "spaces_between_special_tokens": True}),
    ],
)
def test_neutral_values_are_accepted(http: httpx.Client, route: str, neutral: dict[str, Any]) -> None:
    answer = http.post(route, json={**BODIES[route], **neutral})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "route, field, value",
    [
        (CHAT, "functions", [{"name": "f"}]),
        (CHAT, "documents", [{"text": "x"}]),
        (CHAT, "chat_template", "{{ messages }}"),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "audio", {"voice": "x"}),
        (CHAT, "web_search_options", {}),
        (TEXT, "guided_decoding_backend", "outlines"),
        (CHAT, "guided_whitespace_pattern", " *"),
        (CHAT, "logprob_token_ids", [5]),
        (TEXT, "repetition_detection", {"max_pattern_size": 3, "min_count": 2}),
        (CHAT, "watermarking", True),
        ("/tokenize", "chat_template", "x"),
        (TEXT, "suffix", "the end"),
        (TEXT, "use_beam_search", True),
        (TEXT, "use_beam_search", 0),
        (TEXT, "length_penalty", 0.5),
        (TEXT, "prompt_embeds", "AAAA"),
        (TEXT, "spaces_between_special_tokens", False),
    ],
)
def test_known_field_that_cannot_be_honoured_is_refused_by_name(
    http: httpx.Client, engine: FakeEngine, route: str, field: str, value: Any
) -> None:
    answer = http.post(route, json={**BODIES.get(route, {"messages": HI}), field: value})
    failure = answer.json()["error"]
    assert (answer.status_code, failure["param"]) == (400, field)
    assert failure["message"].startswith(f"`{field}`")
    assert "is not supported: " in failure["message"]
    assert "speculative decoding" not in failure["message"]
    assert not engine.requests


def test_hints_are_accepted(http: httpx.Client) -> None:
    hints = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "flex",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "prediction": {"type": "content", "content": "x"},
    }
    assert http.post(CHAT, json={"messages": HI, **hints}).status_code == 200


@pytest.mark.parametrize("enabled", [True, False, "auto"])
def test_speculation_is_a_permission_that_changes_nothing(
    http: httpx.Client, engine: FakeEngine, enabled: bool | str
) -> None:
    plain = http.post(CHAT, json={"messages": HI, "seed": 1}).json()
    body = {"messages": HI, "seed": 1, "speculative": {"enabled": enabled, "max_tokens": 4}}
    allowed = http.post(CHAT, json=body, headers={"X-Faser-Speculative": "off"}).json()
    assert plain["choices"] == allowed["choices"]
    first, second = engine.requests
    assert first.sampling == second.sampling


@pytest.mark.parametrize("header", ["off", "auto", "0", "5"])
def test_speculation_header_is_accepted(http: httpx.Client, header: str) -> None:
    answer = http.post(TEXT, json={"prompt": "hi"}, headers={"X-Faser-Speculative": header})
    assert answer.status_code == 200


def test_unknown_field_is_logged_once_and_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "faser.api"), serving(FakeEngine()) as url, http_client(url) as http:
        for _ in range(3):
            assert http.post(TEXT, json={"prompt": "hi", "temprature": 1}).status_code == 200
    assert [record.getMessage() for record in caplog.records] == [
        'requests have the unknown field "temprature", which has no effect'
    ]


def test_callers_cannot_fill_the_log_with_names(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "faser.api"), serving(FakeEngine()) as url, http_client(url) as http:
        http.post(TEXT, json={"prompt": "hi", **{f"field_{i}\n" + "x" * 1000: 1 for i in range(300)}})
    assert len(caplog.records) == 100
    assert all(len(record.getMessage()) < 200 and "\n" not in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("route", [CHAT, TEXT, "/tokenize"])
def test_strict_server_refuses_unknown_fields(route: str) -> None:
    body = BODIES.get(route, {"prompt": "hi"})
    with serving(FakeEngine(), settings(strict=True)) as url, http_client(url) as http:
        answer = http.post(route, json={**body, "temprature": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temprature")


def test_priority_reaches_the_engine_which_may_schedule_by_it() -> None:
    engine = FakeEngine()
    with serving(engine) as url, http_client(url) as http:
        assert http.post(TEXT, json={"prompt": "hi", "priority": -3}).status_code == 200
    assert engine.requests[0].priority == -3
