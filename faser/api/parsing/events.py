"""Parts of an answer, as events in the order in which the model writes them.

Each dialect of the API turns these into its own fields and events. However the text is divided into pieces, the
events are the same, except for how texts are divided.
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
    """More of a call's arguments. The texts of one call, joined, are a JSON object if the call is complete."""

    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallEnd:
    """The call is complete. A call without this event is malformed, or the answer ended within it."""

    index: int


AnswerEvent = ReasoningText | ContentText | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """One call. arguments: a JSON object, as the model wrote it; less, or none, if the call is not complete."""

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
    calls: dict[int, ToolCall] = {}
    for event in events:
        match event:
            case ReasoningText():
                message.reasoning += event.text
            case ContentText():
                message.content += event.text
            case ToolCallStart():
                calls[event.index] = ToolCall(call_id=event.call_id, name=event.name)
            case ToolCallArguments():
                calls[event.index].arguments += event.text
    message.tool_calls = list(calls.values())
    return message
