"""The lanes of a GPU: streams, and green contexts, whose streams stay on a group of the processors.

One split divides the whole device into a *group*, on which kernels with thread block clusters can run, and a
remainder, which promises no clusters. From compute capability 9.0 on, a group has a multiple of 8 processors. A
*green context* makes a group usable, and its streams take the work; threads stay in the primary context, which is
torch's. The driver's names are those of CUDA 13.0 (cuda.h: "Green Contexts") and of cuda-bindings 13.0.3 and
13.5.0. Knows nothing of what is computed.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from faser.errors import ConfigError
from faser.kernels.cuda.device import CudaEvent, DeviceEvent

GROUP_UNIT = 8  # processors; a multiple of what any architecture needs


class LaneDevice(Protocol):
    """GPU as a partition needs it."""

    @property
    def num_processors(self) -> int:
        """Streaming multiprocessors."""
        ...

    def stream(self, priority: int) -> object:
        """A stream on all processors that waits for no other stream. priority: 0 or less, the least first."""
        ...

    def adopt(self, address: int) -> object:
        """The CUDA stream at an address, for torch. Its maker still owns it."""
        ...

    def on(self, stream: object) -> AbstractContextManager[object]:
        """Makes it the calling thread's current stream, and restores the previous one."""
        ...

    def event(self) -> DeviceEvent:
        """A new event with times, not recorded yet."""
        ...

    def elapsed_s(self, earlier: DeviceEvent, later: DeviceEvent) -> float:
        """Seconds of the device's clock between two events that the device has passed."""
        ...

    def wait(self) -> None:
        """Return when all work of all streams is done."""
        ...


class CudaLaneDevice:
    """GPU that a partition divides. device: with its index. Initialises CUDA on it."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda", device
        self._device = device
        torch.cuda.synchronize(device)

    @property
    def num_processors(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).multi_processor_count)

    def stream(self, priority: int) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]

    def adopt(self, address: int) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(address, device=self._device)  # type: ignore[no-untyped-call]

    def on(self, stream: object) -> AbstractContextManager[object]:
        assert isinstance(stream, torch.cuda.Stream), stream
        return torch.cuda.stream(stream)

    def event(self) -> CudaEvent:
        return CudaEvent(self._device, times=True)

    def elapsed_s(self, earlier: DeviceEvent, later: DeviceEvent) -> float:
        assert isinstance(earlier, CudaEvent), earlier
        assert isinstance(later, CudaEvent), later
        return earlier.elapsed_s(later)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)


class GreenContextError(ConfigError):
    """A device that cannot be divided: names the call that the driver refused, and its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """count: processors. resource: the driver's description of them, opaque."""

    count: int
    resource: object


class GreenDriver(Protocol):
    """The driver of one device. The caller destroys what it made, streams before their contexts.

    Every method raises GreenContextError where the driver refuses.
    """

    @property
    def num_processors(self) -> int: ...

    def split(self, count: int) -> tuple[Group, Group]:
        """Divide all processors into a group of at least `count`, rounded up to the device's unit, and the rest.

        Of 132 processors: split(112) gives 112 and 20, split(113) gives 120 and 12. The rest may be empty. Splits
        are independent: groups of two splits overlap.
        """
        ...

    def context(self, group: Group) -> object:
        """A green context; it is not made current on any thread."""
        ...

    def stream(self, context: object, priority: int) -> int:
        """The address of a new stream that waits for no other stream. priority: 0 or less, the least first."""
        ...

    def destroy_stream(self, stream: int) -> None: ...

    def destroy_context(self, context: object) -> None: ...


def open_stream(driver: GreenDriver, group: Group, made: ExitStack) -> int:
    """The address of a stream on a group, in a new context. made: receives what destroys both.

    Raises GreenContextError where the driver refuses.
    """
    context = driver.context(group)
    made.callback(driver.destroy_context, context)
    address = driver.stream(context, 0)
    made.callback(driver.destroy_stream, address)
    return address


class CudaGreenDriver:
    """Driver of green contexts. driver: the module cuda.bindings.driver. device: with its index.

    CUDA must be initialised on the device: green contexts keep a reference to the primary context, and would
    otherwise create it and destroy it again.
    """

    def __init__(self, device: torch.device, driver: Any) -> None:
        self._driver = driver
        self._device = self._ask("cuDeviceGet", device.index)
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        self._all = self._ask("cuDeviceGetDevResource", self._device, kind)

    @property
    def num_processors(self) -> int:
        return int(self._all.sm.smCount)

    def split(self, count: int) -> tuple[Group, Group]:
        # The list has as many members as requested, even where the driver made fewer groups: num_groups says.
        groups, num_groups, rest = self._ask("cuDevSmResourceSplitByCount", 1, self._all, 0, count)
        if num_groups != 1:
            raise GreenContextError(
                f"cuDevSmResourceSplitByCount: {num_groups} groups of {count} among {self.num_processors}"
            )
        return self._group(groups[0]), self._group(rest)

    def context(self, group: Group) -> object:
        described = self._ask("cuDevResourceGenerateDesc", [group.resource], 1)
        flag = self._driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        return self._ask("cuGreenCtxCreate", described, self._device, int(flag))

    def stream(self, context: object, priority: int) -> int:
        flag = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._ask("cuGreenCtxStreamCreate", context, int(flag), priority))

    def destroy_stream(self, stream: int) -> None:
        self._ask("cuStreamDestroy", self._driver.CUstream(stream))

    def destroy_context(self, context: object) -> None:
        self._ask("cuGreenCtxDestroy", context)

    def _group(self, resource: Any) -> Group:
        """An empty remainder has another resource type."""
        has_some = resource.type == self._driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        return Group(count=int(resource.sm.smCount) if has_some else 0, resource=resource)

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call the driver. Returns what follows the status: nothing, one value or several."""
        try:
            status, *values = getattr(self._driver, name)(*arguments)
        except (AttributeError, RuntimeError) as error:  # bindings or a driver that lack the call
            raise GreenContextError(f"{name}: {error}") from error
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise GreenContextError(f"{name}: {self._describe(status)}")
        return values[0] if len(values) == 1 else values

    def _describe(self, status: Any) -> str:
        _, text = self._driver.cuGetErrorString(status)
        return f"{status.name}, {text.decode()}" if text else str(status.name)


def _import() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def open_green_driver(device: torch.device, import_driver: Callable[[], Any] = _import) -> CudaGreenDriver:
    """The driver of a device that torch has initialised. Raises GreenContextError, also without cuda-bindings."""
    try:
        driver = import_driver()
    except ImportError as error:
        raise GreenContextError(f"dividing a GPU takes the package cuda-bindings: {error}") from error
    return CudaGreenDriver(device, driver)
