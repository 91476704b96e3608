"""Answers of gpt-oss in chat completions, as the official client sees them, whole and as streams.

Bugs these tests have been seen to catch: analysis that is content; a call without its header; the end of a message
in the content; a call that ends an answer with stop; reasoning under one of its two names.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from tests.api.dialects.test_chat_tools import HI, TOOLS, chatting, streamed
from tests.fake_engine import saying

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant{# <|channel|> #}"
)
THOUGHT = "<|channel|>analysis<|message|>Hm, 1 < 2.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
YES = "<|channel|>final<|message|>Yes."
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'
WEATHER = [("weather", {"city": "Oslo"})]
Answer = tuple[str, str, list[tuple[str, Any]], str | None]


@contextmanager
def answering(text: str, tokens_per_step: int) -> Iterator[openai.OpenAI]:
    with chatting(TEMPLATE) as (client, engine):
        engine.script = saying(text, tokens_per_step=tokens_per_step)
        yield client


def whole(client: openai.OpenAI, **fields: Any) -> Answer:
    """(reasoning, content, calls, finish reason)."""
    (choice,) = client.chat.completions.create(model="tiny", messages=HI, **fields).choices
    message: Any = choice.message
    reasoning = message.to_dict().get("reasoning_content")
    assert message.to_dict().get("reasoning") == reasoning
    calls = [(each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls or ()]
    return reasoning or "", message.content or "", calls, choice.finish_reason


def in_pieces(client: openai.OpenAI, **fields: Any) -> Answer:
    reasoning, content, calls, finish = streamed(client, **fields)
    return reasoning, content, [(each["name"], json.loads(each["arguments"])) for each in calls], finish


@pytest.mark.parametrize("tokens_per_step", [1, 1000])
@pytest.mark.parametrize(
    ("text", "fields", "wanted"),
    [
        (THOUGHT + YES, {}, ("Hm, 1 < 2.", "Yes.", [], "stop")),
        (THOUGHT + YES + "<|return|>", {"tools": TOOLS}, ("Hm, 1 < 2.", "Yes.", [], "stop")),
        (THOUGHT + CALL, {"tools": TOOLS}, ("Hm, 1 < 2.", "", WEATHER, "tool_calls")),
        (
            THOUGHT + PREAMBLE + CALL + "<|call|>",
            {"tools": TOOLS},
            ("Hm, 1 < 2.", "I look.", WEATHER, "tool_calls"),
        ),
        (THOUGHT + YES, {"max_tokens": 34}, ("Hm, ", "", [], "length")),
        (THOUGHT + YES, {"max_tokens": len(THOUGHT + YES) - 2}, ("Hm, 1 < 2.", "Ye", [], "length")),
    ],
)
def test_channels_become_fields_whole_and_streamed(
    text: str, fields: dict[str, Any], wanted: Answer, tokens_per_step: int
) -> None:
    with answering(text, tokens_per_step) as client:
        assert whole(client, **fields) == wanted
        assert in_pieces(client, **fields) == wanted


def test_a_stream_names_its_reasoning_twice_and_shows_no_header() -> None:
    with answering(THOUGHT + CALL, 1) as client:
        deltas = [
            chunk.choices[0].delta.to_dict()
            for chunk in client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, stream=True)
        ]
    reasoning = [each["reasoning_content"] for each in deltas if "reasoning_content" in each]
    assert reasoning == [each["reasoning"] for each in deltas if "reasoning" in each]
    assert len(reasoning) > 5, "a stream shows reasoning as it comes"
    assert "<|" not in json.dumps(deltas)


def test_reasoning_that_is_not_wanted_is_left_out_and_its_tokens_count() -> None:
    with answering(THOUGHT + YES, 1) as client:
        answer = client.chat.completions.create(model="tiny", messages=HI, extra_body={"include_reasoning": False})
    message = answer.choices[0].message
    assert (message.to_dict().get("reasoning_content"), message.content) == (None, "Yes.")
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(THOUGHT) - len("<|start|>assistant")
    assert answer.usage.completion_tokens == len(THOUGHT + YES)
