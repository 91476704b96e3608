"""The parsers by name, and the ones that fit a chat template.

Names are vLLM's. config/server.py has them too, for --help; a test compares the two.
"""

from dataclasses import dataclass

from faser.api.parsing.answer_parser import END_THINK, THINK
from faser.api.parsing.harmony import CHANNEL, MARKS, OpenAiParser
from faser.api.parsing.json_formats import HermesParser, Llama3JsonParser, MistralParser
from faser.api.parsing.pythonic import PythonicParser
from faser.api.parsing.qwen3_coder import Qwen3CoderParser
from faser.api.parsing.tool_parser import ToolParser

TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": HermesParser(),
    "llama3_json": Llama3JsonParser(),
    "mistral": MistralParser(),
    "openai": OpenAiParser(),
    "pythonic": PythonicParser(),
    "qwen3_coder": Qwen3CoderParser(),
}

# What a template has in it if its model writes calls in a format; the first one that fits is taken.
_SIGNS = (
    (CHANNEL, "openai"),
    ("<parameter=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ('"parameters": ', "llama3_json"),
    ("func_name1(", "pythonic"),
    ("<|python_start|>", "pythonic"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningStyle:
    """always: answers begin within the reasoning, even if neither they nor the prompt have its mark.

    harmony: answers are in that format. marks: texts of the format that may be special tokens.
    """

    always: bool = False
    harmony: bool = False
    marks: tuple[str, ...] = (THINK, END_THINK)


REASONING_PARSERS = {
    "qwen3": ReasoningStyle(),
    "deepseek_r1": ReasoningStyle(always=True),
    "openai_gptoss": ReasoningStyle(harmony=True, marks=MARKS),
}


def tool_parser_of(template: str) -> str | None:
    """The name of the parser for a model with this chat template; None: its format is not known.

    A template that takes no tools gets a prompt of ours, which asks for the format of hermes.
    """
    if "tools" not in template:
        return "hermes"
    return next((name for sign, name in _SIGNS if sign in template), None)


def reasoning_parser_of(template: str) -> str | None:
    """The name of the parser for a model with this chat template; None: it does not reason."""
    if CHANNEL in template:
        return "openai_gptoss"
    return "qwen3" if END_THINK in template else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParsers:
    """The parsers of one server. tool_parser: None: the format of the model's calls is not known.

    auto: requests may leave it to the model whether it calls. reasoning: None: nothing is divided off.
    """

    tool_parser: ToolParser | None
    auto: bool
    reasoning: ReasoningStyle | None


def choose_parsers(*, tool_call_parser: str, auto: bool, reasoning_parser: str, template: str) -> ServerParsers:
    """tool_call_parser, reasoning_parser: names; "auto": as the chat template suggests; "none" for reasoning."""
    calls = tool_parser_of(template) if tool_call_parser == "auto" else tool_call_parser
    reasoning = reasoning_parser_of(template) if reasoning_parser == "auto" else reasoning_parser
    return ServerParsers(
        tool_parser=None if calls is None else TOOL_PARSERS[calls],
        auto=auto,
        reasoning=None if reasoning in (None, "none") else REASONING_PARSERS[reasoning],
    )
