"""Collectives of ranks that each have a CUDA device: NCCL, and one kernel over peers' memory for small sums.

    sum of up to 512 KiB    one kernel reads the parts of all ranks over NVLink or PCIe (torch's symmetric memory),
                            where every device of the ranks reads the memory of every other one
    all else                NCCL

Both run on the caller's stream, in and outside of CUDA graphs. Every rank gets the same bits: NCCL adds up each
element in one place, and the kernel adds in the order of the ranks on each of them. All ranks find out together
which way there is. The target of ranks uses one lane, so there is one communicator.

The kernel is one_shot_all_reduce of torch's CUDASymmetricMemoryOps.cu; its order was read in load_and_reduce.
"""

import logging
import secrets
from collections.abc import Callable
from datetime import timedelta
from itertools import permutations
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, PrefixStore, ReduceOp, Store

from faser.errors import ConfigError

ONE_SHOT_BYTES = 512 << 10
_MOST_ONE_SHOT = 8  # ranks: each reads the parts of all others
_ONE_SHOT_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16  # bytes
_PATIENCE = timedelta(minutes=30)  # for which NCCL waits for a rank, which may compile kernels

_log = logging.getLogger("faser.engine")


class Transport(Protocol):
    """NCCL, or what stands for it in tests."""

    def all_reduce(self, x: Tensor, op: Any = ReduceOp.SUM) -> None:
        """Sum over all ranks, or what op says, in place."""
        ...

    def all_gather(self, part: Tensor, whole: Tensor) -> None:
        """whole: [ranks, *part.shape]."""
        ...

    def broadcast(self, x: Tensor) -> None: ...

    def close(self) -> None: ...


class PeerSums(Protocol):
    """Sums in one kernel that reads the memory of the other ranks' devices."""

    def all_reduce(self, x: Tensor) -> None:
        """Sum over all ranks, in place."""
        ...


class CudaCollectives:
    """Implements DeviceCollectives. device: of this rank.

    open_transport, open_peers: connect; each may raise RuntimeError. why_no_peers: why the devices cannot read
    each other's memory; None: they can.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        open_transport: Callable[[], Transport],
        open_peers: Callable[[], PeerSums],
        why_no_peers: Callable[[], str | None],
    ) -> None:
        self._rank, self._size = rank, size
        self._device = device
        self._open_transport, self._open_peers, self._why_no_peers = open_transport, open_peers, why_no_peers
        self._transport: Transport | None = None
        self._peers: PeerSums | None = None
        # For gathered parts, the last one in use: the largest step comes before captures, which know its place.
        self._rooms: list[Tensor] = []

    def connect(self) -> None:
        """See DeviceCollectives. The first sum, which connects NCCL, comes before any capture."""
        self._transport = self._open_transport()
        self._peers = self._agreed_peers(self._transport)
        if self._peers is not None:
            self._peers.all_reduce(torch.zeros(_ALIGNMENT, device=self._device))

    def _agreed_peers(self, transport: Transport) -> PeerSums | None:
        """Open the way for small sums if it is there for all ranks; each rank calls it."""
        reason = self._why_no_peers()
        if self._size > _MOST_ONE_SHOT:
            reason = f"{self._size} ranks are more than {_MOST_ONE_SHOT}"
        if not self._all(reason is None, transport):
            _log.info(
                "sums of ranks: NCCL for all sizes (%s)", reason or "another rank has no access to its peers"
            )
            return None
        found = None
        try:
            found = self._open_peers()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        if not self._all(found is not None, transport):
            _log.warning(
                "sums of ranks: NCCL for all sizes; symmetric memory cannot be used: %s",
                reason or "another rank cannot",
            )
            return None
        _log.info("sums of ranks: one kernel up to %d KiB, NCCL above", ONE_SHOT_BYTES >> 10)
        return found

    def _all(self, holds: bool, transport: Transport) -> bool:
        """Return whether it holds on all ranks."""
        flag = torch.tensor([int(holds)], dtype=torch.int32, device=self._device)
        transport.all_reduce(flag, ReduceOp.MIN)
        return bool(flag.item())

    def all_reduce(self, x: Tensor) -> Tensor:
        assert self._transport is not None, "the ranks are not connected"
        if self._peers is not None and is_small(x):
            self._peers.all_reduce(x)
        else:
            self._transport.all_reduce(x)
        return x

    def gather(self, part: Tensor) -> list[Tensor] | None:
        """See Collectives. The parts go to all ranks, which takes no longer over NVLink than to one.

        They are valid until the next call.
        """
        assert self._transport is not None, "the ranks are not connected"
        count = self._size * part.numel()
        if not self._rooms or len(self._rooms[-1]) < count or self._rooms[-1].dtype is not part.dtype:
            self._rooms.append(part.new_empty(count))
        whole = self._rooms[-1][:count].view(self._size, *part.shape)
        self._transport.all_gather(part, whole)
        return None if self._rank else [*whole.unbind()]

    def broadcast(self, x: Tensor) -> None:
        assert self._transport is not None, "the ranks are not connected"
        self._transport.broadcast(x)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._transport = self._peers = None
        self._rooms.clear()


def is_small(x: Tensor) -> bool:
    """Return whether the kernel over peers' memory takes this sum; it depends on what all ranks know."""
    return (
        0 < x.nbytes <= ONE_SHOT_BYTES
        and x.dtype in _ONE_SHOT_DTYPES
        and x.nbytes % _ALIGNMENT == 0
        and x.storage_offset() * x.itemsize % _ALIGNMENT == 0
    )


class Nccl:
    """Transport by NCCL on this rank's device, on the caller's stream."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        from torch._C import _distributed_c10d as c10d

        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = _PATIENCE
        self._group: Any = c10d.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
        self._group.eager_connect_single_device(device)
        self._sum, self._broadcast = AllreduceOptions(), BroadcastOptions()
        self._gather = c10d.AllgatherOptions()
        for each in (self._sum, self._broadcast, self._gather):
            each.asyncOp = False

    def all_reduce(self, x: Tensor, op: Any = ReduceOp.SUM) -> None:
        options = self._sum
        if op is not ReduceOp.SUM:
            options = AllreduceOptions()
            options.asyncOp, options.reduceOp = False, op
        self._group.allreduce([x], options)

    def all_gather(self, part: Tensor, whole: Tensor) -> None:
        self._group._allgather_base(whole, part, self._gather)

    def broadcast(self, x: Tensor) -> None:
        self._group.broadcast([x], self._broadcast)

    def close(self) -> None:
        self._group.abort()


class SymmetricSums:
    """PeerSums by torch's symmetric memory: the kernel copies x into it, reads all parts and writes their sum.

    It waits for the other ranks' kernels before it reads and before it ends, so the memory serves the next sum.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric
        from torch._C import _distributed_c10d as c10d
        from torch.distributed.distributed_c10d import GroupName

        # torch looks the group up by its name. It need not have collectives of its own.
        self._name = GroupName(f"faser-ranks-{secrets.token_hex(4)}")
        self._group = c10d.ProcessGroup(PrefixStore("symmetric memory", store), rank, size)
        self._group._set_group_name(self._name)
        c10d._register_process_group(self._name, self._group)
        self._room = symmetric.empty(ONE_SHOT_BYTES, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self._room, self._name)
        self._sum = torch.ops.symm_mem.one_shot_all_reduce_copy_out

    def all_reduce(self, x: Tensor) -> None:
        room = self._room[: x.nbytes].view(x.dtype).view(x.shape)
        self._sum(room, x, "sum", self._name, x)


def why_no_peers(devices: range, *, one_machine: bool) -> str | None:
    """Return why these devices cannot read each other's memory; None: they can."""
    if not one_machine:
        return "the ranks are on several machines"
    for one, other in permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(one, other):
            return f"cuda:{one} cannot read the memory of cuda:{other}"
    return None


def cuda_collectives(
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    devices: range,
    *,
    one_machine: bool,
    one_shot: bool = True,
) -> CudaCollectives:
    """Return this rank's collectives, not yet connected. devices: indices of those of the ranks on this machine.

    one_shot: whether one kernel may add up small sums. Raises ConfigError where torch has no NCCL.
    """
    if not torch.distributed.is_nccl_available():
        raise ConfigError(
            f"tensor_parallel_size is {size}; torch {torch.__version__} is built without NCCL, which adds up the "
            "parts of ranks on GPUs"
        )
    return CudaCollectives(
        rank,
        size,
        device,
        lambda: Nccl(store, rank, size, device),
        lambda: SymmetricSums(store, rank, size, device),
        lambda: why_no_peers(devices, one_machine=one_machine) if one_shot else "--disable-custom-all-reduce",
    )
