"""What an answer consists of, as events in the order in which the model writes it.

Each dialect of the API turns these into its own fields and events. However the text is divided into pieces, the
events are the same, but for how texts are divided.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningText:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentText:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallStart:
    """A call begins. index: counts the calls that begin in an answer, from 0. name: of a declared function."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallArguments:
    """More of a call's arguments. The texts of one call, joined, are a JSON object once the call has ended."""

    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallEnd:
    """The call is complete."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallAbandoned:
    """What began as a call is none: its text is malformed, or the answer ended within it.

    The text, from its first character on, follows as ContentText. A dialect that has sent parts of the call leaves
    it unfinished; the call is not among those of the complete message.
    """

    index: int


AnswerEvent = ReasoningText | ContentText | ToolCallStart | ToolCallArguments | ToolCallEnd | ToolCallAbandoned


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """One complete call. arguments: a JSON object, as the model wrote it."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True, kw_only=True)
class Message:
    """A complete answer."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


def collect(events: Iterable[AnswerEvent]) -> Message:
    """The message that all events of an answer make together."""
    message = Message()
    unfinished: dict[int, ToolCall] = {}
    for event in events:
        match event:
            case ReasoningText():
                message.reasoning += event.text
            case ContentText():
                message.content += event.text
            case ToolCallStart():
                unfinished[event.index] = ToolCall(call_id=event.call_id, name=event.name)
            case ToolCallArguments():
                unfinished[event.index].arguments += event.text
            case ToolCallEnd():
                message.tool_calls.append(unfinished.pop(event.index))
            case ToolCallAbandoned():
                del unfinished[event.index]
    return message
