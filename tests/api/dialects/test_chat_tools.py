"""Tools and reasoning in chat completions, as the official client sees them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from faser.types.sampling import StructuredOutput, StructureKind
from tests.api.server import openai_client, serving, settings
from tests.fake_engine import FakeEngine, byte_tokenizer, saying

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
TOOLS: list[Any] = [WEATHER, {"type": "function", "function": {"name": "now"}}]
HI: list[Any] = [{"role": "user", "content": "hi"}]
NATIVE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def prompt_of(engine: FakeEngine) -> str:
    return bytes(engine.requests[-1].prompt_token_ids).decode()


def structure_of(engine: FakeEngine) -> Any:
    structure = engine.requests[-1].sampling.structured_output
    if structure is None:
        return None
    assert structure.kind is StructureKind.STRUCTURAL_TAG
    return json.loads(structure.text)["format"]


@contextmanager
def chatting(template: str = NATIVE, **options: Any) -> Iterator[tuple[openai.OpenAI, FakeEngine]]:
    engine = FakeEngine(tokenizer=byte_tokenizer(template))
    with serving(engine, replace(settings(), **options)) as url, openai_client(url) as client:
        yield client, engine


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, str, list[dict[str, Any]], str | None]:
    """(reasoning, content, calls, finish reason), put together as clients do."""
    reasoning, content, finish = "", "", None
    calls: dict[int, dict[str, Any]] = {}
    for chunk in client.chat.completions.create(model="tiny", messages=HI, stream=True, **fields):
        (choice,) = chunk.choices
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.index not in calls:
                assert call.id is not None
                assert call.type == "function"
                calls[call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
            calls[call.index]["arguments"] += call.function.arguments or ""
        finish = choice.finish_reason or finish
    return reasoning, content, [calls[index] for index in sorted(calls)], finish


def test_calls_are_in_the_message_and_end_it_with_tool_calls(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying(f"I look.\n{CALL}\n{NOW}")
    (choice,) = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.tool_calls is not None
    assert [
        (call.type, call.function.name, call.function.arguments)  # type: ignore[union-attr]
        for call in choice.message.tool_calls
    ] == [("function", "weather", '{"city": "Oslo"}'), ("function", "now", "{}")]
    assert len({call.id for call in choice.message.tool_calls}) == 2


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
def test_streams_tell_the_same_as_the_message(
    client: openai.OpenAI, engine: FakeEngine, tokens_per_step: int
) -> None:
    engine.script = saying(f"I look.\n{CALL}\n{NOW}", tokens_per_step=tokens_per_step)
    _, content, calls, finish = streamed(client, tools=TOOLS)
    assert (content, finish) == ("I look.", "tool_calls")
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]


def test_an_answer_without_calls_is_as_without_tools(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying("Just text.")
    (choice,) = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == (
        "stop",
        "Just text.",
        None,
    )
    assert streamed(client, tools=TOOLS) == ("", "Just text.", [], "stop")


@pytest.mark.parametrize("max_tokens", [25, 30, 45, 60, 66, 70])
def test_a_call_that_is_cut_off_is_the_same_call_in_message_and_stream_and_the_answer_ends_with_length(
    client: openai.OpenAI, engine: FakeEngine, max_tokens: int
) -> None:
    engine.script = saying(CALL)
    (choice,) = client.chat.completions.create(
        model="tiny", messages=HI, tools=TOOLS, max_tokens=max_tokens
    ).choices
    calls = [(each.function.name, each.function.arguments) for each in choice.message.tool_calls or ()]  # type: ignore[union-attr]
    arguments = '{"city": "Oslo"}'
    begun = CALL[:max_tokens].partition('"arguments": ')[2][: len(arguments)]
    named = "weather" in CALL[:max_tokens]
    assert calls == ([("weather", begun)] if named else [])
    assert (choice.finish_reason, choice.message.content) == ("length", None if named else CALL[:max_tokens])
    _, content, streamed_calls, finish = streamed(client, tools=TOOLS, max_tokens=max_tokens)
    assert (content, finish) == (choice.message.content or "", "length")
    assert [(each["name"], each["arguments"]) for each in streamed_calls] == calls


ITEMS = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% for key, value in call.function.arguments | items %}[{{ key }}={{ value }}]{% endfor %}"
    "{% endfor %}{% endfor %}{{ tools }}"
)


@pytest.mark.parametrize(
    "template, written",
    [
        (NATIVE, '{"name": "weather", "arguments": "{\\"city\\": \\"Pa"}'),
        (ITEMS, '[arguments={"city": "Pa]'),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", '"arguments": "{\\"city\\": \\"Pa"'),
    ],
)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_history_with_a_call_that_was_cut_off_is_given_to_the_template_as_text(
    route: str, template: str, written: str
) -> None:
    cut = '{"city": "Pa'
    match route:
        case "/v1/chat/completions":
            function = {"name": "weather", "arguments": cut}
            call: Any = {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
            }
            body: Any = {"messages": [*HI, call, {"role": "tool", "tool_call_id": "1", "content": "?"}]}
        case "/v1/responses":
            call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": cut}
            body = {"input": [*HI, call, {"type": "function_call_output", "call_id": "1", "output": "?"}]}
        case _:
            call = {"type": "tool_use", "id": "1", "name": "weather", "input": cut}
            result = {"type": "tool_result", "tool_use_id": "1", "content": "?"}
            turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
            body = {"messages": [*HI, *turns], "max_tokens": 5}
    engine = FakeEngine(tokenizer=byte_tokenizer(template))
    with serving(engine) as url:
        answer = httpx.post(f"{url}{route}", json={"model": "tiny", **body})
    assert (answer.status_code, written in prompt_of(engine)) == (200, True), answer.text


def test_a_model_whose_template_knows_no_tools_is_informed_of_them(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.script = saying(CALL)
    history: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
                {"id": "2", "type": "function", "function": {"name": "now", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "noon"}]},
    ]
    client.chat.completions.create(model="tiny", messages=history, tools=TOOLS)
    prompt = prompt_of(engine)
    assert prompt.startswith("[system]Be brief.\n\nYou may call functions.")
    assert json.dumps(WEATHER) in prompt
    assert (
        f"[assistant]{CALL}\n{NOW}[user]<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon" in prompt
    )


def test_a_template_that_knows_tools_gets_them_and_the_calls_as_objects() -> None:
    with chatting() as (client, engine):
        call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        client.chat.completions.create(
            model="tiny",
            messages=[*HI, {"role": "assistant", "content": "", "tool_calls": [call]}],  # type: ignore[list-item]
            tools=TOOLS,
        )
        assert prompt_of(engine) == (
            json.dumps(TOOLS) + '[user]hi[assistant]<tool_call>{"name": "now", "arguments": {}}</tool_call>'
        )


def test_without_a_choice_of_tools_none_are_offered(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying(CALL)
    (choice,) = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, tool_choice="none").choices
    assert "weather" not in prompt_of(engine)
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")


def tag(name: str, schema: Any) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "}\n</tool_call>",
    }


EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
CLOSED = {**PARAMETERS, "additionalProperties": False}


@pytest.mark.parametrize(
    "fields, names, single, finish",
    [
        ({"tool_choice": "required"}, ("weather", "now"), False, "tool_calls"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ("weather", "now"), True, "tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, ("weather",), True, "stop"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "weather"}}],
                    },
                }
            },
            ("weather",),
            False,
            "tool_calls",
        ),
    ],
)
def test_demanded_calls_are_enforced_by_a_grammar(
    client: openai.OpenAI, engine: FakeEngine, fields: Any, names: tuple[str, ...], single: bool, finish: str
) -> None:
    engine.script = saying(CALL)
    (choice,) = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, **fields).choices
    assert choice.finish_reason == finish
    assert choice.message.tool_calls is not None
    schemas = {"weather": CLOSED, "now": EMPTY}
    assert structure_of(engine) == {
        "type": "tags_with_separator",
        "tags": [tag(name, schemas[name]) for name in names],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": single,
    }


def test_strict_functions_are_enforced_when_the_model_calls_them(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    strict = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}, TOOLS[1]]  # type: ignore[dict-item]
    client.chat.completions.create(model="tiny", messages=HI, tools=strict)
    assert structure_of(engine) == {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [tag("weather", CLOSED), tag("now", {"type": "object"})],
        "at_least_one": False,
        "stop_after_first": False,
    }
    client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
    assert structure_of(engine) is None


def test_a_format_without_json_is_replaced_where_calls_are_demanded() -> None:
    with chatting(tool_call_parser="pythonic", reasoning_parser="none") as (client, engine):
        engine.script = saying("[now()]")
        (choice,) = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS).choices
        assert choice.finish_reason == "tool_calls"
        engine.script = saying(NOW)
        (choice,) = client.chat.completions.create(
            model="tiny", messages=HI, tools=TOOLS, tool_choice="required"
        ).choices
        assert choice.finish_reason == "tool_calls"
        assert structure_of(engine)["tags"][1] == tag("now", EMPTY)


def test_special_tokens_of_the_format_are_shown_to_the_parser_only_when_needed(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
    assert engine.requests[-1].sampling.skip_special_tokens


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"tools": [{}]}, "tools.0.type", "required"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type", "custom"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "a b"),
        ({"tools": [*TOOLS, TOOLS[1]]}, "tools.2.function.name", "tools.1 has too"),
        ({"tools": [TOOLS[1]] * 1025}, "tools", "1024"),
        ({"tool_choice": "required"}, "tool_choice", "no tools were given"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice", "sometimes"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "fly"}}, "tools": TOOLS},
            "tool_choice.function.name",
            "the functions in tools are weather, now",
        ),
        (
            {
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
                "tools": TOOLS,
            },
            "tool_choice.allowed_tools.tools",
            "empty",
        ),
    ],
)
def test_tools_that_cannot_be_are_refused(http: httpx.Client, fields: Any, param: str, words: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HI, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]


def test_auto_can_be_forbidden_and_needs_a_known_format() -> None:
    for template, options in (
        (NATIVE, {"enable_auto_tool_choice": False}),
        ("{{ tools }}{{ messages[0].content }}", {}),
    ):
        with chatting(template, **options) as (client, engine):
            with pytest.raises(openai.BadRequestError, match="tool_choice is auto"):
                client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
            engine.script = saying(NOW)
            (choice,) = client.chat.completions.create(
                model="tiny", messages=HI, tools=TOOLS, tool_choice="required"
            ).choices
            assert choice.message.tool_calls is not None


@pytest.mark.parametrize("tokens_per_step", [1, 5, 1000])
def test_reasoning_has_fields_of_its_own(tokens_per_step: int) -> None:
    """A step of many tokens ends the reasoning and begins the content, as an accepted draft does."""
    with chatting(NATIVE + "{# </think> #}") as (client, engine):
        engine.script = saying("<think>\nHm.\n</think>\n\nYes.", tokens_per_step=tokens_per_step)
        answer = client.chat.completions.create(model="tiny", messages=HI)
        message: Any = answer.choices[0].message
        assert (message.reasoning_content, message.reasoning, message.content) == ("Hm.", "Hm.", "Yes.")
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == 20
        assert streamed(client) == ("Hm.", "Yes.", [], "stop")
        hidden = client.chat.completions.create(
            model="tiny", messages=HI, extra_body={"include_reasoning": False}
        ).choices[0]
        assert "reasoning_content" not in hidden.message.to_dict()
        assert hidden.message.content == "Yes."


def test_without_a_reasoning_parser_the_marks_stay() -> None:
    with chatting(NATIVE + "{# </think> #}", reasoning_parser="none") as (client, engine):
        engine.script = saying("<think>Hm.</think>Yes.")
        (choice,) = client.chat.completions.create(model="tiny", messages=HI).choices
        assert choice.message.content == "<think>Hm.</think>Yes."


def test_thinking_can_be_switched_off_for_one_request() -> None:
    with chatting() as (client, engine):
        engine.script = saying("Yes </think>.")
        (choice,) = client.chat.completions.create(
            model="tiny", messages=HI, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
        ).choices
        assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")
        assert choice.message.content == "Yes </think>."


def test_a_structure_begins_after_the_reasoning() -> None:
    with chatting() as (client, engine):
        client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, tool_choice="required")
        reasoned, plain = structure_of(engine)["elements"]
        assert plain["type"] == "tags_with_separator"
        thought, gap, calls = reasoned["elements"]
        assert (thought["begin"], thought["end"], calls) == ("<think>", "</think>", plain)
        assert gap == {"type": "regex", "pattern": "\\n*"}
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        client.chat.completions.create(
            model="tiny", messages=HI, tools=TOOLS, tool_choice="required", extra_body=off
        )
        assert structure_of(engine) == plain


def test_values_of_structures_can_be_combined() -> None:
    from faser.api.requests.tool_use import _as_format

    for kind, text, form in (
        (StructureKind.JSON_OBJECT, "", {"type": "json_schema", "json_schema": {"type": "object"}}),
        (StructureKind.JSON, '{"type": "null"}', {"type": "json_schema", "json_schema": {"type": "null"}}),
        (StructureKind.REGEX, "a+", {"type": "regex", "pattern": "a+"}),
        (StructureKind.GRAMMAR, "start: A", {"type": "grammar", "grammar": "start: A"}),
        (StructureKind.CHOICE, '["a"]', {"type": "or", "elements": [{"type": "const_string", "value": "a"}]}),
        (StructureKind.STRUCTURAL_TAG, '{"format": {"type": "any_text"}}', {"type": "any_text"}),
    ):
        assert _as_format(StructuredOutput(kind=kind, text=text)) == form
