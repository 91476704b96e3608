"""Typed events of an answer, with their framing checked byte for byte."""

import json
from typing import Any

import httpx


def typed_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Payloads in order: each an event line, a data line that names the same type, and an empty line."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = answer.content.split(b"\n\n")
    assert frames.pop() == b""
    return [_payload(frame) for frame in frames]


def typed_payloads(sent: bytes) -> list[dict[str, Any]]:
    """The same of bytes."""
    return [_payload(frame) for frame in sent.split(b"\n\n")[:-1]]


def _payload(frame: bytes) -> dict[str, Any]:
    event, data = frame.split(b"\n")
    payload: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
    assert event == b"event: " + payload["type"].encode()
    return payload
