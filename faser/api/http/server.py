"""LimitedServer: uvicorn's server, with connections that have limits, accepted as long as the pool has room.

asyncio's own server counts no connection during its TLS handshake, and leaves the caller no say when the
descriptors have run out.
"""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

import uvicorn

from faser.api.http.connection import HttpConnection
from faser.api.http.connection_pool import ConnectionPool
from faser.api.http.limits import HttpLimits, connection_room

_log = logging.getLogger("faser.api")
_BACKLOG = 2048  # connections that the system holds until they are accepted
_DEFER_ACCEPT_S = 1  # how long, about, the system waits for a client's first bytes before it hands it over anyway
_ACCEPTS_AT_ONCE = 8  # then connections that are open have their turn
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_EXHAUSTED_PAUSE_S = 0.1


class Acceptor:
    """Accepts until it is closed. Made within a running event loop."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        pool: ConnectionPool,
        new_connection: Callable[[], HttpConnection],
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        """listener: bound. tls: None: connections are not encrypted."""
        self._listener = listener
        self._pool = pool
        self._new_connection = new_connection
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        if hasattr(socket, "TCP_DEFER_ACCEPT"):  # Linux: who has not sent anything takes no descriptor yet
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER_ACCEPT_S)
        listener.listen(_BACKLOG)
        self._resume()

    def close(self) -> None:
        """Accept nothing more, and drop connections that are still opening. The listener stays its owner's."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        for opening in self._opening:
            opening.cancel()

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                client, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._make_room(error)
                return
            self._open(client)

    def _make_room(self, error: OSError) -> None:
        """Something other than connections has used descriptors up: close one and try again in a moment."""
        _log.warning("connections cannot be accepted: %s", error.strerror)
        self._pool.evict()
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(_EXHAUSTED_PAUSE_S, self._resume)

    def _open(self, client: socket.socket) -> None:
        client.setblocking(False)
        connection = self._new_connection()
        if not self._pool.enter(connection):
            client.close()
            return
        opening = self._loop.create_task(self._connect(client, connection))
        connection.opening = opening
        self._opening.add(opening)
        opening.add_done_callback(lambda done: self._on_opened(done, client, connection))

    async def _connect(self, client: socket.socket, connection: HttpConnection) -> None:
        await self._loop.connect_accepted_socket(
            lambda: connection,
            client,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else self._handshake_timeout_s,
        )

    def _on_opened(self, opening: asyncio.Task[None], client: socket.socket, connection: HttpConnection) -> None:
        self._opening.discard(opening)
        if connection.is_open:
            return
        self._pool.leave(connection)
        client.close()
        if not opening.cancelled() and (error := opening.exception()) is not None:
            _log.debug("a connection could not be opened: %s", error)


class LimitedServer(uvicorn.Server):
    """Serves on the sockets that `serve` is given, and on no other."""

    def __init__(self, config: uvicorn.Config, limits: HttpLimits) -> None:
        super().__init__(config)
        self._limits = limits
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises ConfigError if the limit on open files has room for too few connections."""
        await super().startup(sockets=[])  # uvicorn itself listens on none
        limits = self._limits
        pool = ConnectionPool(
            max_connections=connection_room(limits.max_connections), max_body_bytes=limits.max_bodies_bytes
        )

        def new_connection() -> HttpConnection:
            return HttpConnection(
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                limits=limits,
                pool=pool,
            )

        self._acceptors = [
            Acceptor(
                each,
                pool=pool,
                new_connection=new_connection,
                tls=self.config.ssl,
                handshake_timeout_s=limits.head_timeout_s,
            )
            for each in sockets or []
        ]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)
