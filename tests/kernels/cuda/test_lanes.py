"""The calls of the CUDA driver that divide a GPU, and what becomes of its results and refusals.

The bindings are a fake whose answers have the shapes that were read in cuda-bindings 13.0.3. Bugs seen caught: see
the tests.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from faser.kernels.cuda.lanes import CudaGreenDriver, GreenContextError, open_green_driver

DEVICE = torch.device("cuda", 1)
CALLS = [
    "cuDeviceGet",
    "cuDeviceGetDevResource",
    "cuDevSmResourceSplitByCount",
    "cuDevResourceGenerateDesc",
    "cuGreenCtxCreate",
    "cuGreenCtxStreamCreate",
    "cuStreamDestroy",
    "cuGreenCtxDestroy",
]


class Status(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNHEARD_OF = 999


class Kind(Enum):
    CU_DEV_RESOURCE_TYPE_INVALID = 0
    CU_DEV_RESOURCE_TYPE_SM = 1


class ContextFlags(IntEnum):
    CU_GREEN_CTX_DEFAULT_STREAM = 1


class StreamFlags(IntEnum):
    CU_STREAM_NON_BLOCKING = 1


@dataclass(frozen=True)
class Handle:
    address: int

    def __int__(self) -> int:
        return self.address


def resource(count: int) -> SimpleNamespace:
    """An empty resource: it has no type, and its count is arbitrary."""
    kind = Kind.CU_DEV_RESOURCE_TYPE_SM if count else Kind.CU_DEV_RESOURCE_TYPE_INVALID
    return SimpleNamespace(type=kind, sm=SimpleNamespace(smCount=count or 77))


@dataclass
class FakeBindings:
    """fails: the call that does, with that status. calls: name and arguments."""

    fails: str = ""
    total: int = 132
    status: Status = Status.CUDA_ERROR_NOT_SUPPORTED
    num_groups: int = 1
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    CUresult = Status
    CUdevResourceType = Kind
    CUgreenCtxCreate_flags = ContextFlags
    CUstream_flags = StreamFlags
    CUstream = Handle

    def cuGetErrorString(self, status: Status) -> tuple[Status, bytes | None]:
        known = status is Status.CUDA_ERROR_NOT_SUPPORTED
        return Status.CUDA_SUCCESS, b"operation not supported" if known else None

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return self._answer("cuDeviceGet", (ordinal,), f"device {ordinal}")

    def cuDeviceGetDevResource(self, device: object, kind: Kind) -> tuple[Any, ...]:
        return self._answer("cuDeviceGetDevResource", (device, kind), resource(self.total))

    def cuDevSmResourceSplitByCount(self, groups: int, whole: Any, flags: int, count: int) -> tuple[Any, ...]:
        size = -(-count // 8) * 8
        answers = ([resource(size)] * groups, self.num_groups, resource(whole.sm.smCount - size))
        return self._answer("cuDevSmResourceSplitByCount", (groups, whole, flags, count), *answers)

    def cuDevResourceGenerateDesc(self, resources: list[Any], count: int) -> tuple[Any, ...]:
        return self._answer("cuDevResourceGenerateDesc", (resources, count), ("described", resources[0]))

    def cuGreenCtxCreate(self, described: object, device: object, flags: int) -> tuple[Any, ...]:
        return self._answer("cuGreenCtxCreate", (described, device, flags), ("context", described))

    def cuGreenCtxStreamCreate(self, context: object, flags: int, priority: int) -> tuple[Any, ...]:
        return self._answer("cuGreenCtxStreamCreate", (context, flags, priority), Handle(4096))

    def cuStreamDestroy(self, stream: Handle) -> tuple[Any, ...]:
        return self._answer("cuStreamDestroy", (stream,))

    def cuGreenCtxDestroy(self, context: object) -> tuple[Any, ...]:
        return self._answer("cuGreenCtxDestroy", (context,))

    def _answer(self, name: str, arguments: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:
        self.calls.append((name, arguments))
        if name == self.fails:
            return (self.status, *(None for _ in values))
        return (Status.CUDA_SUCCESS, *values)


def a_whole_life(driver: CudaGreenDriver) -> Iterator[object]:
    """Every method once."""
    group, rest = driver.split(112)
    yield (group.count, rest.count)
    context = driver.context(rest)
    yield context
    stream = driver.stream(context, -2)
    yield stream
    driver.destroy_stream(stream)
    driver.destroy_context(context)


def test_a_group_and_the_rest_become_contexts_with_streams() -> None:
    """Caught: the group's context for the rest, a blocking stream, destroyed by its number."""
    bindings = FakeBindings()
    driver = CudaGreenDriver(DEVICE, bindings)
    assert driver.num_processors == 132
    counts, context, stream = a_whole_life(driver)
    assert (counts, stream) == ((112, 20), 4096)
    asked = dict(bindings.calls)
    assert [name for name, _ in bindings.calls] == CALLS
    assert asked["cuDeviceGet"] == (1,)
    assert asked["cuDeviceGetDevResource"] == ("device 1", Kind.CU_DEV_RESOURCE_TYPE_SM)
    (groups, whole, flags, count) = asked["cuDevSmResourceSplitByCount"]
    assert (groups, whole.sm.smCount, flags, count) == (1, 132, 0, 112)
    (resources, num_resources) = asked["cuDevResourceGenerateDesc"]
    assert ([each.sm.smCount for each in resources], num_resources) == ([20], 1)
    (described, device, flags) = asked["cuGreenCtxCreate"]
    assert (described, device, flags) == (("described", resources[0]), "device 1", 1)
    assert asked["cuGreenCtxStreamCreate"] == (context, 1, -2)
    assert asked["cuStreamDestroy"] == (Handle(4096),)
    assert asked["cuGreenCtxDestroy"] == (context,)


def test_counts_are_the_drivers_and_not_the_requested_ones() -> None:
    driver = CudaGreenDriver(DEVICE, FakeBindings())
    assert [each.count for each in driver.split(113)] == [120, 12]
    assert [each.count for each in driver.split(128)] == [128, 4]


def test_a_split_may_leave_nothing() -> None:
    """Caught: the count of a description that describes nothing."""
    driver = CudaGreenDriver(DEVICE, FakeBindings(total=128))
    assert [each.count for each in driver.split(128)] == [128, 0]


@pytest.mark.parametrize("call", CALLS)
def test_a_refusal_names_the_call_and_the_drivers_reason(call: str) -> None:
    """Caught: an unchecked status of a call that returns nothing else."""
    with pytest.raises(GreenContextError) as caught:
        list(a_whole_life(CudaGreenDriver(DEVICE, FakeBindings(fails=call))))
    assert str(caught.value) == f"{call}: CUDA_ERROR_NOT_SUPPORTED, operation not supported"


def test_a_status_without_a_description_is_named() -> None:
    bindings = FakeBindings(fails="cuGreenCtxCreate", status=Status.CUDA_ERROR_UNHEARD_OF)
    with pytest.raises(GreenContextError, match=r"^cuGreenCtxCreate: CUDA_ERROR_UNHEARD_OF$"):
        list(a_whole_life(CudaGreenDriver(DEVICE, bindings)))


def test_a_split_that_makes_no_group_is_refused() -> None:
    """The list of groups has a member even then. Caught: taking it."""
    driver = CudaGreenDriver(DEVICE, FakeBindings(num_groups=0))
    with pytest.raises(GreenContextError, match="0 groups of 112 among 132"):
        driver.split(112)


def test_bindings_or_drivers_that_lack_a_call_are_refused_by_its_name() -> None:
    class Old(FakeBindings):
        def cuDevSmResourceSplitByCount(self, *_: object) -> tuple[Any, ...]:
            raise RuntimeError('Function "cuDevSmResourceSplitByCount" not found')

    with pytest.raises(GreenContextError, match=r"^cuDevSmResourceSplitByCount: Function .* not found$"):
        CudaGreenDriver(DEVICE, Old()).split(112)
    with pytest.raises(GreenContextError, match=r"^cuDeviceGet: .*no attribute"):
        CudaGreenDriver(DEVICE, SimpleNamespace())


def test_bindings_that_are_not_installed_are_named() -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'cuda'", name="cuda")

    with pytest.raises(GreenContextError, match="takes the package cuda-bindings: No module named 'cuda'"):
        open_green_driver(DEVICE, missing)
    assert open_green_driver(DEVICE, FakeBindings).num_processors == 132
