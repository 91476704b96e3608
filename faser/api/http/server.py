"""LimitedServer: uvicorn's server, with connections that have limits."""

import socket

import uvicorn

from faser.api.http.acceptor import Acceptor
from faser.api.http.connection import HttpConnection
from faser.api.http.connection_pool import ConnectionPool
from faser.api.http.descriptors import connection_room
from faser.api.http.limits import HttpLimits


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
