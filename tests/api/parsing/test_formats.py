"""Calls in every format, whole and in pieces. Oracles: values written by hand, and the parse of the whole text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.api.parsing.events import (
    ContentText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from faser.api.parsing.registry import TOOL_PARSERS
from faser.api.parsing.tool_parser import ToolCallReader
from tests.api.parsing.answers import events_of, parsed, raw, splits_at_every_byte
from tests.api.parsing.samples import MALFORMED, NO_CALLS, SAMPLES

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
def test_an_answer_cut_off_anywhere_has_the_beginnings_of_its_calls_and_no_markup_once_one_has_begun(
    name: str, text: str
) -> None:
    content, calls = raw(name, [text])
    for at in range(len(text)):
        kept, found = raw(name, [text[:at]], cut=True)
        assert raw(name, list(text[:at]), cut=True) == (kept, found)
        if not found:
            assert kept == text[:at]
            continue
        assert content.startswith(kept)
        assert found[:-1] == calls[: len(found) - 1]
        called, arguments = calls[len(found) - 1]
        assert (found[-1][0], arguments[: len(found[-1][1])]) == (called, found[-1][1])


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
    ended = [event for event in events_of(name, [damaged]) if isinstance(event, ToolCallEnd)]
    for event in ended:
        assert isinstance(json.loads(whole[1][event.index][1]), dict)
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


def test_a_call_that_is_malformed_after_it_has_begun_stays_one_with_what_the_model_wrote() -> None:
    text = (
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"]} <tool_call>{"name": "now"}</tool_call> Yes.'
    )
    for pieces in splits_at_every_byte(text):
        events = events_of("hermes", pieces)
        kinds = [type(event) for event in events if not isinstance(event, ToolCallArguments)]
        assert kinds in ([ToolCallStart, ToolCallStart, ToolCallEnd, *[ContentText] * size] for size in range(5))
        assert raw("hermes", pieces) == ("Yes.", [("weather", '{"city": "Oslo"]}'), ("now", "{}")])


@pytest.mark.parametrize(
    "name, text, content, arguments",
    [(name, *each) for name, malformed in MALFORMED.items() for each in malformed],
)
def test_a_malformed_call_has_the_arguments_that_the_model_wrote(
    name: str, text: str, content: str, arguments: str
) -> None:
    for pieces in splits_at_every_byte(text):
        assert raw(name, pieces) == (content, [("weather", arguments)])


@pytest.mark.parametrize(
    "name, text, rest",
    [
        (
            "hermes",
            '<tool_call>[{"name": "now"}, {"name": "weather", "arguments": 1}]',
            ', {"name": "weather", "arguments": 1}]',
        ),
        ("hermes", '<tool_call>{"name": "now"}\n{"x": 1}</tool_call>', '{"x": 1}</tool_call>'),
        ("glm4", "now\n{}\nweather is fine", "weather is fine"),
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


CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f" {CALL}\n",
        f"```json\n{CALL}\n```",
        f"```\n{CALL}\n```\n",
        f"```json\n{CALL}",
        f"<tools>\n{CALL}\n</tools>",
        f"<tools>[{CALL}]</tools>",
        f"{{{CALL}}}",
        f"<tool_call>\n{{{CALL}}}\n</tool_call>",
    ],
)
def test_a_whole_answer_that_names_a_declared_function_is_a_call(text: str) -> None:
    for pieces in splits_at_every_byte(text):
        assert parsed("hermes", pieces) == ("", [("weather", {"city": "Oslo"})])


@pytest.mark.parametrize(
    "text",
    [
        f"{CALL} is how I would call it.",
        f"```json\n{CALL}\n```\nThat is the call.",
        f"So: ```json\n{CALL}\n```",
        CALL.replace("weather", "unknown"),
        CALL.replace('"arg', '"extra": 1, "arg'),
        '{"name": "weather"',
        "```python\nprint(1)\n```",
        "<tools>none</tools>",
        '{"answer": "<tool_call>"}',
    ],
)
def test_an_answer_that_has_more_than_a_call_without_tags_is_content(text: str) -> None:
    for pieces in splits_at_every_byte(text):
        assert parsed("hermes", pieces) == (text, [])


def test_an_object_that_is_no_call_is_sent_as_soon_as_that_is_known() -> None:
    reader = ToolCallReader(TOOL_PARSERS["hermes"], {"weather": {}}, parallel=True)
    assert reader.push('{"name": "dog", "ag', complete=False) == [ContentText(text='{"name": "dog", "ag')]


@pytest.mark.parametrize(
    "name, text, content",
    [
        ("hermes", f"Hi <tool_call>\n{CALL}\n</tool_call> bye", "Hi bye"),
        ("hermes", f"Hi\n\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call> bye", "Hi\n\nbye"),
        ("hermes", f"Hi<tool_call>{CALL}</tool_call>\nbye", "Hi\nbye"),
        ("hermes", f"<tool_call>{CALL}</tool_call> bye ", "bye "),
        ("hermes", f"Hi <tool_call>{CALL}</tool_call> ", "Hi"),
        ("hermes", f"Hi <tool_call>{CALL}</tool_call>\n<tool_call>x", "Hi <tool_call>x"),
        ("mistral", "Hi [TOOL_CALLS]now{} bye", "Hi bye"),
        ("pythonic", "Hi <|python_start|>[now()]<|python_end|>bye", "Hi bye"),
        ("qwen3_coder", "Hi\n<function=now></function>\nbye", "Hi\nbye"),
        ("llama3_json", 'Hi <|python_tag|>{"name": "now"} bye', "Hi bye"),
        ("openai", "Hi <|channel|>commentary to=functions.now<|message|>{}<|call|>bye", "Hi bye"),
        ("gemma4", "Hi <|tool_call>call:now{}<tool_call|>\nbye", "Hi bye"),
        ("glm4", "Hi <|assistant|>now\n{}\nbye now", "Hi bye now"),
        ("glm4", "Hi<|assistant|>now\n{}\nnow\n{}\n\nbye", "Hi\n\nbye"),
        ("granite", 'Hi\n<|tool_call|>[{"name": "now"}] bye', "Hi\nbye"),
        ("phi4_mini_json", 'Hi <|tool_call|>[{"name": "now"}]<|/tool_call|>bye', "Hi bye"),
    ],
)
def test_one_separator_is_kept_between_the_texts_around_calls(name: str, text: str, content: str) -> None:
    for pieces in splits_at_every_byte(text):
        assert parsed(name, pieces)[0] == content


@pytest.mark.parametrize(
    "value",
    [
        "a</parameter>b",
        "a\n</parameter>\nb",
        "</parameter>",
        "<tool_call>\n<function=f>",
        "</tool_call>",
        "</function>",
    ],
)
def test_end_tags_in_a_value_do_not_end_it(value: str) -> None:
    rest = "\n<parameter=units>\nC\n</parameter>\n</function>\n</tool_call>\n"
    text = f"<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>{rest}"
    for pieces in splits_at_every_byte(text):
        assert parsed("qwen3_coder", pieces) == ("", [("weather", {"city": value, "units": "C"})])


@pytest.mark.parametrize(
    "name, text",
    [
        ("qwen3_coder", "Write <function=weather> and then <parameter=city>, and close with </parameter>."),
        ("qwen3_coder", "A call begins with <tool_call> or <function=weather>"),
        ("hermes", 'A call is <tool_call>{"name": "weather", "arguments": {...}}</tool_call>.'),
        ("hermes", 'Begin with <tool_call>{"name": "weather"'),
        ("hermes", "Print a < b and </thin and <tool_call> is a tag <"),
    ],
)
def test_prose_that_names_a_tag_is_content(name: str, text: str) -> None:
    for pieces in splits_at_every_byte(text):
        assert parsed(name, pieces) == (text, [])


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("days", "230.0", "230"),
        ("days", "-3", "-3"),
        ("days", "2.5", '"2.5"'),
        ("days", "2026-01-15", '"2026-01-15"'),
        ("at", "230.0", "230.0"),
        ("at", "NaN", '"NaN"'),
        ("at", "1e999", '"1e999"'),
        ("units", "null", "null"),
        ("units", '"C"', '"\\"C\\""'),
        ("level", "2", "2"),
        ("level", "two", '"two"'),
    ],
)
def test_the_schema_gives_the_type_of_a_bare_value(key: str, value: str, expected: str) -> None:
    text = f"<function=weather>\n<parameter={key}>\n{value}\n</parameter>\n</function>"
    assert raw("qwen3_coder", [text]) == ("", [("weather", f'{{"{key}": {expected}}}')])


@pytest.mark.parametrize(
    "name, text, content, calls",
    [
        (
            "hermes",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Par',
            "",
            [("weather", '{"city": "Par')],
        ),
        ("hermes", '<tool_call>\n{"name": "weather", "argum', "", [("weather", "")]),
        ("hermes", '<tool_call>\n{"name": "weat', '<tool_call>\n{"name": "weat', []),
        ("hermes", 'Hi <tool_call>{"name": "now"}</tool_call>\n<tool_call>\n{"na', "Hi", [("now", "{}")]),
        ("hermes", 'Hi <tool_call>{"name": "now"}</tool_call> and <tool_c', "Hi and", [("now", "{}")]),
        ("hermes", '<tool_call>\n{"name": "now"}\n</tool_', "", [("now", "{}")]),
        ("hermes", '{"name": "weather", "arguments": {"ci', '{"name": "weather", "arguments": {"ci', []),
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\nhello there",
            "",
            [("weather", '{"city": "hello there')],
        ),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<para", "", [("weather", "")]),
        ("qwen3_coder", "<function=weather>\n<parameter=days>\n23", "", [("weather", '{"days": ')]),
    ],
)
def test_a_call_that_the_length_cuts_off_is_one_with_the_arguments_so_far(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in splits_at_every_byte(text):
        assert raw(name, pieces, cut=True) == (content, calls)


@pytest.mark.parametrize(
    "text, arguments",
    [
        ("days:3.0", '{"days": 3}'),
        ("days:two", '{"days": "two"}'),
        ("city:7", '{"city": "7"}'),
        ("city:null", '{"city": null}'),
        ("at:3.0", '{"at": 3.0}'),
        ("at:True", '{"at": true}'),
        ("unknown:3.0", '{"unknown": 3.0}'),
        ("where:{zip:7.0}", '{"where": {"zip": 7}}'),
        ('sizes:[1.0, x, <|"|>y<|"|>]', '{"sizes": [1, "x", "y"]}'),
    ],
)
def test_the_schema_gives_the_type_of_gemmas_bare_values(text: str, arguments: str) -> None:
    text = f"<|tool_call>call:weather{{{text}}}<tool_call|>"
    for pieces in splits_at_every_byte(text):
        assert raw("gemma4", pieces) == ("", [("weather", arguments)])


@pytest.mark.parametrize(
    "name, text, content, calls",
    [
        ("gemma4", "<|tool_call>call:weather", "<|tool_call>call:weather", []),
        ("gemma4", "<|tool_call>call:weather{ci", "", [("weather", "{")]),
        ("gemma4", "<|tool_call>call:weather{days:2", "", [("weather", '{"days": ')]),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>Os<|"', "", [("weather", '{"city": "Os')]),
        ("gemma4", "<|tool_call>call:now{}<tool_call|><|tool_call>cal", "", [("now", "{}")]),
        ("glm4", "now\n{}\nweath", "", [("now", "{}")]),
        ("mistral", "[TOOL_CALLS]weather", "[TOOL_CALLS]weather", []),
        ("mistral", "[TOOL_CALLS]weather[AR", "", [("weather", "")]),
    ],
)
def test_a_cut_shows_no_name_or_value_that_may_go_on(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in splits_at_every_byte(text):
        assert raw(name, pieces, cut=True) == (content, calls)


def test_a_call_after_an_object_is_read_as_after_any_text() -> None:
    for pieces in splits_at_every_byte(f"{CALL} <tool_call>{CALL}</tool_call>"):
        assert parsed("hermes", pieces) == (CALL, [("weather", {"city": "Oslo"})])
