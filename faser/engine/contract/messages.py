"""The messages between front-end and engine, and those to the process that trains a refreshed head; their frames.

One message per engine step carries all deltas of that step. A frame is a length (4 bytes, little endian)
and a msgpack value. The same frames run whether the engine is a child process or a thread.

    front-end   Configure           Learn ──────────────▶ …
    learner                 Started        Learned ─────▶

The front-end may stop a learner that has said Started at any moment.
"""

import socket
import struct
from asyncio import IncompleteReadError, StreamReader

import msgspec

from faser.config.engine import EngineConfig
from faser.engine.contract.latency_model import Pace
from faser.engine.contract.plan import StepDeltas
from faser.types import EngineState, EngineStats, ModelInfo, Request

_LENGTH = struct.Struct("<I")


class Configure(msgspec.Struct, frozen=True, tag=True):
    """First message to an engine: what to load. directory: of the resolved model.

    refreshes_head: refreshed heads may follow. An engine that could not take them fails with the reason.
    """

    config: EngineConfig
    directory: str
    refreshes_head: bool = False


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request, or one of its samples. index: None means all samples."""

    request_id: str
    index: int | None = None


class WatchSteps(msgspec.Struct, frozen=True, tag=True):
    """Whether statistics are wanted after every step from now on, or only a few times a second."""

    watched: bool


class AdoptHead(msgspec.Struct, frozen=True, tag=True):
    """A refreshed head, which drafts for sequences that start from now on; AdoptedHead answers."""

    directory: str


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
    """The deltas of one step. stats: the newest; None: those of a later step follow. pace: the same, rarer."""

    deltas: StepDeltas
    stats: EngineStats | None
    pace: Pace | None = None


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The engine refused a request that the front-end had accepted."""

    request_id: str
    message: str
    param: str | None


class AdoptedHead(msgspec.Struct, frozen=True, tag=True):
    """refusal: why the head is not used; None: it is."""

    directory: str
    refusal: str | None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Last message of an engine that fails. operator_error: the configuration or the checkpoint is the cause."""

    message: str
    operator_error: bool


ToEngine = Configure | Submit | Abort | WatchSteps | AdoptHead | Shutdown
FromEngine = Progress | StateChange | Loaded | Deltas | Rejected | AdoptedHead | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def to_text(configure: Configure) -> str:
    return msgspec.json.encode(configure).decode()


def from_text(configure: str) -> Configure:
    """What to_text was given."""
    return msgspec.json.decode(configure, type=Configure)


def receive(connection: socket.socket) -> ToEngine | None:
    """The front-end's next message; None when it has closed the connection. Blocks."""
    body = read_body(connection)
    if body is None:
        return None
    message: ToEngine = _to_engine.decode(body)
    return message


async def receive_async(reader: StreamReader) -> FromEngine | None:
    """The engine's next message; None when it has closed the connection."""
    body = await read_body_async(reader)
    if body is None:
        return None
    message: FromEngine = _from_engine.decode(body)
    return message


def read_body(connection: socket.socket) -> bytes | None:
    """What the next frame holds; None when the peer has closed the connection. Blocks."""
    head = _read(connection, _LENGTH.size)
    return None if head is None else _read(connection, _LENGTH.unpack(head)[0])


async def read_body_async(reader: StreamReader) -> bytes | None:
    """What the next frame holds; None when the peer has closed the connection."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        return await reader.readexactly(_LENGTH.unpack(head)[0])
    except (IncompleteReadError, ConnectionError):
        return None


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


class LearningRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a head is refreshed. epochs: over the answers. rows, rate, warm_up: as of TrainingSettings.

    state_bytes: of the target's states that are kept; of more answers only the newest are learned from.
    """

    epochs: int = 3
    rows: int = 256
    rate: float = 1e-3
    warm_up: int = 10
    state_bytes: int = 256 << 20


class LearnableAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One finished answer. number: it has no other answer's. held_out: it measures, and is never learned from."""

    number: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float
    held_out: bool


class Learn(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Train the head that is served on these answers.

    head: its directory; None: it is the one that the engine began with. into: where the trained head is written.
    seed: of the order of answers.
    """

    head: str | None
    into: str
    answers: tuple[LearnableAnswer, ...]
    rules: LearningRules
    seed: int


class Started(msgspec.Struct, frozen=True, tag=True):
    """The learner ends with its parent from now on, even while it is stopped."""


class Learned(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What became of a Learn. is_better: the head in `into` is to be served.

    before, after: accepted tokens expected of a draft on the held-out answers, of the head that is served and of
    the trained one. noise: what their difference must exceed. held_out: answers that were measured. tokens: of the
    answers that were learned from.
    """

    is_better: bool
    before: float
    after: float
    noise: float
    held_out: int
    tokens: int


class Unable(msgspec.Struct, frozen=True, tag=True):
    """Last message of a learner that fails."""

    message: str


FromLearner = Started | Learned | Unable

_to_learner = msgspec.msgpack.Decoder(Configure | Learn)
_from_learner = msgspec.msgpack.Decoder(FromLearner)


def receive_task(connection: socket.socket) -> Configure | Learn | None:
    """The front-end's next message; None when it has closed the connection. Blocks."""
    body = read_body(connection)
    if body is None:
        return None
    message: Configure | Learn = _to_learner.decode(body)
    return message


async def receive_from_learner(reader: StreamReader) -> FromLearner | None:
    """The learner's next message; None when it has closed the connection."""
    body = await read_body_async(reader)
    if body is None:
        return None
    message: FromLearner = _from_learner.decode(body)
    return message
