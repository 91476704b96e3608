"""The listening socket. It is bound before anything is loaded, so that a port in use is reported at once."""

import socket

from faser.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to host and port; connections queue until the server accepts them.

    Raises ConfigError: the port is in use or needs privileges, or the address is not of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host is {host}; it must be an address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1)  # makes a second server on this port fail now; the server sets the real backlog
    except OSError as error:
        listener.close()
        raise ConfigError(f"--port is {port}; {host}:{port} cannot be used: {error.strerror}") from None
    return listener
