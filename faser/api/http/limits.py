"""HttpLimits: what connections may send, and for how long they may keep the server waiting."""

from dataclasses import dataclass
from typing import Self

from faser.config.server import ServerConfig

# All bodies that are being received, together, hold at most this many of the largest.
_LARGEST_BODIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bytes, numbers and seconds, for each connection unless they say otherwise.

    max_head_bytes: of a request line with its headers. max_headers: trailers count too.
    max_bodies_bytes: of the bodies that all connections are receiving.
    max_connections: None: as many as the limit on open files has room for.
    head_timeout_s, body_timeout_s: until all of it has come; a TLS handshake has as long as a head.
    keep_alive_s: without a request. send_timeout_s: without the client taking any of a waiting answer.
    """

    max_head_bytes: int
    max_headers: int
    max_bodies_bytes: int
    max_connections: int | None
    head_timeout_s: float
    body_timeout_s: float
    keep_alive_s: float
    send_timeout_s: float = 60.0

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        return cls(
            max_head_bytes=config.h11_max_incomplete_event_size,
            max_headers=config.h11_max_header_count,
            max_bodies_bytes=_LARGEST_BODIES * config.max_request_bytes,
            max_connections=config.limit_concurrency,
            head_timeout_s=config.timeout_request_headers,
            body_timeout_s=config.timeout_request_body,
            keep_alive_s=config.timeout_keep_alive,
        )
