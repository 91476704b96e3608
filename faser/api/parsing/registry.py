"""The parsers by name, and the ones that fit a chat template.

Names are vLLM's. config/server.py has them too, for --help; a test compares the two.
"""

from dataclasses import dataclass

from faser.api.parsing.answer_parser import END_THINK, THINK_MARKS, ThinkMarks
from faser.api.parsing.gemma4 import GEMMA4_MARKS, Gemma4Parser
from faser.api.parsing.glm4 import Glm4Parser
from faser.api.parsing.harmony import CHANNEL, MARKS, OpenAiParser
from faser.api.parsing.json_formats import HermesParser, Llama3JsonParser, MistralParser
from faser.api.parsing.marked_lists import GraniteParser, NamedMistralParser, Phi4MiniParser
from faser.api.parsing.pythonic import Lfm2Parser, PythonicParser
from faser.api.parsing.qwen3_coder import Qwen3CoderParser
from faser.api.parsing.tool_parser import NO_CALLS, ToolParser

TOOL_PARSERS: dict[str, ToolParser] = {
    "gemma4": Gemma4Parser(),
    "glm4": Glm4Parser(),
    "granite": GraniteParser(),
    "hermes": HermesParser(),
    "lfm2": Lfm2Parser(),
    "llama3_json": Llama3JsonParser(),
    "mistral": MistralParser(),
    "openai": OpenAiParser(),
    "phi4_mini_json": Phi4MiniParser(),
    "pythonic": PythonicParser(),
    "qwen3_coder": Qwen3CoderParser(),
}

# What a template has in it if its model writes calls in a format; the first one that fits is taken.
_SIGNS = (
    (CHANNEL, "openai"),
    ("<|tool_call>", "gemma4"),
    ("<|tool_call_start|>", "lfm2"),
    ("List of tools: ", "lfm2"),
    ("<parameter=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|/tool|>", "phi4_mini_json"),
    ("functools[", "phi4_mini_json"),
    ("<|tool_call|>", "granite"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|observation|>", "glm4"),
    ('"parameters": ', "llama3_json"),
    ("func_name1(", "pythonic"),
    ("<|python_start|>", "pythonic"),
)


# Tokenizers of Mistral from version 11 on write the name in front of the arguments.
_NAMED_MISTRAL = NamedMistralParser()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningStyle:
    """Marks with which a model divides off its reasoning.

    divides: whether it divides any off. always: answers begin within the reasoning, even if neither they nor the
    prompt have its mark. harmony: answers are in that format. think: the marks of every other format.
    """

    divides: bool = True
    always: bool = False
    harmony: bool = False
    think: ThinkMarks = THINK_MARKS

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts of the format that may be special tokens."""
        if not self.divides:
            return ()
        return MARKS if self.harmony else (self.think.begin, self.think.end)


NO_STYLE = ReasoningStyle(divides=False)
REASONING_PARSERS = {
    "qwen3": ReasoningStyle(),
    "deepseek_r1": ReasoningStyle(always=True),
    "openai_gptoss": ReasoningStyle(harmony=True),
    "gemma4": ReasoningStyle(think=GEMMA4_MARKS),
    "granite": ReasoningStyle(think=ThinkMarks(begin="Here is my thought process:", end="Here is my response:")),
    "mistral": ReasoningStyle(think=ThinkMarks(begin="[THINK]", end="[/THINK]")),
}

_REASONING_SIGNS = (
    (CHANNEL, "openai_gptoss"),
    (GEMMA4_MARKS.end, "gemma4"),
    (END_THINK, "qwen3"),
    ("[/THINK]", "mistral"),
    ("Here is my thought process:", "granite"),
)


def tool_parser_of(template: str) -> str | None:
    """The name of the parser for a model with this chat template; None: its format is not known.

    A template that takes no tools gets a prompt of ours, which asks for the format of hermes.
    """
    if "tools" not in template:
        return "hermes"
    return next((name for sign, name in _SIGNS if sign in template), None)


def reasoning_parser_of(template: str) -> str | None:
    """The name of the parser for a model with this chat template; None: it does not reason."""
    return next((name for sign, name in _REASONING_SIGNS if sign in template), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParsers:
    """The parsers of one server. tool_parser: NO_CALLS where the format of the model's calls is not known.

    auto: requests may leave it to the model whether it calls.
    """

    tool_parser: ToolParser
    auto: bool
    reasoning: ReasoningStyle


def choose_parsers(*, tool_call_parser: str, auto: bool, reasoning_parser: str, template: str) -> ServerParsers:
    """tool_call_parser, reasoning_parser: names; "auto": as the chat template suggests; "none" for reasoning."""
    calls = tool_parser_of(template) if tool_call_parser == "auto" else tool_call_parser
    reasoning = reasoning_parser_of(template) if reasoning_parser == "auto" else reasoning_parser
    parser = NO_CALLS if calls is None else TOOL_PARSERS[calls]
    return ServerParsers(
        tool_parser=_NAMED_MISTRAL if calls == "mistral" and "[ARGS]" in template else parser,
        auto=auto,
        reasoning={"none": NO_STYLE, **REASONING_PARSERS}[reasoning or "none"],
    )
