"""AnswerParser: the events of one answer, from its text as it arrives. Reasoning first, then content and calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from faser.api.parsing.events import AnswerEvent, ContentText, ReasoningText, ToolCallArguments
from faser.api.parsing.reasoning import ReasoningParser, ReasoningTokens, ThinkParser, begins_within
from faser.api.parsing.tool_parser import Schema, ToolCallReader, ToolParser
from faser.engine.text.tokenizer import Tokenizer


class AnswerParser:
    """One answer. Without parsers, all of its text is content."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tool_calls: ToolCallReader | None = None,
        tokens: ReasoningTokens | None = None,
        *,
        shows_reasoning: bool = True,
    ) -> None:
        """tokens: counts those of the reasoning. shows_reasoning: otherwise the events leave it out."""
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._tokens = tokens
        self._shows_reasoning = shows_reasoning

    def push(self, text: str, token_ids: tuple[int, ...], *, complete: bool) -> list[AnswerEvent]:
        """What one step adds. complete: it is the last of this answer. Texts that adjoin are one event."""
        if self._tokens is not None:
            self._tokens.take(token_ids)
        if self._reasoning is None:
            return _joined(self._content(text, complete=complete))
        divided = self._reasoning.push(text, complete=complete)
        events: list[AnswerEvent] = [
            each for each in divided if isinstance(each, ReasoningText) and self._shows_reasoning
        ]
        content = "".join(each.text for each in divided if isinstance(each, ContentText))
        return _joined(events + self._content(content, complete=complete))

    @property
    def num_calls(self) -> int:
        """Complete tool calls so far."""
        return 0 if self._tool_calls is None else self._tool_calls.num_complete

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._tokens is None else self._tokens.count

    def _content(self, text: str, *, complete: bool) -> list[AnswerEvent]:
        if self._tool_calls is not None:
            return self._tool_calls.push(text, complete=complete)
        return [ContentText(text=text)] if text else []


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParsing:
    """How the answers to one request are parsed.

    reasoning: whether reasoning is divided off. always_reasons: answers begin within it, even if neither they nor
    the prompt have its mark. shows_reasoning: the client wants to see it. tool_parser: None: calls are not looked
    for. declared: the parameters' schema of each function that may be called. parallel: more than one call.
    """

    tokenizer: Tokenizer
    reasoning: bool = False
    always_reasons: bool = False
    shows_reasoning: bool = True
    tool_parser: ToolParser | None = None
    declared: Mapping[str, Schema] = field(default_factory=dict)
    parallel: bool = True

    def start(self, prompt: str) -> AnswerParser:
        """The parser of one answer. prompt: its text ends where the answer begins."""
        tool_calls = (
            None
            if self.tool_parser is None
            else ToolCallReader(self.tool_parser, self.declared, parallel=self.parallel)
        )
        within = begins_within(prompt)
        if not self.reasoning or within is False:
            return AnswerParser(tool_calls=tool_calls)
        open_at_start = self.always_reasons or within is True
        return AnswerParser(
            ThinkParser(open_at_start=open_at_start),
            tool_calls,
            ReasoningTokens(self.tokenizer, open_at_start=open_at_start),
            shows_reasoning=self.shows_reasoning,
        )


def _joined(events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
    """The events, with adjoining texts of one kind as one event."""
    joined: list[AnswerEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        match last, event:
            case ContentText(), ContentText():
                joined[-1] = ContentText(text=last.text + event.text)
            case ReasoningText(), ReasoningText():
                joined[-1] = ReasoningText(text=last.text + event.text)
            case ToolCallArguments(), ToolCallArguments() if last.index == event.index:
                joined[-1] = ToolCallArguments(index=event.index, text=last.text + event.text)
            case _:
                joined.append(event)
    return joined
