"""What /render says of a prompt is what the engine gets with the same body. Oracle: the engine's requests."""

from typing import Any

import httpx
import pytest

from faser.types.engine import EngineState
from tests.fake_engine import FakeEngine

CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Größe?"}]},
    {
        "messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        "temperature": 0.3,
        "max_tokens": 5,
    },
    {"messages": [{"role": "user", "content": "a long one " * 9}], "truncate_prompt_tokens": 20},
]


@pytest.mark.parametrize("body", CHATS)
def test_a_rendered_chat_is_the_prompt_of_its_answer(
    http: httpx.Client, engine: FakeEngine, body: dict[str, Any]
) -> None:
    rendered = http.post("/v1/chat/completions/render", json=body, headers={"X-Request-Id": "mine"}).json()
    assert not engine.requests
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert rendered["token_ids"] == list(engine.requests[-1].prompt_token_ids)
    assert (rendered["model"], rendered["request_id"]) == ("tiny", "mine")


@pytest.mark.parametrize("prompt", ["né", ["one", "two"], [5, 6, 7], [[1, 2], [3]]])
def test_rendered_prompts_are_those_of_the_completions(
    http: httpx.Client, engine: FakeEngine, prompt: Any
) -> None:
    rendered = http.post("/v1/completions/render", json={"prompt": prompt}).json()
    assert http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).status_code == 200
    assert [each["token_ids"] for each in rendered] == [list(each.prompt_token_ids) for each in engine.requests]


@pytest.mark.parametrize("route, body", [("chat/completions", CHATS[0]), ("completions", {"prompt": "a"})])
def test_what_the_route_refuses_its_rendering_refuses_too(
    http: httpx.Client, engine: FakeEngine, route: str, body: dict[str, Any]
) -> None:
    for more in (
        {"model": "other"},
        {"suffix": "x", "mm_processor_kwargs": {"a": 1}},
        {"truncate_prompt_tokens": 0},
    ):
        answers = [http.post(f"/v1/{route}{end}", json=body | more) for end in ("", "/render")]
        assert answers[0].status_code == answers[1].status_code >= 400
        assert answers[0].json() == answers[1].json()
    engine.state = EngineState.RESTARTING
    assert http.post(f"/v1/{route}/render", json=body).status_code == 503
