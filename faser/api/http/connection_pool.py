"""ConnectionPool: which connections are open, and which one is closed first when there are too many.

Knows phases only; has never heard of HTTP or sockets.
"""

import logging
import time
from collections import OrderedDict
from enum import Enum, auto
from typing import Protocol

_log = logging.getLogger("faser.api")

# Connections that only probes may use while all others are being answered.
_PROBE_RESERVE = 16
_WARN_EVERY_S = 60.0


class ConnectionPhase(Enum):
    """Phases of a connection, by what it waits for."""

    REFUSED = auto()  # its client, to read why it is refused
    IDLE = auto()  # the next request
    HEAD = auto()  # the rest of a head, or of a TLS handshake
    BODY = auto()  # the rest of a body
    ANSWERING = auto()  # the application, or the client to take the answer


# Connections that wait for their client may be closed to make room; of equally many, the phase that comes first.
_WAITING = (ConnectionPhase.IDLE, ConnectionPhase.HEAD, ConnectionPhase.BODY)


class PooledConnection(Protocol):
    def evict(self) -> None:
        """Close at once, to make room. The connection is no longer in the pool."""


class ConnectionPool:
    """All open connections. max_body_bytes: of all bodies that are being received.

    Some connections are kept free of long work, so that a probe is answered whatever else goes on: requests are
    answered on at most three quarters of max_connections, or on all but 16.
    """

    def __init__(self, *, max_connections: int, max_body_bytes: int) -> None:
        self._max_connections = max_connections
        self._max_answering = max_connections - max(1, min(_PROBE_RESERVE, max_connections // 4))
        self._max_body_bytes = max_body_bytes
        self._phases: dict[PooledConnection, ConnectionPhase] = {}
        self._by_phase: dict[ConnectionPhase, OrderedDict[PooledConnection, None]] = {
            phase: OrderedDict() for phase in ConnectionPhase
        }
        self._body_bytes: dict[PooledConnection, int] = {}
        self._num_body_bytes = 0
        self._warned_s = float("-inf")

    @property
    def num_connections(self) -> int:
        return len(self._phases)

    @property
    def can_answer(self) -> bool:
        """Return whether one more request may be answered; probes always may."""
        return len(self._by_phase[ConnectionPhase.ANSWERING]) < self._max_answering

    def enter(self, connection: PooledConnection) -> bool:
        """Add a new connection and close another one if there are too many; False: there is no room."""
        if self.num_connections >= self._max_connections:
            self._warn()
            if not self.evict():
                return False
        self.move(connection, ConnectionPhase.HEAD)
        return True

    def move(self, connection: PooledConnection, phase: ConnectionPhase) -> None:
        """The connection has entered a phase."""
        self._leave_phase(connection)
        self._phases[connection] = phase
        self._by_phase[phase][connection] = None

    def leave(self, connection: PooledConnection) -> None:
        """The connection is closed, or about to be. No effect if it has left before."""
        self._leave_phase(connection)
        self._num_body_bytes -= self._body_bytes.pop(connection, 0)

    def evict(self) -> bool:
        """Close a connection that waits for its client; False: none does.

        A refused one if there is any, else one of the phase with the most connections, so that clients who never
        send their bodies take no room from those who send a head. Within a phase, the one that has waited longest.
        """
        if self._evict_from(ConnectionPhase.REFUSED):
            return True
        return self._evict_from(max(_WAITING, key=lambda phase: len(self._by_phase[phase])))

    def hold_body(self, connection: PooledConnection, num_bytes: int) -> None:
        """The connection holds these bytes of an incomplete body. If all hold too many, the oldest go."""
        self._num_body_bytes += num_bytes - self._body_bytes.pop(connection, 0)
        if num_bytes:
            self._body_bytes[connection] = num_bytes
        while self._num_body_bytes > self._max_body_bytes and self._evict_from(ConnectionPhase.BODY):
            pass

    def _evict_from(self, phase: ConnectionPhase) -> bool:
        for connection in self._by_phase[phase]:
            self.leave(connection)
            connection.evict()
            return True
        return False

    def _leave_phase(self, connection: PooledConnection) -> None:
        phase = self._phases.pop(connection, None)
        if phase is not None:
            del self._by_phase[phase][connection]

    def _warn(self) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            _log.warning(
                "connection limit (%d) reached; closing those that wait for their clients, longest first",
                self._max_connections,
            )
