"""The counts of a real device, against each other.

Whether a CUDA device can be used, and what only CUDA has: a wide product, carveouts, graph capture.
"""

import pytest
import torch

from faser.errors import ConfigError
from faser.kernels.cuda.device import (
    CudaDevice,
    CudaFacts,
    CudaMemory,
    DeviceMemory,
    cublas_carveout,
    cuda_facts,
    is_carved_out,
    open_cuda,
    stream_of,
)
from faser.kernels.interface.shapes import DeviceLane
from tests.kernels.cuda.fake_memory import FakeMemory

MIB = 1 << 20


def test_the_fake_has_the_face_of_the_real_thing() -> None:
    fake: DeviceMemory = FakeMemory(total_bytes=1)
    assert fake.free_bytes() == fake.total_bytes
    assert {name for name in vars(CudaMemory) if not name.startswith("_")} <= set(dir(fake))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_what_a_tensor_takes_is_held_then_kept_then_released() -> None:
    memory: DeviceMemory = CudaMemory(torch.device("cuda", 0))
    memory.release()
    memory.reset_peak()
    held = memory.held_bytes()
    tensor = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:0")
    assert memory.held_bytes() - held >= 64 * MIB
    del tensor
    assert memory.peak_bytes() - held >= 64 * MIB
    memory.release()
    memory.reset_peak()
    assert memory.held_bytes() == memory.peak_bytes() == held
    assert 0 < memory.free_bytes() < memory.total_bytes


HOPPER, TURING = (9, 0), (7, 5)


def facts(*capabilities: tuple[int, int], build: str | None = "13.0") -> CudaFacts:
    return CudaFacts(build=build, capabilities=capabilities)


@pytest.mark.parametrize("device, index", [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_usable_device_is_returned_with_its_index(device: str, index: int) -> None:
    assert open_cuda(device, facts(HOPPER, (8, 0))) == torch.device("cuda", index)


@pytest.mark.parametrize(
    "device, found, problem",
    [
        ("cuda", facts(build=None), "device is cuda; torch .* is built without CUDA"),
        ("cuda", facts(), r"device is cuda; torch finds no CUDA device \(a driver for CUDA 13.0\?\)"),
        ("cuda:1", facts(HOPPER), "device is cuda:1; this machine has 1 CUDA devices"),
        ("cuda:1", facts(HOPPER, TURING), "device is cuda:1, of compute capability 7.5; at least 8.0 is needed"),
    ],
)
def test_what_is_missing_is_named(device: str, found: CudaFacts, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_cuda(device, found)


def test_there_is_a_capability_for_every_device_of_this_machine() -> None:
    assert len(cuda_facts().capabilities) == torch.cuda.device_count()


def test_the_wide_product_is_one_that_torch_knows() -> None:
    """On tensors without memory: torch checks shapes and types, and computes nothing."""
    x = torch.empty(2, 8, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(3, 8, dtype=torch.bfloat16, device="meta")
    out = torch.empty(2, 3, device="meta")
    found = CudaDevice(torch.device("cuda", 0)).wide_product(x, weight.t(), out)
    assert (found.shape, found.dtype) == ((2, 3), torch.float32)


class Bindings:
    """torch's bindings, as far as they are used here."""

    def __init__(self) -> None:
        self.carveouts: list[int | None] = []
        self.library = self._BlasBackend.Default

    _BlasBackend = torch._C._BlasBackend

    def _set_sm_carveout_experimental(self, idle: int | None) -> None:
        self.carveouts.append(idle)

    def _get_sm_carveout_experimental(self) -> int | None:
        return self.carveouts[-1] if self.carveouts else None

    def _set_blas_preferred_backend(self, library: torch._C._BlasBackend) -> None:
        self.library = library

    def _get_blas_preferred_backend(self) -> torch._C._BlasBackend:
        return self.library


def test_the_carveout_is_set_within_the_context_only() -> None:
    """Plain products heed it in cuBLASLt alone. Caught: the library not set, or left set."""
    bindings = Bindings()
    with cublas_carveout(12, bindings):
        assert bindings.carveouts == [12]
        assert is_carved_out(bindings)
        assert bindings.library is torch._C._BlasBackend.Cublaslt
    with pytest.raises(ZeroDivisionError), cublas_carveout(36, bindings):
        raise ZeroDivisionError
    assert bindings.carveouts == [12, None, 36, None]
    assert bindings.library is torch._C._BlasBackend.Default
    with cublas_carveout(0, bindings), cublas_carveout(12, object()):
        assert bindings.carveouts[4:] == []
        assert not is_carved_out(bindings)
        assert not is_carved_out(object())


def test_torch_has_the_carveout_and_the_choice_of_a_library() -> None:
    assert torch._C._get_blas_preferred_backend() is not torch._C._BlasBackend.Cublaslt
    assert {name for name in vars(Bindings) if name.startswith("_") and name[1] != "_"} <= set(dir(torch._C))
    torch._C._set_sm_carveout_experimental(12)
    try:
        assert is_carved_out()
    finally:
        torch._C._set_sm_carveout_experimental(None)
    assert not is_carved_out()


def test_a_lanes_stream_must_be_a_stream_of_torch() -> None:
    assert issubclass(torch.cuda.ExternalStream, torch.cuda.Stream)
    lane = DeviceLane(name="draft", share=0.25, num_processors=36, stream="no stream")
    with pytest.raises(AssertionError, match="the draft lane's stream is 'no stream'"):
        stream_of(lane, torch.device("cuda", 0))
