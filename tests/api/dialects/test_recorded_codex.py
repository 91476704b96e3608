"""Requests of Codex CLI as it sends them, each the last of a loop of tools; tests/clients/test_codex.py runs it.

Words of prompts, descriptions and outputs are made up; fields, tools, items and their order are Codex's.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api.dialects.events import typed_events
from tests.api.server import http_client, serving, settings
from tests.fake_engine import FakeEngine, byte_tokenizer, saying

RECORDED = json.loads((Path(__file__).parent / "recorded" / "codex.json").read_text(encoding="utf-8"))
BODIES: dict[str, dict[str, Any]] = {each["model"]: each["body"] for each in RECORDED["requests"]}
LEFT_OUT = {"tiny": "tools.8 (web_search)", "gpt-5.5": "tools.8 (tool_search), tools.9 (web_search)"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def codex() -> Iterator[tuple[httpx.Client, FakeEngine]]:
    engine = FakeEngine(tokenizer=byte_tokenizer(TEMPLATE))
    with serving(engine) as url, http_client(url) as http:
        yield http, engine


@pytest.mark.parametrize("model", BODIES)
def test_a_request_is_answered_and_its_history_is_the_prompt(
    codex: tuple[httpx.Client, FakeEngine], model: str
) -> None:
    http, engine = codex
    engine.reset()
    engine.script = saying("Done.")
    answer = http.post("/v1/responses", json=BODIES[model])
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-faser-ignored"] == LEFT_OUT[model]
    events = typed_events(answer)
    for event in events:
        EVENT.validate_python(event)
    assert events[-1]["type"] == "response.completed"
    prompt = bytes(engine.requests[0].prompt_token_ids).decode()
    shown = [each.partition("</tool>")[0] for each in prompt.split("<tool>")[1:]]
    assert "exec_command" in shown
    assert not {"web_search", "tool_search"} & set(shown)
    assert ("apply_patch" in shown) is (model == "gpt-5.5")
    assert ("multi_agent_v1__spawn_agent" in shown) is (model == "tiny")
    items = [item for item in BODIES[model]["input"] if item["type"].endswith("_call")]
    called = [json.loads(each.partition("</tool_call>")[0]) for each in prompt.split("<tool_call>")[1:]]
    assert [call["arguments"] for call in called] == [
        {"input": item["input"]} if "input" in item else json.loads(item["arguments"]) for item in items
    ]
    names = [f"{item['namespace']}__{item['name']}" if "namespace" in item else item["name"] for item in items]
    assert [call["name"] for call in called] == names
    assert prompt.count("[tool]") == len(items)


@pytest.mark.parametrize(
    "model, name, arguments, expected",
    [
        ("tiny", "exec_command", {"cmd": "ls"}, {"type": "function_call", "name": "exec_command"}),
        (
            "tiny",
            "multi_agent_v1__close_agent",
            {"target": "a"},
            {"type": "function_call", "name": "close_agent", "namespace": "multi_agent_v1"},
        ),
        (
            "gpt-5.5",
            "apply_patch",
            {"input": "*** Begin Patch\n*** End Patch"},
            {
                "type": "custom_tool_call",
                "name": "apply_patch",
                "input": "*** Begin Patch\n*** End Patch",
            },
        ),
    ],
)
def test_a_call_is_the_item_that_codex_runs(
    codex: tuple[httpx.Client, FakeEngine], model: str, name: str, arguments: Any, expected: dict[str, str]
) -> None:
    http, engine = codex
    engine.reset()
    engine.script = saying(f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>")
    events = typed_events(http.post("/v1/responses", json=BODIES[model]))
    (item,) = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert {key: item.get(key) for key in expected} == expected
    assert "namespace" in item if "namespace" in expected else "namespace" not in item
    if item["type"] == "function_call":
        assert json.loads(item["arguments"]) == arguments


@pytest.mark.parametrize("model", BODIES)
def test_every_field_is_known_to_a_strict_server(model: str) -> None:
    engine = FakeEngine(tokenizer=byte_tokenizer(TEMPLATE))
    with serving(engine, settings(strict=True)) as url, http_client(url) as http:
        answer = http.post("/v1/responses", json=BODIES[model])
    assert answer.status_code == 200, answer.text
