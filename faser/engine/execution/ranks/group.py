"""RankGroup: the ranks of one model, over torch.distributed with gloo.

They meet at a store, which rank 0 keeps: there it leaves what to load, and the others what became of it. From then
on every collective is called by all ranks in the same order. Rank 0 waits for the others a few seconds at most, so
that one that is dead or stuck ends the engine, which is started again; the others wait for rank 0 as long as it
lives, for it is their parent, or torchrun's.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from faser.config.environment import RankPlace, talk_on_this_machine
from faser.errors import ConfigError, EngineError

ANSWER_S = 8.0  # for which rank 0 waits in a collective
_POLL_S = 0.1
_LONG = timedelta(days=30)
_MEETING = timedelta(seconds=60)  # once all ranks have loaded their parts
_HERE = "127.0.0.1"
_INLINE = 4096  # bytes that one broadcast carries, most of a step's messages
_LENGTH = 8


class RankGroup:
    """See the module. check: raises EngineError that names a rank that has ended; called while rank 0 waits.

    Implements Collectives, once `connect` has returned.
    """

    def __init__(self, rank: int, size: int, store: Store, check: Callable[[], None] = lambda: None) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._check = check
        self._steps: Any = None

    # Before all ranks have their parts.

    def leave(self, name: str, value: str) -> None:
        """For other ranks to find."""
        self._store.set(name, value)

    def has(self, name: str) -> bool:
        """Whether a rank has left it."""
        return bool(self._store.check([name]))

    def find(self, name: str) -> str:
        """What another rank has left; waits for it."""
        while not self.has(name):
            self._check()
            time.sleep(_POLL_S)
        return self._store.get(name).decode()

    def connect(self) -> None:
        """Every rank calls it when it has its part of the model, and waits for the others."""
        dist.init_process_group("gloo", store=self._store, rank=self.rank, world_size=self.size, timeout=_MEETING)
        patience = _LONG if self.rank else timedelta(seconds=ANSWER_S)
        self._steps = dist.new_group(backend="gloo", timeout=patience)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    # Collectives.

    def all_reduce(self, x: Tensor) -> Tensor:
        with self._reported():
            dist.all_reduce(x, group=self._steps)
        return x

    def gather(self, part: Tensor) -> list[Tensor] | None:
        found = None if self.rank else [torch.empty_like(part) for _ in range(self.size)]
        with self._reported():
            dist.gather(part, found, dst=0, group=self._steps)
        return found

    def tell(self, message: bytes) -> None:
        """Send bytes to all other ranks, which hear them. Rank 0 alone calls it."""
        first = torch.zeros(_INLINE, dtype=torch.uint8)
        first[:_LENGTH] = torch.frombuffer(bytearray(len(message).to_bytes(_LENGTH, "little")), dtype=torch.uint8)
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        room = _INLINE - _LENGTH
        first[_LENGTH : _LENGTH + min(len(message), room)] = content[:room]
        with self._reported():
            dist.broadcast(first, 0, group=self._steps)
            if len(message) > room:
                dist.broadcast(content[room:].contiguous(), 0, group=self._steps)

    def hear(self) -> bytes:
        """What rank 0 tells next."""
        first = torch.empty(_INLINE, dtype=torch.uint8)
        dist.broadcast(first, 0, group=self._steps)
        found = first.numpy().tobytes()
        length, room = int.from_bytes(found[:_LENGTH], "little"), _INLINE - _LENGTH
        if length <= room:
            return found[_LENGTH : _LENGTH + length]
        rest = torch.empty(length - room, dtype=torch.uint8)
        dist.broadcast(rest, 0, group=self._steps)
        return found[_LENGTH:] + rest.numpy().tobytes()

    def _reported(self) -> "_Reported":
        return _Reported(self._check)


class _Reported:
    """Makes an EngineError of what torch.distributed raises: a rank has ended, or does not answer."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            self._check()
            raise EngineError(
                f"a rank of the tensor-parallel model is gone, or has not answered for {ANSWER_S:.0f} s: "
                f"{str(error).partition(chr(10))[0]}"
            ) from None


def meeting_place(rank: int, size: int, port: int) -> TCPStore:
    """The store of ranks on this machine, which rank 0 keeps. port: 0: any free one.

    Raises ConfigError where it cannot be had.
    """
    talk_on_this_machine()
    return _store(_HERE, port, size, keeps=rank == 0)


def torchrun_group(place: RankPlace, check: Callable[[], None] = lambda: None) -> RankGroup:
    """The ranks that torchrun has started, which keeps their store. Raises ConfigError as meeting_place does."""
    store = PrefixStore(f"faser/{place.life}", _store(place.host, place.port, place.size, keeps=False))
    return RankGroup(place.rank, place.size, store, check)


def _store(host: str, port: int, size: int, *, keeps: bool) -> TCPStore:
    try:
        return TCPStore(host, port, size, keeps, timeout=_LONG, wait_for_workers=False)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the ranks of the model cannot meet at {host}:{port}: {reason}") from None
