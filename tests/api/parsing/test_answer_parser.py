"""Reasoning in answers. Oracles: values written by hand, and for token counts the text up to each token."""

import pytest

from faser.api.parsing.answer_parser import AnswerParsing
from faser.api.parsing.events import Message, ReasoningText, collect
from faser.api.parsing.registry import REASONING_PARSERS, TOOL_PARSERS
from faser.api.parsing.tool_parser import NO_CALLS
from tests.fake_engine import byte_tokenizer

TOKENIZER = byte_tokenizer()
OPEN, CLOSED, FREE = "[assistant]<think>\n", "[assistant]<think>\n\n</think>\n\n", "[assistant]"


def message_of(
    pieces: list[str],
    prompt: str,
    *,
    always: bool = False,
    tools: bool = False,
    shows: bool = True,
    cut: bool = False,
    style: str = "qwen3",
    parser: str = "",
) -> tuple[Message, int]:
    """(message, number of reasoning tokens). A token is a byte."""
    parsing = AnswerParsing(
        tokenizer=TOKENIZER,
        reasoning=True,
        always_reasons=always,
        shows_reasoning=shows,
        marks=REASONING_PARSERS[style].think,
        tool_parser=TOOL_PARSERS[parser or "hermes"] if tools or parser else NO_CALLS,
        declared={"now": {}, "weather": {}} if tools or parser else {},
    )
    reader = parsing.start(prompt)
    events = [
        event
        for at, piece in enumerate(pieces)
        for event in reader.push(piece, tuple(piece.encode()), complete=at == len(pieces) - 1, cut=cut)
    ]
    return collect(events), reader.num_reasoning_tokens


@pytest.mark.parametrize(
    "prompt, text, reasoning, content, counted",
    [
        (FREE, "<think>\nHm, 1 < 2.\n</think>\n\nYes.", "Hm, 1 < 2.", "Yes.", 27),
        (FREE, "\n <think>Hm</think>Yes.", "Hm", "Yes.", 19),
        (FREE, "Yes. <think>no</think>", "", "Yes. <think>no</think>", 0),
        (FREE, "  <thin", "", "  <thin", 0),
        (FREE, "<think>Hm, cut", "Hm, cut", "", 14),
        (FREE, "<think>Hm </thi", "Hm </thi", "", 15),
        (OPEN, "Hm\n</think>\n\n  Yes.\n", "Hm", "  Yes.\n", 11),
        (OPEN, "<think>\nHm</think>Yes.", "Hm", "Yes.", 18),
        (OPEN, "</think>Yes.", "", "Yes.", 8),
        (CLOSED, "Yes, </think> is a mark.", "", "Yes, </think> is a mark.", 0),
    ],
)
def test_reasoning_is_divided_off_wherever_the_text_is_cut(
    prompt: str, text: str, reasoning: str, content: str, counted: int
) -> None:
    expected = (Message(reasoning=reasoning, content=content), counted)
    assert message_of([text], prompt) == expected
    assert message_of(list(text), prompt) == expected
    for at in range(len(text) + 1):
        assert message_of([text[:at], text[at:]], prompt) == expected, at


def test_a_model_that_always_reasons_needs_no_first_mark() -> None:
    assert message_of(["Hm</think>Yes."], FREE, always=True) == (Message(reasoning="Hm", content="Yes."), 10)
    assert message_of(["Yes."], CLOSED, always=True) == (Message(content="Yes."), 0)


def test_a_users_mark_in_the_prompt_does_not_open_the_reasoning() -> None:
    assert message_of(["Yes."], "[user]what is <think>?[assistant]") == (Message(content="Yes."), 0)


def test_calls_are_looked_for_after_the_reasoning_only() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    text = f"<think>shall I {call}?</think>\nI do. {call}"
    for pieces in ([text], list(text), [text[:40], text[40:]]):
        message, _ = message_of(pieces, FREE, tools=True)
        assert (message.reasoning, message.content) == (f"shall I {call}?", "I do.")
        assert [each.name for each in message.tool_calls] == ["now"]


CALL = '<tool_call>{"name": "now"}</tool_call>'


@pytest.mark.parametrize(
    "text, reasoning, num_calls",
    [
        (f"I will look it up.\n{CALL}", "I will look it up.", 1),
        (f"I will look it up.\n{CALL}\n{CALL}\n", "I will look it up.", 2),
        (f"Shall I write {CALL}? No: {CALL}", f"Shall I write {CALL}? No: ", 1),
        (f"A call begins with <tool_call>. {CALL}", "A call begins with <tool_call>. ", 1),
        ("A call begins with <tool_call>", "A call begins with <tool_call>", 0),
        (f"I could write {CALL} here.", f"I could write {CALL} here.", 0),
        ("Go: " + CALL.replace("now", "then"), "Go: " + CALL.replace("now", "then"), 0),
        (
            'Go: <tool_call>{"name": "now", "arguments": {"a": 1',
            'Go: <tool_call>{"name": "now", "arguments": {"a": 1',
            0,
        ),
    ],
)
def test_complete_calls_at_the_end_of_reasoning_that_never_closes_are_calls(
    text: str, reasoning: str, num_calls: int
) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        message, _ = message_of(pieces, OPEN, tools=True)
        assert (message.reasoning, message.content) == (reasoning, "")
        assert [each.name for each in message.tool_calls] == ["now"] * num_calls


def test_a_draft_of_a_call_in_reasoning_that_closes_or_is_cut_off_is_none() -> None:
    drafted = f"Perhaps {CALL}\n"
    for pieces in ([f"{drafted}</think>\nNo."], [*drafted, *"</think>\nNo."]):
        assert message_of(pieces, OPEN, tools=True)[0] == Message(reasoning=drafted.rstrip(), content="No.")
    for pieces in ([drafted], list(drafted)):
        assert message_of(pieces, OPEN, tools=True, cut=True)[0] == Message(reasoning=drafted)


def test_reasoning_is_held_back_only_while_it_may_be_a_call() -> None:
    parsing = AnswerParsing(
        tokenizer=TOKENIZER, reasoning=True, tool_parser=TOOL_PARSERS["hermes"], declared={"now": {}}
    )
    parser = parsing.start(OPEN)
    for piece, seen in (("Hm <tool", "Hm "), ("_call>", ""), ('{"na', ""), ('no": 1', '<tool_call>{"nano": 1')):
        found = parser.push(piece, (), complete=False)
        assert found == ([ReasoningText(text=seen)] if seen else [])


def test_reasoning_that_nobody_asked_to_see_is_counted_and_left_out() -> None:
    assert message_of(["<think>Hm</think>Yes."], FREE, shows=False) == (Message(content="Yes."), 17)


def test_tokens_of_many_bytes_are_counted_one_by_one_within_a_step() -> None:
    """The step's tokens: "<think>", "Hm</", "think>", "Yes": the third ends the reasoning."""
    from faser.api.parsing.answer_parser import ReasoningTokens

    class Words:
        def token_bytes(self, token_id: int) -> bytes:
            return [b"<think>", b"Hm</", b"think>", b"Yes"][token_id]

    tokens = ReasoningTokens(Words(), open_at_start=False)  # type: ignore[arg-type]
    tokens.take((0, 1, 2, 3, 3))
    assert tokens.count == 3


@pytest.mark.parametrize(
    "prompt, text, reasoning, content, counted",
    [
        ("model\n", "<|channel>thought\nHm, 1 < 2.\n<channel|>Yes.", "Hm, 1 < 2.", "Yes.", 39),
        ("model\n", "thought\nHm<channel|>Yes.", "Hm", "Yes.", 20),
        ("model\n", "though not", "", "though not", 0),
        ("model\n", "Yes<channel|>, yes", "", "Yes, yes", 0),
        ("model\n", "Yes.", "", "Yes.", 0),
        ("model\n<|channel>thought\n", "Hm\n<channel|>Yes.", "Hm", "Yes.", 13),
        ("model\n<|channel>thought\n<channel|>", "Yes.", "", "Yes.", 0),
    ],
)
def test_gemmas_thoughts_are_divided_off_with_or_without_their_first_mark(
    prompt: str, text: str, reasoning: str, content: str, counted: int
) -> None:
    expected = (Message(reasoning=reasoning, content=content), counted)
    for pieces in ([text], [*text], *([text[:at], text[at:]] for at in range(len(text) + 1))):
        assert message_of(pieces, prompt, style="gemma4") == expected, pieces


@pytest.mark.parametrize(
    "call", ['<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>', "call:weather{city:Oslo}"]
)
@pytest.mark.parametrize("before", ["<|channel>thought\nHm<channel|>", "thought\nHm<channel|>"])
def test_gemmas_call_behind_its_thoughts_is_a_call_with_or_without_its_mark(before: str, call: str) -> None:
    text = before + call
    for pieces in ([text], [*text]):
        message, _ = message_of(pieces, "model\n", style="gemma4", parser="gemma4")
        assert (message.reasoning, message.content) == ("Hm", "")
        assert [(each.name, each.arguments) for each in message.tool_calls] == [("weather", '{"city": "Oslo"}')]


def test_gemmas_call_behind_an_end_of_thoughts_that_nothing_opened_is_a_call() -> None:
    text = "I look.<channel|>call:weather{days:3}<tool_call|>"
    for pieces in ([text], [*text]):
        message, _ = message_of(pieces, "model\n", style="gemma4", parser="gemma4")
        assert message.content == "I look."
        assert [(each.name, each.arguments) for each in message.tool_calls] == [("weather", '{"days": 3}')]


GEMMA_CALL = '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>'


@pytest.mark.parametrize("begin, prompt", [("", "model\n<|channel>thought\n"), ("<|channel>thought\n", "model\n")])
@pytest.mark.parametrize(
    "text, cut, reasoning, content, num_calls",
    [
        (f"Hm.\n{GEMMA_CALL}", False, "Hm.", "", 1),
        (f"Hm.\n{GEMMA_CALL}{GEMMA_CALL}\n", False, "Hm.", "", 2),
        (f"Hm.\n{GEMMA_CALL}", True, f"Hm.\n{GEMMA_CALL}", "", 0),
        (f"Shall I {GEMMA_CALL}? No.", False, f"Shall I {GEMMA_CALL}? No.", "", 0),
        (f"Shall I {GEMMA_CALL}\n<channel|>No.", False, f"Shall I {GEMMA_CALL}", "No.", 0),
        (f"Shall I {GEMMA_CALL}<channel|>{GEMMA_CALL}", False, f"Shall I {GEMMA_CALL}", "", 1),
        ("Hm.<channel|>call:weather{days:1}", False, "Hm.", "", 1),
        ("Hm.<channel|>Yes<channel|>, yes<chan", True, "Hm.", "Yes, yes", 0),
        ('Hm.<channel|><|tool_call>call:weather{city:<|"|>a<channel|>b<|"|>}', False, "Hm.", "", 1),
    ],
)
def test_gemmas_calls_in_thoughts_are_calls_only_if_they_end_an_answer_that_nothing_cut(
    begin: str, prompt: str, text: str, cut: bool, reasoning: str, content: str, num_calls: int
) -> None:
    written = begin + text
    for pieces in ([written], [*written], *([written[:at], written[at:]] for at in range(len(written)))):
        message, _ = message_of(pieces, prompt, style="gemma4", parser="gemma4", cut=cut)
        assert (message.reasoning, message.content) == (reasoning, content)
        assert [each.name for each in message.tool_calls] == ["weather"] * num_calls


def test_a_mark_of_reasoning_in_an_argument_stays_there() -> None:
    text = '<|tool_call>call:weather{city:<|"|>a<channel|>b<|"|>}'
    for pieces in ([text], [*text]):
        message, _ = message_of(pieces, "model\n", style="gemma4", parser="gemma4")
        assert [each.arguments for each in message.tool_calls] == ['{"city": "a<channel|>b"}']


@pytest.mark.parametrize(
    "style, text",
    [
        ("mistral", "[THINK]Hm[/THINK]Yes."),
        ("granite", "Here is my thought process:\nHm\nHere is my response:\nYes."),
    ],
)
def test_other_marks_divide_an_answer_too(style: str, text: str) -> None:
    for pieces in ([text], [*text]):
        assert message_of(pieces, FREE, style=style)[0] == Message(reasoning="Hm", content="Yes.")
