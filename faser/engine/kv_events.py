"""KvEventPublisher: tells subscribers what the prefix index holds, over ZeroMQ, as vLLM does.

    PUB      topic · number of the batch · batch           number: 8 bytes, big-endian, from 0
    ROUTER   asked for a number: the batches from it on, as far as they are kept, in the same three frames; then
             no topic · number -1 · nothing

A batch is [seconds since 1970, events, rank], in msgpack, and has the events of one step. A subscriber that misses
a number asks for what it has missed; one that sees numbers begin again forgets what it knows. A thread sends, so
that no step waits for a subscriber; what is more than `max_queue_size` steps behind is dropped, and the numbers
that are missing then say so.

Source: vllm/distributed/kv_events.py (September 2026; earlier versions replay batches without a topic), and
llm-d's router, pkg/kvevents, which reads it.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any

import msgspec

from faser.config.kv_events import KvEventsConfig
from faser.engine.contract.companion import Companion
from faser.engine.contract.kv_events import KvEvent
from faser.engine.contract.plan import StepDeltas
from faser.errors import ConfigError

if TYPE_CHECKING:
    import zmq

_END = -1
_NUMBER_BYTES = 8
_POLL_S = 0.1
_RANK = 0

_log = logging.getLogger("faser.engine")


class KvEventPublisher(Companion):
    """Sends the events of every step until `close`. take: returns those since the last call.

    Raises ConfigError where it cannot bind, or has no pyzmq.
    """

    def __init__(self, config: KvEventsConfig, take: Callable[[], list[KvEvent]]) -> None:
        try:
            import zmq
        except ImportError:
            raise ConfigError("kv_events_config needs the package pyzmq: pip install 'faser[kv-events]'") from None
        self._take = take
        self._topic = config.topic.encode()
        self._queue: Queue[list[KvEvent]] = Queue(config.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._sockets: list[Any] = []
        self._ended = threading.Event()
        self._number = 0
        self._lost = 0  # steps whose events found no room; their numbers are left out
        self._publisher = self._socket(zmq.PUB, config.endpoint, config.hwm)
        self._replays = None
        if config.replay_endpoint is not None:
            self._replays = self._socket(zmq.ROUTER, config.replay_endpoint, config.hwm)
        self._thread = threading.Thread(target=self._run, name="faser-kv-events", daemon=True)
        self._thread.start()

    def stepped(self, deltas: StepDeltas) -> None:
        """Send the events of one step, in their order. Does not wait."""
        del deltas
        events = self._take()
        if not events:
            return
        try:
            self._queue.put_nowait(events)
        except Full:
            if not self._lost:
                _log.warning("KV events are dropped: %d steps wait to be sent", self._queue.maxsize)
            self._lost += 1

    def close(self) -> None:
        """Send what waits, for a second at most."""
        self._ended.set()
        self._thread.join(1.0)
        for each in self._sockets:
            each.close(linger=0)
        self._context.term()

    def _socket(self, kind: int, endpoint: str, most: int) -> "zmq.Socket[bytes]":
        import zmq

        found = self._context.socket(kind)
        self._sockets.append(found)
        found.set_hwm(most)
        try:
            # As vLLM: one that names an address of another machine is one to connect to.
            if (
                kind == zmq.ROUTER
                or "*" in endpoint
                or "::" in endpoint
                or endpoint.startswith(("ipc:", "inproc:"))
            ):
                found.bind(endpoint)
            else:
                found.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"kv_events_config: {endpoint} cannot be used: {error}") from None
        return found

    def _run(self) -> None:
        while not (self._ended.is_set() and self._queue.empty()):
            self._answer_replays()
            with contextlib.suppress(Empty):
                self._send(self._queue.get(timeout=_POLL_S))

    def _send(self, events: list[KvEvent]) -> None:
        lost, self._lost = self._lost, 0
        number, self._number = self._number + lost, self._number + lost + 1
        batch = msgspec.msgpack.encode((time.time(), events, _RANK))
        self._kept.append((number, batch))
        self._publisher.send_multipart((self._topic, _bytes(number), batch))

    def _answer_replays(self) -> None:
        import zmq

        while self._replays is not None and self._replays.poll(0):
            client, *_, asked = self._replays.recv_multipart()
            first = int.from_bytes(asked, "big")
            with contextlib.suppress(zmq.ZMQError):  # the client is gone
                for number, batch in list(self._kept):
                    if number >= first:
                        self._replays.send_multipart((client, b"", self._topic, _bytes(number), batch))
                self._replays.send_multipart((client, b"", b"", _bytes(_END), b""))


def _bytes(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big", signed=True)
