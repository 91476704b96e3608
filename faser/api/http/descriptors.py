"""The limit on open files, and how many connections it has room for."""

import contextlib
import os
import resource

from faser.errors import ConfigError

# What the process may still open beside connections: pipes to the engine, files, sockets that are being closed.
_RESERVED = 32
_WANTED = 1 << 16
_FEWEST_CONNECTIONS = 8


def raise_open_files_limit() -> None:
    """Raise the soft limit as far as the hard limit allows: many systems start processes with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems refuse numbers below the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_room(wanted: int | None) -> int:
    """How many connections may be open: wanted, or what the limit on open files leaves if that is less.

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
