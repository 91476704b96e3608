"""Events with a type of their own: a line that names it, and a line with the data, which names it too."""

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode


def typed_event(payload: dict[str, Any]) -> bytes:
    """One event. payload: has a `type`."""
    kind: str = payload["type"]
    return b"event: " + kind.encode() + b"\ndata: " + _encode(payload) + b"\n\n"
