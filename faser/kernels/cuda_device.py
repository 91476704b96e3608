"""One CUDA device: whether it can be used, and the few things that only CUDA has.

Owns pinned memory, transfers and events. Knows nothing of attention or of the library whose kernels run there.
Importing this module starts nothing on a device.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from faser.errors import ConfigError

LOWEST_CAPABILITY = (8, 0)  # bfloat16 products and the attention kernels begin with Ampere


class Fence(Protocol):
    """A point in the work given to a device."""

    def wait(self) -> None:
        """Return when everything given to the device's stream before the fence was made is done."""
        ...


class Accelerator(Protocol):
    """What a backend asks of its device beside kernels. Everything is in order of the caller's current stream."""

    @property
    def device(self) -> torch.device: ...

    def host_numbers(self, count: int) -> Tensor:
        """[count] int32 on the CPU, uninitialised, from where transfers need no second copy."""
        ...

    def upload(self, numbers: Tensor) -> Tensor:
        """A copy on the device of what host_numbers gave. Does not wait: the source must keep its values."""
        ...

    def fence(self) -> Fence: ...

    def wide_product(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """out = x @ weight, never rounded to less than float32. x: [R, K], weight: [K, N] 16 bit; out: float32."""
        ...


@dataclass(frozen=True, slots=True)
class _EventFence:
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()


class CudaDevice:
    """See Accelerator. device: as open_cuda checked it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host_numbers(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, pin_memory=True)

    def upload(self, numbers: Tensor) -> Tensor:
        """torch lends pinned memory out again only when the transfers that read it are done."""
        return numbers.to(self.device, non_blocking=True)

    def fence(self) -> Fence:
        return _EventFence(torch.cuda.current_stream(self.device).record_event())

    def wide_product(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        return torch.mm(x, weight, out_dtype=torch.float32, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFacts:
    """What torch can say of CUDA here.

    build: the CUDA version that torch was built for; None: none. capabilities: (major, minor) of every device.
    """

    build: str | None
    capabilities: tuple[tuple[int, int], ...]


def cuda_facts() -> CudaFacts:
    """Asks torch, and through it the driver."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return CudaFacts(
        build=torch.version.cuda,
        capabilities=tuple(torch.cuda.get_device_capability(index) for index in range(count)),
    )


def open_cuda(device: str, facts: CudaFacts) -> torch.device:
    """The device called cuda or cuda:N, with its number.

    Raises ConfigError that names what is missing: torch's CUDA build, a device, that device, its capability.
    """
    wanted = torch.device(device)
    assert wanted.type == "cuda", device
    if facts.build is None:
        raise ConfigError(f"device is {device}; torch {torch.__version__} is built without CUDA")
    if not facts.capabilities:
        raise ConfigError(f"device is {device}; torch finds no CUDA device (a driver for CUDA {facts.build}?)")
    index = wanted.index or 0
    if index >= len(facts.capabilities):
        raise ConfigError(f"device is {device}; this machine has {len(facts.capabilities)} CUDA devices")
    if facts.capabilities[index] < LOWEST_CAPABILITY:
        have, need = (f"{major}.{minor}" for major, minor in (facts.capabilities[index], LOWEST_CAPABILITY))
        raise ConfigError(f"device is {device}, of compute capability {have}; at least {need} is needed")
    return torch.device("cuda", index)
