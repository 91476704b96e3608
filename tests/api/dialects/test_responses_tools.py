"""Tools of Responses: what the model is shown, what comes back as which item, and what is left out."""

import json
from typing import Any

import httpx
import openai
import pytest

from faser.api.dialects.conversion import IGNORED_HEADER
from faser.api.dialects.responses_tools import SHAPES, read_tools
from faser.errors import RequestError
from tests.api.server import http_client, serving
from tests.fake_engine import FakeEngine, byte_tokenizer, saying

PATH = "/v1/responses"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
)
ASK: dict[str, Any] = {"type": "function", "name": "ask", "parameters": {"type": "object", "properties": {}}}
TEAM: dict[str, Any] = {"type": "namespace", "name": "team", "description": "", "tools": [ASK]}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"},
}
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
    {"type": "mcp", "server_label": "m", "server_url": "http://127.0.0.1:1"},
    {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "linux"},
    {"type": "shell", "environment": {"type": "container_auto"}},
]


def called(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def functions_of(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each["function"] for each in read_tools(tools).functions]


def test_functions_of_a_namespace_have_their_full_names() -> None:
    tools = [ASK, TEAM, {**TEAM, "name": "mcp__docs__"}]
    assert [each["name"] for each in functions_of(tools)] == ["ask", "team__ask", "mcp__docs__ask"]


def test_a_custom_tool_is_a_function_of_one_string_with_its_grammar_described() -> None:
    (function,) = functions_of([PATCH])
    text = function["parameters"]["properties"]["input"]
    assert (function["name"], function["description"], function["strict"]) == ("patch", "Edits files.", True)
    assert text["type"] == "string"
    assert "start: /x+/" in text["description"]
    assert "pattern" not in text
    assert function["parameters"]["required"] == ["input"]


def test_the_regular_expression_of_a_custom_tool_is_enforced() -> None:
    (function,) = functions_of([{**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"}}])
    assert function["parameters"]["properties"]["input"]["pattern"] == "^(?:a|b)$"


@pytest.mark.parametrize("kind", SHAPES)
def test_tools_of_shells_and_patches_are_functions_with_checked_arguments(kind: str) -> None:
    (function,) = functions_of([{"type": kind}])
    assert (function["name"], function["strict"]) == (kind, True)
    required = {"local_shell": ["command"], "shell": ["commands"], "apply_patch": ["type", "path"]}[kind]
    assert function["parameters"]["required"] == required


def test_what_openai_runs_itself_is_left_out_and_said_in_a_header(http: httpx.Client) -> None:
    for stream in (False, True):
        answer = http.post(PATH, json={"input": "hi", "tools": [ASK, *HOSTED, TEAM], "stream": stream})
        assert answer.status_code == 200, answer.text
        assert answer.headers[IGNORED_HEADER] == ", ".join(
            f"tools.{at} ({tool['type']})" for at, tool in enumerate(HOSTED, start=1)
        )
    whole = http.post(PATH, json={"input": "hi", "tools": [ASK]})
    assert IGNORED_HEADER not in whole.headers


def test_a_response_repeats_the_tools_as_the_request_has_them(http: httpx.Client) -> None:
    answer = http.post(PATH, json={"input": "hi", "tools": [*HOSTED, TEAM, PATCH, ASK]}).json()
    declared = {"description": None, "strict": None, **ASK}
    assert answer["tools"] == [*HOSTED, TEAM, PATCH, declared]


def test_the_model_is_shown_functions_and_their_calls_come_back_as_items() -> None:
    """Both directions: the answer's items, sent back, are the calls that the model made."""
    calls: list[tuple[str, dict[str, Any]]] = [
        ("team__ask", {}),
        ("patch", {"input": 'a "b"\n'}),
        ("local_shell", {"command": ["ls"], "working_directory": "/tmp"}),
        ("shell", {"commands": ["ls"]}),
        ("apply_patch", {"type": "delete_file", "path": "a"}),
    ]
    engine = FakeEngine(tokenizer=byte_tokenizer(TEMPLATE))
    engine.script = saying("\n".join(called(*call) for call in calls))
    tools = [TEAM, PATCH, *({"type": kind} for kind in SHAPES)]
    with serving(engine) as url, http_client(url) as http:
        first = http.post(PATH, json={"input": "hi", "tools": tools})
        assert first.status_code == 200, first.text
        output = first.json()["output"]
        outputs = [
            {"type": "function_call_output", "call_id": output[0]["call_id"], "output": "asked"},
            {"type": "custom_tool_call_output", "call_id": output[1]["call_id"], "output": "patched"},
            {"type": "local_shell_call_output", "id": output[2]["call_id"], "output": "listed"},
            {
                "type": "shell_call_output",
                "call_id": output[3]["call_id"],
                "output": [
                    {"stdout": "out", "stderr": "err", "outcome": {"type": "exit", "exit_code": 3}},
                    {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
                ],
            },
            {"type": "apply_patch_call_output", "call_id": output[4]["call_id"], "status": "completed"},
        ]
        engine.script = saying("done")
        items = [{"role": "user", "content": "hi"}, *output, *outputs]
        second = http.post(PATH, json={"input": items, "tools": tools})
        assert second.status_code == 200, second.text
    assert [item["type"].removesuffix("_call") for item in output] == ["function", "custom_tool", *SHAPES]
    assert (output[0]["name"], output[0]["namespace"]) == ("ask", "team")
    described, prompt = (bytes(request.prompt_token_ids).decode() for request in engine.requests)
    for name, _ in calls:
        assert f'"name": "{name}"' in described
    sent = [json.loads(each.partition("</tool_call>")[0]) for each in prompt.split("<tool_call>")[1:]]
    assert sent == [{"arguments": arguments, "name": name} for name, arguments in calls]
    for text in ("asked", "patched", "listed", "out\nerr\nexit code 3\ntimed out", "completed"):
        assert f"[tool]{text}" in prompt


@pytest.mark.parametrize(
    "choice, name",
    [
        ({"type": "function", "name": "ask"}, "ask"),
        ({"type": "function", "name": "ask", "namespace": "team"}, "team__ask"),
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "shell"}, "shell"),
    ],
)
def test_a_choice_names_the_function_of_its_tool(choice: dict[str, Any], name: str) -> None:
    tools = read_tools([ASK, TEAM, PATCH, {"type": "shell"}])
    assert tools.choice(choice) == ({"type": "function", "function": {"name": name}}, tools.functions)


def test_allowed_tools_may_be_of_every_kind_and_hosted_ones_are_left_out() -> None:
    tools = read_tools([ASK, TEAM, PATCH, *HOSTED, {"type": "apply_patch"}])
    entries = [{"type": "apply_patch"}, {"type": "web_search"}, {"type": "custom", "name": "patch"}]
    mode, allowed = tools.choice({"type": "allowed_tools", "mode": "required", "tools": entries})
    assert mode == "required"
    assert [each["function"]["name"] for each in allowed] == ["apply_patch", "patch"]
    with pytest.raises(RequestError, match=r'tool_choice.tools.0.name is "other"'):
        tools.choice({"type": "allowed_tools", "tools": [{"type": "function", "name": "other"}]})


def test_two_tools_of_one_name_are_refused_by_their_places(client: openai.OpenAI) -> None:
    tools: Any = [HOSTED[0], {**ASK, "name": "team__ask"}, TEAM]
    with pytest.raises(openai.BadRequestError, match=r"tools.2.tools.0.name is team__ask") as caught:
        client.responses.create(model="tiny", input="hi", tools=tools)
    assert caught.value.param == "tools.2.tools.0.name"
