"""The counts of a real device, against each other."""

import pytest
import torch

from faser.kernels.cuda.device import CudaMemory, DeviceMemory
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
