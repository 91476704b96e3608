"""Meeting place of the ranks of one model, and the connections that they make there.

Ranks that rank 0 has started meet at a file without a name, which they inherit: no other user can read or write
it. Gloo connects them over loopback, where every program of the machine may connect too, so each rank proves
to each other one, on the connection between them, that it knows the secret in that file.

Under torchrun the store and the network are torchrun's, and any process that reaches them is trusted.
"""

import hmac
import os
import secrets
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo, Store, TCPStore
from torch.distributed import DistStoreError

from faser.config.environment import RankPlace
from faser.errors import ConfigError, EngineError

_LONG = timedelta(days=30)
_MEETING = timedelta(seconds=60)  # once all ranks have loaded their parts
_LOOPBACK = "127.0.0.1"
_SECRET = "secret"


def open_meeting() -> int:
    """Return the descriptor of a new file at which ranks can meet; it has a secret.

    Keep it open as long as a store uses it. Linux alone has such files. Raises ConfigError.
    """
    try:
        descriptor = os.memfd_create("faser-ranks")
        store_of(descriptor).set(_SECRET, secrets.token_hex(32))
    except (OSError, DistStoreError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the ranks of the model have no file to meet at: {reason}") from None
    return descriptor


def store_of(meeting: int) -> Store:
    """Return the store in the file that open_meeting has made, here or in the parent of this process."""
    return FileStore(f"/proc/self/fd/{meeting}")


def secret_of(store: Store) -> bytes:
    """Return the secret of a store in a file."""
    return store.get(_SECRET)


def torchrun_store(place: RankPlace) -> Store:
    """Return the part of torchrun's store that belongs to this life of the ranks. Raises ConfigError."""
    try:
        store = TCPStore(place.host, place.port, place.size, False, timeout=_LONG, wait_for_workers=False)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the ranks of the model cannot meet at {place.host}:{place.port}: {reason}") from None
    return PrefixStore(f"faser/{place.life}", store)


def connect(store: Store, rank: int, size: int, secret: bytes) -> Any:
    """Return gloo's group of all ranks, each of which calls this.

    secret: empty: the ranks are torchrun's; else all listen on loopback alone. Raises RuntimeError if they do not
    meet; EngineError if one does not know the secret.
    """
    store = PrefixStore("gloo", store)
    if not secret:
        return ProcessGroupGloo(store, rank, size, _MEETING)
    kind: Any = ProcessGroupGloo  # its stubs name neither these options nor this constructor
    options = kind._Options()
    options._timeout, options._devices = _MEETING, [kind.create_device(hostname=_LOOPBACK)]
    group = kind(store, rank, size, options)
    _prove(group, rank, size, secret)
    return group


def _prove(group: Any, rank: int, size: int, secret: bytes) -> None:
    """Send each other rank a proof for the pair of both, and compare what it has sent."""

    def proof(giver: int, taker: int) -> bytes:
        return hmac.digest(secret, f"{giver} to {taker}".encode(), "sha256")

    given = b"".join(proof(rank, other) for other in range(size))
    wanted = b"".join(proof(other, rank) for other in range(size))
    sent = torch.frombuffer(bytearray(given), dtype=torch.uint8)
    found = torch.empty_like(sent)
    group.alltoall_base(found, sent, [], []).wait()
    if not hmac.compare_digest(found.numpy().tobytes(), wanted):
        raise EngineError("another program of this machine has connected in place of a rank of the model")
