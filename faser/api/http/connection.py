"""HttpConnection: one client's connection, with limits on what it may send and on how long it may take.

uvicorn reads HTTP/1.1 and runs the application; this module decides when a client is refused (400, 408, 431, 503)
or its connection is closed. Knows no routes but the probes.
"""

import asyncio
from collections import deque
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from faser.api.bodies.errors import ErrorResponse, HttpError
from faser.api.http.connection_pool import ConnectionPhase, ConnectionPool
from faser.api.http.limits import HttpLimits
from faser.api.http.paths import route_of

# Answered even while all connections for requests are in use.
PROBE_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics"})

_MAX_PIPELINED = 16  # requests that wait on one connection; hardly any client sends a second one

# How long, and for how many bytes, a refused client may go on sending. Closed at once, its system may throw away
# the answer before it is read (RFC 9112, section 9.6).
_LINGER_S = 2.0
_LINGER_BYTES = 8 << 20

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_PROBE_S = 0.25
_SLOWEST_PROBE_S = 8.0
_UNPROBED_PATIENCE_S = 1.0


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol with limits. In the pool from before its TLS handshake until it is closed.

    opening: the task that takes the connection through its handshake.
    """

    def __init__(
        self,
        *,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        limits: HttpLimits,
        pool: ConnectionPool,
    ) -> None:
        super().__init__(config=config, server_state=server_state, app_state=app_state)
        self.opening: asyncio.Task[None] | None = None
        self._limits = limits
        self._pool = pool
        self._phase = ConnectionPhase.HEAD
        self._deadline: asyncio.TimerHandle | None = None
        self._send_deadline: asyncio.TimerHandle | None = None
        self._prober: asyncio.TimerHandle | None = None

        # What is being received. Bytes outside of bodies: request line, headers, trailers, chunk extensions.
        self._in_head = False
        self._in_body = False
        self._served_before = False
        self._num_bytes_outside = 0
        self._num_headers = 0
        self._num_hosts = 0
        self._num_body_bytes = 0
        self._num_discarded_bytes = 0

        # What has been received and is not answered yet, in order.
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._refusal: HttpError | None = None
        self._refused = False
        self._half_closed = False
        self._gone = False

    @property
    def is_open(self) -> bool:
        """False: its handshake has not succeeded."""
        return self.transport is not None

    # asyncio calls these

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline(self._limits.head_timeout_s)

    def data_received(self, data: bytes) -> None:
        """Hands data to the parser in pieces, so that it never holds more of a head than is allowed."""
        if self._refused:
            self._discard(len(data))
            return
        limit = self._limits.max_head_bytes
        while data and not self._refused and not self.transport.is_closing():
            piece, data = data[: limit - self._num_bytes_outside], data[limit - self._num_bytes_outside :]
            self._num_bytes_outside += len(piece)
            super().data_received(piece)
            if self._num_bytes_outside >= limit:
                self._refuse(self._too_large())
        self._settle()
        self._pool.hold_body(self, 0 if self._gone or self._refused else self._num_body_bytes)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more; True keeps the connection open for the answers that it waits for.

        A client that has closed its socket looks the same until something is sent to it. TLS has no half-closing.
        """
        self._half_closed = True
        if self._phase is not ConnectionPhase.ANSWERING or self.transport.get_extra_info("sslcontext") is not None:
            return False
        if self._unanswered and self._unanswered[0].scope["http_version"] == "1.0":
            self._prober = self.loop.call_later(_UNPROBED_PATIENCE_S, self._abort_unstarted)
        else:
            self._probe(_FIRST_PROBE_S)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        self._pool.leave(self)
        for timer in (self._deadline, self._send_deadline, self._prober):
            if timer is not None:
                timer.cancel()
        self._disconnect()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_deadline = self.loop.call_later(self._limits.send_timeout_s, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_deadline is not None:
            self._send_deadline.cancel()

    # The pool calls this

    def evict(self) -> None:
        if not self.is_open:
            assert self.opening is not None
            self.opening.cancel()
        elif self._phase is ConnectionPhase.BODY and not self._answer_has_begun:
            self._gone = True
            self._disconnect()
            self.transport.write(self._encoded(_overloaded()))
            self.transport.close()
        else:
            self._gone = True
            self._abort()

    # The parser calls these

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._num_headers = self._num_hosts = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self._limits.max_headers:
            limit = self._limits.max_headers
            message = f"the request has more than {limit} headers; at most that many are allowed"
            self._refusal = HttpError(431, message)
            raise ValueError(self._refusal.message)
        self._num_hosts += name.lower() == b"host"
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self._unanswered) >= _MAX_PIPELINED:
            raise ValueError(f"{_MAX_PIPELINED} requests are waiting on one connection")
        self._check_host()
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        self._num_bytes_outside = 0
        self._unanswered.append(self.cycle)
        self.flow.resume_reading()  # paused behind an earlier request, it would not see the client leave

    def on_body(self, body: bytes) -> None:
        self._num_bytes_outside = 0
        if not self.cycle.response_started:
            self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._served_before = True
        self._num_bytes_outside = self._num_body_bytes = 0
        super().on_message_complete()

    # uvicorn calls these

    def send_400_response(self, msg: str) -> None:
        """The parser, or one of the methods that it calls, has refused what was sent."""
        self._refuse(self._refusal or HttpError(400, f"the request is not HTTP/1.1: {msg}"))

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if self.transport.is_closing():
            self._set_deadline(self._limits.send_timeout_s)
        else:
            self._settle()

    # Phases

    def _settle(self) -> None:
        """Note which phase the connection is in now, and set the deadline of a new one."""
        phase = self._current_phase()
        if phase is self._phase or self._gone or self.transport.is_closing():
            return
        if phase is ConnectionPhase.ANSWERING and not self._pool.can_answer and not self._asks_for_probe():
            self._refuse(_overloaded())
            return
        self._phase = phase
        self._pool.move(self, phase)
        self._set_deadline(self._timeout_s(phase))
        if self._half_closed and phase in (ConnectionPhase.IDLE, ConnectionPhase.HEAD, ConnectionPhase.BODY):
            self._close()  # the rest never comes

    def _current_phase(self) -> ConnectionPhase:
        if self._refused:
            return ConnectionPhase.REFUSED
        if self._in_body and len(self._unanswered) <= 1:
            return ConnectionPhase.BODY
        if self._unanswered:
            return ConnectionPhase.ANSWERING
        is_first = not self._served_before
        return (
            ConnectionPhase.HEAD if is_first or self._in_head or self._num_bytes_outside else ConnectionPhase.IDLE
        )

    def _timeout_s(self, phase: ConnectionPhase) -> float | None:
        match phase:
            case ConnectionPhase.REFUSED:
                return _LINGER_S
            case ConnectionPhase.IDLE:
                return self._limits.keep_alive_s
            case ConnectionPhase.HEAD:
                return self._limits.head_timeout_s
            case ConnectionPhase.BODY:
                return self._limits.body_timeout_s
            case ConnectionPhase.ANSWERING:
                return None

    def _set_deadline(self, timeout_s: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if timeout_s is None else self.loop.call_later(timeout_s, self._on_deadline)

    def _on_deadline(self) -> None:
        if self.transport.is_closing():
            self._abort()  # the client does not take the end of its answer
        elif self._phase is ConnectionPhase.IDLE:
            self._close()
        elif self._phase is ConnectionPhase.BODY:
            self._refuse(_too_slow("body", self._limits.body_timeout_s))
        elif self._phase is ConnectionPhase.HEAD and (self._in_head or self._num_bytes_outside):
            self._refuse(_too_slow("request line and headers", self._limits.head_timeout_s))
        else:
            self._abort()

    def _asks_for_probe(self) -> bool:
        return route_of(self._unanswered[0].scope["path"], self.root_path) in PROBE_PATHS

    # Half-closed connections

    def _probe(self, next_s: float) -> None:
        """Send what every client skips. The system of one that has gone resets the connection: the request ends.

        next_s: seconds until the next probe.
        """
        if self.transport.is_closing() or not self._unanswered:
            return
        if not self._unanswered[0].response_started:
            self.transport.write(_CONTINUE)
        self._prober = self.loop.call_later(next_s, self._probe, min(2 * next_s, _SLOWEST_PROBE_S))

    def _abort_unstarted(self) -> None:
        """HTTP/1.0 has nothing to probe with: who waits for longer than a moment counts as gone."""
        if self._unanswered and not self._unanswered[0].response_started:
            self._abort()

    def _check_host(self) -> None:
        """Raise ValueError as RFC 9112, section 3.2, demands: of two a proxy may have read the other one."""
        if self._num_hosts > 1 or (not self._num_hosts and self.parser.get_http_version() == "1.1"):
            message = f"the request has {self._num_hosts} Host headers; it must have one"
            self._refusal = HttpError(400, message)
            raise ValueError(message)

    # Refusing and closing

    @property
    def _answer_has_begun(self) -> bool:
        """Return whether it is too late to send an error: it would land in an answer or after one."""
        if self._phase is ConnectionPhase.ANSWERING or (self._in_body and not self._unanswered):
            return True
        return any(cycle.response_started for cycle in self._unanswered)

    def _refuse(self, error: HttpError) -> None:
        """Answer with an error, let the client read it, and close. Closes at once if an answer has begun."""
        if self._refused:
            return
        if self.access_log:
            self.access_logger.info("%s - refused: %d %s", self.client, error.status, error.message)
        if self._answer_has_begun:
            self._abort()
            return
        self._refused = True
        self._disconnect()
        self.flow.resume_reading()
        self.transport.write(self._encoded(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._settle()

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded_bytes += num_bytes
        if self._num_discarded_bytes > _LINGER_BYTES:
            self._abort()

    def _disconnect(self) -> None:
        """Tell the application that the client has gone, so that it ends its work."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    def _close(self) -> None:
        """Close once all that has been written is sent, or send_timeout_s later."""
        self.transport.close()
        self._set_deadline(self._limits.send_timeout_s)

    def _abort(self) -> None:
        self._disconnect()
        self.transport.abort()

    def _too_large(self) -> HttpError:
        limit = self._limits.max_head_bytes
        is_url = self._in_head and len(self.url) > limit // 2
        if is_url:
            message = f"the request line is too long; with the headers, at most {limit} bytes are allowed"
            return HttpError(414, message)
        message = f"the request line and headers have more than {limit} bytes; at most that many are allowed"
        return HttpError(431, message)

    def _encoded(self, error: HttpError) -> bytes:
        """The error as bytes for the socket. Says that the connection closes."""
        response = ErrorResponse(error)
        status = HTTPStatus(error.status)
        headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), *(b": ".join(header) for header in headers)]
        return b"\r\n".join([*lines, b"", bytes(response.body)])


def _too_slow(part: str, timeout_s: float) -> HttpError:
    return HttpError(408, f"the {part} did not arrive within {timeout_s:g} s")


def _overloaded() -> HttpError:
    return HttpError(503, "all connections for requests are in use", headers={"Retry-After": "1"})
