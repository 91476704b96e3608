"""Answers as parsers see them: whole, and in pieces."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from faser.api.parsing.events import AnswerEvent, Message, collect
from faser.api.parsing.registry import TOOL_PARSERS
from faser.api.parsing.tool_parser import ToolCallReader
from faser.engine.text.detokenizer import Detokenizer
from tests.fake_engine import byte_tokenizer

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
DECLARED: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": ["string", "null"]},
            "at": {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
            "where": {"$ref": "#/$defs/place"},
            "tags": {"type": "array"},
            "sizes": {"type": "array", "items": {"type": "integer"}},
            "level": {"enum": [1, 2, None]},
        },
        "$defs": {"place": {"type": "object", "properties": {"zip": {"type": "integer"}}}},
    },
    "now": {},
}

Calls = list[tuple[str, Any]]  # name and arguments, decoded

_TOKENIZER = byte_tokenizer()


def events_of(name: str, pieces: Iterable[str], *, parallel: bool = True, cut: bool = False) -> list[AnswerEvent]:
    """The events of an answer. cut: its length ended it."""
    reader = ToolCallReader(TOOL_PARSERS[name], DECLARED, parallel=parallel)
    events = [event for piece in pieces for event in reader.push(piece, complete=False)]
    return events + reader.push("", complete=True, cut=cut)


def parsed(name: str, pieces: Iterable[str], *, parallel: bool = True) -> tuple[str, Calls]:
    """(content, calls). Checks that all arguments are JSON objects."""
    return _shown(collect(events_of(name, pieces, parallel=parallel)))


def _shown(message: Message) -> tuple[str, Calls]:
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    assert all(isinstance(arguments, dict) for _, arguments in calls)
    assert len({call.call_id for call in message.tool_calls}) == len(calls)
    return message.content, calls


def raw(name: str, pieces: Iterable[str], *, cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """(content, calls), arguments as they were written."""
    message = collect(events_of(name, pieces, cut=cut))
    return message.content, [(call.name, call.arguments) for call in message.tool_calls]


def splits_at_every_byte(text: str) -> Iterator[list[str]]:
    """The text in two pieces, cut at every byte of it, as the engine would send them; then byte by byte."""
    spoken = text.encode()
    for at in range(len(spoken) + 1):
        yield _detokenized([spoken[:at], spoken[at:]])
    yield _detokenized([bytes([byte]) for byte in spoken])


def _detokenized(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(
        _TOKENIZER, stop=(), include_stop=False, skip_special_tokens=True, prompt_token_ids=(65,)
    )
    last = len(pieces) - 1
    return [detokenizer.push(tuple(piece), finished=at == last).text for at, piece in enumerate(pieces)]
