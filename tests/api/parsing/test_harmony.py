"""Answers of gpt-oss. Oracles: values written by hand; for tokens, a count of the text's bytes.

Bugs these tests have been seen to catch: a call without its header; text that is in no message left out; tokens of
a header that are not counted.
"""

import pytest

from faser.api.parsing.answer_parser import AnswerParsing
from faser.api.parsing.events import Message, ReasoningText, collect
from faser.api.parsing.registry import TOOL_PARSERS
from faser.api.parsing.tool_parser import NO_CALLS
from tests.fake_engine import byte_tokenizer

TOKENIZER = byte_tokenizer()
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm, 1 < 2.<|end|>"
YES = "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
CALL = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>'


def parsed(
    pieces: list[str], *, prompt: str = PROMPT, tools: bool = False, shows: bool = True
) -> tuple[Message, int]:
    """(message, number of reasoning tokens). A token is a byte."""
    parsing = AnswerParsing(
        tokenizer=TOKENIZER,
        reasoning=True,
        harmony=True,
        shows_reasoning=shows,
        tool_parser=TOOL_PARSERS["openai"] if tools else NO_CALLS,
        declared={"now": {}} if tools else {},
    )
    parser = parsing.start(prompt)
    last = len(pieces) - 1
    events = [
        event
        for at, piece in enumerate(pieces)
        for event in parser.push(piece, tuple(piece.encode()), complete=at == last)
    ]
    return collect(events), parser.num_reasoning_tokens


@pytest.mark.parametrize(
    "text, reasoning, content, counted",
    [
        (THOUGHT + YES, "Hm, 1 < 2.", "Yes.", len(THOUGHT)),
        ("<|channel|>final<|message|>Yes.", "", "Yes.", 0),
        ("<|message|>Yes.", "", "Yes.", 0),
        ("<|channel|>analysis<|message|>Hm, cut", "Hm, cut", "", 37),
        (THOUGHT + "<|start|>assistant<|chan", "Hm, 1 < 2.", "", len(THOUGHT)),
        (THOUGHT + "<|start|>assist", "Hm, 1 < 2.", "", len(THOUGHT)),
        (THOUGHT + "<|start|>assistant" + THOUGHT + YES, "Hm, 1 < 2.\nHm, 1 < 2.", "Yes.", 2 * len(THOUGHT) + 18),
        ("<|channel|>commentary<|message|>I look.<|end|>" + YES, "", "I look.\nYes.", 0),
        ('{"a": "<|"}', "", '{"a": "<|"}', 0),
        (" to be <|end|> or not", "", " to be \n or not", 0),
        (THOUGHT + "and more", "Hm, 1 < 2.", "and more", len(THOUGHT)),
        ("", "", "", 0),
        (THOUGHT + "<|start|>assistant" + CALL, "Hm, 1 < 2.", "<|start|>assistant" + CALL, len(THOUGHT)),
    ],
)
def test_channels_are_divided_wherever_the_text_is_cut(
    text: str, reasoning: str, content: str, counted: int
) -> None:
    expected = (Message(reasoning=reasoning, content=content), counted)
    assert parsed([text]) == expected
    assert parsed(list(text)) == expected
    for at in range(len(text) + 1):
        assert parsed([text[:at], text[at:]]) == expected, at


@pytest.mark.parametrize(
    "opened, reasoning, content",
    [
        ("<|channel|>analysis<|message|>Hm, ", "so.", "Yes."),
        ("<|channel|>final<|message|>Well, ", "", "so.\nYes."),
        ("<|channel|>", "", "so.\nYes."),
    ],
)
def test_a_message_that_the_prompt_has_opened_goes_on(opened: str, reasoning: str, content: str) -> None:
    text = "so.<|end|>" + YES
    for pieces in ([text], list(text)):
        found, counted = parsed(pieces, prompt=PROMPT + opened)
        assert found == Message(reasoning=reasoning, content=content)
        assert counted == (len("so.<|end|>") if reasoning else 0)


def test_marks_of_users_open_nothing() -> None:
    """A chat whose last message has ended."""
    assert parsed(["Yes."], prompt="<|start|>user<|message|>analysis<|end|>") == (Message(content="Yes."), 0)


def test_calls_are_read_after_the_analysis_and_the_preamble() -> None:
    preamble = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    text = f"{THOUGHT}{preamble}<|start|>assistant{CALL}"
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        message, counted = parsed(pieces, tools=True)
        assert (message.reasoning, message.content, counted) == ("Hm, 1 < 2.", "I look.", len(THOUGHT))
        assert [(call.name, call.arguments) for call in message.tool_calls] == [("now", '{"a": 1}')]


def test_a_call_in_the_analysis_is_a_call_and_one_to_another_tool_is_reasoning() -> None:
    call = CALL.replace("commentary", "analysis")
    message, counted = parsed([call], tools=True)
    assert ([each.name for each in message.tool_calls], message.reasoning, counted) == (["now"], "", 0)
    search = call.replace("functions.now", "browser.search")
    assert parsed([search], tools=True) == (Message(reasoning='{"a": 1}'), len(search))


def test_a_call_of_a_function_that_is_not_declared_is_content() -> None:
    text = CALL.replace("now", "then")
    assert parsed([text], tools=True) == (Message(content=text), 0)


def test_a_header_longer_than_any_is_content() -> None:
    text = CALL.replace("commentary", "x" * 600)
    assert parsed([text], tools=True) == (Message(content=text.removesuffix("<|call|>")), 0)


def test_analysis_arrives_as_it_is_written_and_is_left_out_where_nobody_sees_it() -> None:
    parser = AnswerParsing(tokenizer=TOKENIZER, reasoning=True, harmony=True).start(PROMPT)
    pieces = ["<|channel|>analysis", "<|message|>", "Hm", ", so"]
    found = [parser.push(piece, tuple(piece.encode()), complete=False) for piece in pieces]
    assert found == [[], [], [ReasoningText(text="Hm")], [ReasoningText(text=", so")]]
    assert parsed([THOUGHT + YES], shows=False) == (Message(content="Yes."), len(THOUGHT))


def test_a_long_answer_without_messages_is_counted_in_time() -> None:
    assert parsed(["x" * 200_000]) == (Message(content="x" * 200_000), 0)
