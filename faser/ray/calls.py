"""Messages between gateway, router and replica: an HTTP request, and the beginning of its answer.

After an AnswerStart a replica sends the body in parts of bytes, each of whole events where the answer is a stream.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from faser.engine.client.affinity import chained

_PIECE_BYTES = 256  # of a prompt that are known together
# The fields of a body that a prompt begins with, in the order of a chat template.
_PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "prompt", "input")
_CREDENTIALS = (b"authorization", b"x-api-key")

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request. headers: names in lower case. client: host and port of the peer.

    digests: of the prompt, for the router. avoid: ids of replicas that have refused the request.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int] | None = None
    digests: tuple[bytes, ...] = ()
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStart:
    """replica: the id of the one that answers. elsewhere: it cannot, but another replica may be able to."""

    status: int
    headers: Headers
    replica: str
    elsewhere: bool


def prompt_digests(headers: Headers, body: bytes) -> tuple[bytes, ...]:
    """Digests of a prompt's pieces as its JSON has them; empty for a body that is not an object.

    API keys have caches of their own, so the key is part of the namespace, with `model` and `cache_salt`.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    if not isinstance(fields, dict):
        return ()
    key = [value.decode("latin-1") for name, value in headers if name in _CREDENTIALS]
    namespace = msgspec.json.encode([key, fields.get("model"), fields.get("cache_salt")])
    return tuple(chained(namespace, _pieces(fields)))


def _pieces(fields: Mapping[str, Any]) -> Iterator[bytes]:
    """The whole pieces. JSON of a chat that has gone on begins with that of the chat before, but for a bracket."""
    text = b"".join(msgspec.json.encode(fields[name]) for name in _PROMPT_FIELDS if fields.get(name) is not None)
    for first in range(0, len(text) - _PIECE_BYTES + 1, _PIECE_BYTES):
        yield text[first : first + _PIECE_BYTES]
