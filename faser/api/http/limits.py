"""Limits of connections: what each may send, for how long, and how many the limit on open files has room for."""

import contextlib
import os
import resource
from dataclasses import dataclass
from typing import Self

from faser.config.server import ServerConfig
from faser.errors import ConfigError

# What the process may still open besides connections: pipes to the engine, files, sockets that are being closed.
_RESERVED = 32
_WANTED = 1 << 16
_FEWEST_CONNECTIONS = 8

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


def raise_open_files_limit() -> None:
    """Raise the soft limit as far as the hard limit allows: many systems start processes with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems refuse numbers below the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_room(wanted: int | None) -> int:
    """Return the maximum number of open connections: wanted, or less if the limit on open files leaves less.

    Raises ConfigError if that is too little to serve.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _WANTED if soft == resource.RLIM_INFINITY else soft
    used = len(os.listdir("/dev/fd"))
    room = limit - used - _RESERVED
    if room < _FEWEST_CONNECTIONS:
        least = used + _RESERVED + _FEWEST_CONNECTIONS
        raise ConfigError(f"the limit on open files (ulimit -n) is {limit}; it must be at least {least}")
    return room if wanted is None else min(wanted, room)
