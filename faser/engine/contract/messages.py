"""The messages between front-end and engine, and their frames.

One message per engine step carries all deltas of that step. A frame is a length (4 bytes, little endian)
and a msgpack value. The same frames run whether the engine is a child process or a thread.
"""

import socket
import struct
from asyncio import IncompleteReadError, StreamReader

import msgspec

from faser.config.engine import EngineConfig
from faser.engine.contract.latency_model import Pace
from faser.engine.contract.plan import StepDeltas
from faser.types.adapter import Adapter
from faser.types.engine import EngineState, ModelInfo
from faser.types.request import Request
from faser.types.statistics import EngineStats

_LENGTH = struct.Struct("<I")


class Configure(msgspec.Struct, frozen=True, tag=True):
    """First message to an engine: what to load. directory: of the resolved model."""

    config: EngineConfig
    directory: str


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request, or one of its samples. index: None means all samples."""

    request_id: str
    index: int | None = None


class Reclassify(msgspec.Struct, frozen=True, tag=True):
    """Serve a request with other targets and limits, if it still waits. request: as it is to be served."""

    request: Request


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load an adapter ahead of the requests that want it. The answer is AdapterLoaded."""

    adapter: Adapter


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Free an adapter as soon as no request uses it: later requests will not want it."""

    digest: str


class WatchSteps(msgspec.Struct, frozen=True, tag=True):
    """Request for statistics after every step from now on, or only a few times a second."""

    watched: bool


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """The engine ends after the current step and drops all requests."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Progress of a long stage of loading. done and total share a unit, which the stage chooses."""

    stage: str
    done: int
    total: int


class StateChange(msgspec.Struct, frozen=True, tag=True):
    state: EngineState


class Loaded(msgspec.Struct, frozen=True, tag=True):
    info: ModelInfo


class Deltas(msgspec.Struct, frozen=True, tag=True):
    """The deltas of one step. stats: the newest; None: those of a later step follow. pace: the same, rarer.

    uncomputed: sent with a pace: tokens that are left of prompts that have begun, by request.
    """

    deltas: StepDeltas
    stats: EngineStats | None
    pace: Pace | None = None
    uncomputed: dict[str, int] = {}


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The engine refused a request that the front-end had accepted.

    retry_after_s: when it has a chance, if the load is the reason; None: never.
    """

    request_id: str
    message: str
    param: str | None
    retry_after_s: int | None = None


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """The answer to LoadAdapter. error: why the adapter cannot be used; None: it can."""

    digest: str
    error: str | None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Last message of an engine that fails. operator_error: the configuration or the checkpoint is the cause."""

    message: str
    operator_error: bool


ToEngine = Configure | Submit | Reclassify | Abort | LoadAdapter | DropAdapter | WatchSteps | Shutdown
FromEngine = Progress | StateChange | Loaded | Deltas | Rejected | AdapterLoaded | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def to_text(configure: Configure) -> str:
    return msgspec.json.encode(configure).decode()


def from_text(configure: str) -> Configure:
    """Return the Configure that to_text was given."""
    return msgspec.json.decode(configure, type=Configure)


def receive(connection: socket.socket) -> ToEngine | None:
    """The front-end's next message; None when it has closed the connection. Blocks."""
    head = _read(connection, _LENGTH.size)
    if head is None:
        return None
    body = _read(connection, _LENGTH.unpack(head)[0])
    if body is None:
        return None
    message: ToEngine = _to_engine.decode(body)
    return message


async def receive_async(reader: StreamReader) -> FromEngine | None:
    """The engine's next message; None when it has closed the connection."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        body = await reader.readexactly(_LENGTH.unpack(head)[0])
    except (IncompleteReadError, ConnectionError):
        return None
    message: FromEngine = _from_engine.decode(body)
    return message


def _read(connection: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        try:
            part = connection.recv(min(size, 1 << 20))
        except OSError:  # reset by the peer, or closed by this side
            return None
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
