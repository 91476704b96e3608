"""The messages between the front-end and the process that trains a refreshed head.

    front-end   Configure (messages.py)       Learn ──────────────▶ …
    learner                          Started         Learned ─────▶

Frames are those of messages.py. The front-end may stop a learner that has said Started at any moment.
"""

import socket
from asyncio import StreamReader

import msgspec

from faser.engine.contract.messages import Configure, read_body, read_body_async


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
