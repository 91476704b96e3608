"""Calls in every format, whole and in pieces. Oracles: values written by hand, and the parse of the whole text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.api.parsing.events import (
    ContentText,
    ToolCallAbandoned,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from faser.api.parsing.registry import TOOL_PARSERS
from tests.api.parsing.answers import events_of, parsed, raw, splits_at_every_byte
from tests.api.parsing.samples import NO_CALLS, SAMPLES

CASES = [
    pytest.param(name, *sample, id=f"{name}-{title}")
    for name, samples in SAMPLES.items()
    for title, sample in samples.items()
]
TEXTS = [(name, sample[0]) for name, samples in SAMPLES.items() for sample in samples.values()]
REFUSED = [(name, text) for name, texts in NO_CALLS.items() for text in texts]


@pytest.mark.parametrize("name, text, content, calls", CASES)
def test_calls_and_content_are_what_the_model_wrote(name: str, text: str, content: str, calls: object) -> None:
    assert parsed(name, [text]) == (content, calls)


@pytest.mark.parametrize("name, text", TEXTS + REFUSED)
def test_pieces_cut_at_every_byte_give_what_the_whole_text_gives(name: str, text: str) -> None:
    whole = raw(name, [text])
    for pieces in splits_at_every_byte(text):
        assert raw(name, pieces) == whole, pieces


@pytest.mark.parametrize("name, text", REFUSED)
def test_text_that_is_no_call_stays_content_to_the_last_character(name: str, text: str) -> None:
    assert parsed(name, [text]) == (text, [])


@pytest.mark.parametrize("name, text", TEXTS)
def test_an_answer_cut_off_anywhere_keeps_its_complete_calls_and_the_rest_as_text(name: str, text: str) -> None:
    _, calls = parsed(name, [text])
    for at in range(len(text)):
        kept, found = parsed(name, [text[:at]])
        assert found == calls[: len(found)]
        if not found:
            assert kept == text[:at]


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_calls_lose_nothing_and_give_the_same_in_pieces(name: str, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([sample[0] for sample in SAMPLES[name].values()] + list(NO_CALLS[name])))
    at = data.draw(st.integers(0, len(text)))
    removed = data.draw(st.integers(0, 3))
    inserted = data.draw(st.text(st.sampled_from('{}[]()<>"\\,:=/ \nab1é'), max_size=3))
    damaged = text[:at] + inserted + text[at + removed :]
    whole = raw(name, [damaged])
    size = data.draw(st.integers(1, 7))
    assert raw(name, [damaged[i : i + size] for i in range(0, len(damaged), size)]) == whole
    for _, arguments in whole[1]:
        assert isinstance(json.loads(arguments), dict)
    if not whole[1]:
        assert whole[0] == damaged


def test_every_format_has_samples() -> None:
    assert set(SAMPLES) == set(NO_CALLS) == set(TOOL_PARSERS)


@pytest.mark.parametrize("name", SAMPLES)
def test_arguments_are_sent_while_the_model_writes_them(name: str) -> None:
    text, _, _ = SAMPLES[name]["two"] if "two" in SAMPLES[name] else SAMPLES[name]["two in a list"]
    events = events_of(name, list(text))
    pieces = [event.text for event in events if isinstance(event, ToolCallArguments) and event.index == 0]
    assert len(pieces) > 2
    kinds = [type(event) for event in events if not isinstance(event, ToolCallArguments | ContentText)]
    assert kinds == [ToolCallStart, ToolCallEnd] * 2


def test_a_call_that_turns_out_to_be_none_is_abandoned_and_its_text_follows() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"]} <tool_call>{"name": "now"}</tool_call>'
    events = events_of("hermes", [text])
    kinds = [type(event) for event in events if not isinstance(event, ToolCallArguments)]
    assert kinds == [ToolCallStart, ToolCallAbandoned, ContentText, ContentText, ToolCallStart, ToolCallEnd]
    message = collect(events)
    assert message.content == '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"]}'
    assert [event.index for event in events if isinstance(event, ToolCallStart)] == [0, 1]
    assert [call.name for call in message.tool_calls] == ["now"]


@pytest.mark.parametrize(
    "name, text, rest",
    [
        (
            "hermes",
            '<tool_call>[{"name": "now"}, {"name": "weather", "arguments": 1}]',
            ', {"name": "weather", "arguments": 1}]',
        ),
        ("hermes", '<tool_call>{"name": "now"}\n{"x": 1}</tool_call>', '\n{"x": 1}</tool_call>'),
        ("llama3_json", '{"name": "now"}; {"x": 1}', '; {"x": 1}'),
        ("mistral", '[TOOL_CALLS][{"name": "now"}, {"x": 1}]', ', {"x": 1}]'),
        ("pythonic", "[now(), weather(1)]", ", weather(1)]"),
        ("qwen3_coder", "<function=now></function><function=x></function>", "<function=x></function>"),
    ],
)
def test_what_follows_a_complete_call_and_is_none_is_content_once(name: str, text: str, rest: str) -> None:
    for pieces in splits_at_every_byte(text):
        assert parsed(name, pieces) == (rest, [("now", {})])


@pytest.mark.parametrize("name", SAMPLES)
def test_without_parallel_calls_only_the_first_is_reported(name: str) -> None:
    text, content, calls = SAMPLES[name].get("two") or SAMPLES[name]["two in a list"]
    assert parsed(name, [text], parallel=False) == (content, calls[:1])
    assert parsed(name, list(text), parallel=False) == (content, calls[:1])


def test_mistrals_call_ids_are_nine_letters_and_digits() -> None:
    (call,) = collect(events_of("mistral", ["[TOOL_CALLS]now{}"])).tool_calls
    assert len(call.call_id) == 9
    assert call.call_id.isalnum()


def test_a_long_answer_is_read_in_time_that_grows_with_its_length() -> None:
    """A string of a million characters in pieces of 50; quadratic reading would take minutes."""
    text = "x" * 1_000_000
    start = '<tool_call>{"name": "weather", "arguments": {"city": "'
    pieces = [start, *(text[at : at + 50] for at in range(0, len(text), 50)), '"}}</tool_call>']
    assert parsed("hermes", pieces) == ("", [("weather", {"city": text})])
