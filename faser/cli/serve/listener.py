"""The listening socket. It is bound before anything is loaded, so that a port in use is reported at once."""

import errno
import socket

from faser.config.declaration import Label, flag_label
from faser.errors import ConfigError


def listen(host: str, port: int, label: Label = flag_label) -> socket.socket:
    """A socket bound to host and port; connections queue until the server accepts them.

    label: what messages call a setting.
    Raises ConfigError: the port is in use or needs privileges, or the address is not of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"{label('host')} is {host}; it must be an address of this machine: {error.strerror}"
        ) from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1)  # makes a second server on this port fail now; the server sets the real backlog
    except OSError as error:
        listener.close()
        raise ConfigError(_problem(host, port, label, error)) from None
    return listener


def _problem(host: str, port: int, label: Label, error: OSError) -> str:
    """Which setting is wrong, and what to give instead."""
    match error.errno:
        case errno.EADDRNOTAVAIL:
            named = f"{label('host')} is {host}"
            return f"{named}; it must be an address of this machine, such as 127.0.0.1 or 0.0.0.0 for all"
        case errno.EADDRINUSE:
            other = port + 1 if port < 65535 else port - 1
            advice = f"stop the program that uses it, or choose another port, such as --port {other}"
        case errno.EACCES:
            advice = "choose a port from 1024 on, such as --port 8000"
        case _:
            advice = "choose another one with --port"
    return f"{label('port')} is {port}; {host}:{port} cannot be used: {error.strerror}; {advice}"
