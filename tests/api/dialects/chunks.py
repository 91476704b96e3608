"""Chat chunks to be framed by another dialect, and the frame's other arguments."""

from collections.abc import Iterator
from typing import Any

from faser.api.answers.framing import Envelope
from faser.api.answers.usage import SpeculationReport, Usage
from faser.types.request import SpeculationParams
from faser.types.sampling import SamplingParams

THINKING = "The user wants the weather. "
TEXT = "Let me look: "
ARGUMENTS = ('{"city": "Zürich"}', '{"city": "Bern", "days": [1, 2]}')

ENVELOPE = Envelope(
    request_id="me", created_s=1700000000, model="tiny", system_fingerprint="f", sampling=SamplingParams()
)


def usage() -> Usage:
    counted = Usage(
        [7],
        on_tokens=lambda _: None,
        speculation=SpeculationReport(SpeculationParams(), num_choices=1, level="none", cap=0),
    )
    counted.count_cached(0, 3)
    return counted


def message() -> dict[str, Any]:
    """A whole message of a chat: reasoning, text and two calls."""
    return {
        "role": "assistant",
        "reasoning_content": THINKING,
        "reasoning": THINKING,
        "content": TEXT,
        "tool_calls": [
            {"id": f"call_{at}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
            for at, arguments in enumerate(ARGUMENTS)
        ],
    }


def choice(finish_reason: str = "tool_calls", stop_reason: str | int | None = None) -> dict[str, Any]:
    return {
        "index": 0,
        "message": message(),
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


def chunks(size: int, finish_reason: str = "tool_calls") -> Iterator[dict[str, Any]]:
    """The same message in pieces of some characters."""
    yield _chunk({"role": "assistant", "content": ""})
    for piece in _pieces(THINKING, size):
        yield _chunk({"reasoning_content": piece, "reasoning": piece})
    for piece in _pieces(TEXT, size):
        yield _chunk({"content": piece})
    for at, arguments in enumerate(ARGUMENTS):
        named = {"index": at, "id": f"call_{at}", "type": "function", "function": {"name": "weather"}}
        yield _chunk({"tool_calls": [named]})
        for piece in _pieces(arguments, size):
            yield _chunk({"tool_calls": [{"index": at, "function": {"arguments": piece}}]})
    yield {**_chunk({}), "finish_reason": finish_reason, "stop_reason": None}


def _chunk(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}


def _pieces(text: str, size: int) -> Iterator[str]:
    for begin in range(0, len(text), size):
        yield text[begin : begin + size]
