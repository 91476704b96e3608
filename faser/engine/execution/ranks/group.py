"""RankGroup: the ranks of one model, over gloo.

They meet at a store: there rank 0 leaves what to load, and the others what became of it. From then on every
collective is called by all ranks in the same order. Rank 0 waits for the others a few seconds at most, so that one
that is dead or stuck ends the engine, which is started again; the others wait for rank 0 as long as it lives, for
it is their parent, or torchrun's.
"""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from faser.config.environment import RankPlace
from faser.engine.execution.ranks.meeting import connect, secret_of, store_of, torchrun_store
from faser.engine.execution.ranks.roll_call import answer_roll_call, call_roll, verdict
from faser.errors import EngineError

Found = TypeVar("Found")

ANSWER_S = 8.0  # for which rank 0 waits in a collective
_POLL_S = 0.1
_LONG = timedelta(days=30)
_INLINE = 4096  # bytes that one broadcast carries, most of a step's messages
_LENGTH = 8

_log = logging.getLogger("faser.engine")


class RankGroup:
    """Group of ranks: see the module. check: raises EngineError that names an ended rank, while rank 0 waits.

    secret: what the ranks of one machine show each other; empty: torchrun has started them. answer_s: for which
    rank 0 waits in a collective. Implements Collectives, once `connect` has returned.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        check: Callable[[], None] = lambda: None,
        *,
        secret: bytes = b"",
        answer_s: float = ANSWER_S,
    ) -> None:
        self.rank = rank
        self.size = size
        self.is_broken = False  # a rank is gone or hangs: no collective ends any more
        self._store = store
        self._check = check
        self._secret = secret
        self._answer_s = answer_s
        self._gloo: Any = None
        self._num_entered = 0  # collectives
        self._closed = threading.Event()

    # Before all ranks have their parts. Each raises EngineError where torchrun's store is gone.

    def leave(self, name: str, value: str) -> None:
        """Leave a value for other ranks to find."""
        self._use_store(lambda: self._store.set(name, value))

    def has(self, name: str) -> bool:
        """Return whether a rank has left a note under this name."""
        return self._use_store(lambda: bool(self._store.check([name])))

    def find(self, name: str) -> str:
        """Return what another rank has left; waits for it. Raises EngineError if this rank closes meanwhile."""
        while not self.has(name):
            self._check()
            if self._closed.wait(_POLL_S):
                raise EngineError("the ranks of the tensor-parallel model end")
        return self._use_store(lambda: self._store.get(name).decode())

    def connect(self) -> None:
        """Connect to the other ranks. Each calls it when it has its part of the model, and waits for the others.

        Raises EngineError that names a rank that does not come, or if another program comes in its place.
        """
        if self.rank:
            answer_roll_call(self._store, self.rank, lambda: self._num_entered, self._closed)
        self._num_entered += 1
        try:
            self._gloo = connect(self._store, self.rank, self.size, self._secret)
        except RuntimeError as error:
            raise self._failure(error) from None
        self._gloo._set_default_timeout(_LONG if self.rank else timedelta(seconds=self._answer_s))

    def close(self) -> None:
        self._closed.set()
        self._gloo = None

    # Collectives.

    def all_reduce(self, x: Tensor) -> Tensor:
        self._run(lambda: self._gloo.allreduce([x]))
        return x

    def gather(self, part: Tensor) -> list[Tensor] | None:
        found = None if self.rank else [torch.empty_like(part) for _ in range(self.size)]
        self._run(lambda: self._gloo.gather([] if found is None else [found], [part]))
        return found

    def tell(self, message: bytes) -> None:
        """Send bytes to all other ranks, which hear them. Rank 0 alone calls it."""
        first = torch.zeros(_INLINE, dtype=torch.uint8)
        first[:_LENGTH] = torch.frombuffer(bytearray(len(message).to_bytes(_LENGTH, "little")), dtype=torch.uint8)
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        room = _INLINE - _LENGTH
        first[_LENGTH : _LENGTH + min(len(message), room)] = content[:room]
        self._broadcast(first)
        if len(message) > room:
            self._broadcast(content[room:].contiguous())

    def hear(self) -> bytes:
        """Return what rank 0 tells next."""
        first = torch.empty(_INLINE, dtype=torch.uint8)
        self._broadcast(first)
        found = first.numpy().tobytes()
        length, room = int.from_bytes(found[:_LENGTH], "little"), _INLINE - _LENGTH
        if length <= room:
            return found[_LENGTH : _LENGTH + length]
        rest = torch.empty(length - room, dtype=torch.uint8)
        self._broadcast(rest)
        return found[_LENGTH:] + rest.numpy().tobytes()

    def _broadcast(self, x: Tensor) -> None:
        self._run(lambda: self._gloo.broadcast([x]))

    def _run(self, begin: Callable[[], Any]) -> None:
        """Run a collective to its end. Raises EngineError that names a rank that does not take part."""
        self._num_entered += 1
        try:
            begin().wait()
        except RuntimeError as error:
            raise self._failure(error) from None

    def _failure(self, error: RuntimeError) -> EngineError:
        """Return what to raise for an error of gloo, whose words only the log gets. Raises what `check` finds."""
        self.is_broken = True
        _log.error("rank %d has lost the other ranks: %s", self.rank, str(error).partition("\n")[0])
        if self.rank:
            return EngineError("the connection to another rank of the tensor-parallel model has broken")
        answers = call_roll(self._store, self.size, self._check)
        return EngineError(verdict(answers, self.size, self._num_entered, self._answer_s))

    def _use_store(self, use: Callable[[], Found]) -> Found:
        try:
            return use()
        except RuntimeError as error:
            _log.error("rank %d has lost the store: %s", self.rank, str(error).partition("\n")[0])
            raise EngineError("the store where the ranks of the tensor-parallel model meet is gone") from None


def group_here(
    rank: int, size: int, meeting: int, check: Callable[[], None] = lambda: None, *, answer_s: float = ANSWER_S
) -> RankGroup:
    """Return this rank of those that rank 0 starts on this machine. meeting: of open_meeting."""
    store = store_of(meeting)
    return RankGroup(rank, size, store, check, secret=secret_of(store), answer_s=answer_s)


def torchrun_group(place: RankPlace, check: Callable[[], None] = lambda: None) -> RankGroup:
    """Return this rank of those that torchrun has started, which keeps their store. Raises ConfigError."""
    return RankGroup(place.rank, place.size, torchrun_store(place), check)
